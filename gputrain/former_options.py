"""Options that earlier versions had: those that have another name now, and those that were left out.

Configuration files and checkpoints are read with them (`with_current_options`). A flag, or a value that would change
what is trained, is refused with what to do now (`explain_former`).
"""

from collections.abc import Mapping
from typing import Any, NamedTuple


class LeftOut(NamedTuple):
    """An option that was left out. At its former default nothing changes without it."""

    default: object
    instead: str
    changes_training: bool = True  # Otherwise runs with any value of it are resumed.
    is_switch: bool = False  # True for a flag without a value whose default was None.


# By kind of model; "" is of all kinds, and of commands without a kind.
RENAMED: Mapping[str, Mapping[str, str]] = {
    "": {
        "log_freq": "log_every_steps",
        "save_samples_freq": "sample_every_steps",
        "evaluate_freq": "evaluate_every_epochs",
        "evaluate_steps": "evaluate_every_steps",
        "checkpoint_freq": "checkpoint_every_epochs",
        "checkpoint_steps": "checkpoint_every_steps",
        "checkpoint_minutes": "checkpoint_every_minutes",
    },
    "vae": {"lean": "recompute_norms"},
    "vocoder": {"discriminator_warmup_steps": "discriminator_only_steps"},
    "tts": {"data_dir": "data_path", "batch_room": "max_batch_audio_ratio"},
    "asr": {"data_dir": "data_path", "batch_room": "max_batch_audio_ratio"},
}

ALTERNATING = LeftOut("simultaneous", "leave it out: alternating steps took longer and taught no more")
EQUIVARIANT = "leave it out: in a race it gained nothing that a denoiser noticed"
NOISE = "leave it out, and prepare changed copies of recordings beside the recordings"
LIMIT = LeftOut(0.0, "leave it out: max_batch_audio_ratio limits the sound of a batch")
DROPOUT = LeftOut(0.0, "leave it out: hidden_dropout and layer_drop regularise a recogniser")
BEST = "leave it out: evaluations are in metrics.jsonl, and --checkpoint names the one to use"
READS = "leave it out: evaluate --recogniser MODEL measures a trained voice"
LEFT_OUT: Mapping[str, Mapping[str, LeftOut]] = {
    "": {
        "overwrite": LeftOut(False, "leave it out, and name a new folder: --output-dir NEW_FOLDER"),
        "cue_gap": LeftOut(1.0, "leave it out: subtitles of a sentence at most a second apart become one clip"),
        "hold_share": LeftOut(0.4, "leave it out: tri-stage holds the learning rate for 0.4 of the steps"),
        "profile": LeftOut(False, "leave it out: torch.profiler records a training as docs/vae.md shows", False),
        "track": LeftOut([], "leave it out: tensorboard and `gputrain watch` read what a run writes", False),
        "plan_file": LeftOut(None, "leave it out: each training plans for the machine that it runs on", False),
        "alphabet": LeftOut(None, "leave it out: Uzbek texts in any of its alphabets are read as that of 1995"),
    },
    "vae": {
        "resolution_schedule": LeftOut("", "leave it out, and train at each --image-size with a command of its own"),
        "eq_probability": LeftOut(0.0, EQUIVARIANT),
        "eq_weight": LeftOut(1.0, EQUIVARIANT),
        "step_order": ALTERNATING,
        "lpips_crop": LeftOut(256, "leave it out: LPIPS compares random crops of 256 pixels"),
        "adversarial_loss": LeftOut("hinge", "leave it out: the adversarial loss is the hinge loss"),
        "adaptive_weight_limit": LeftOut(10.0, "leave it out, and set adversarial_weight"),
        "discriminator_norm": LeftOut("group", "leave it out: the discriminator has group norms"),
        "data_in_memory": LeftOut(None, "leave it out: pictures that are prepared decode faster", False, True),
    },
    "vocoder": {"step_order": ALTERNATING},
    "tts": {
        "batch_seconds": LIMIT,
        "best_by": LeftOut("distance", BEST),
        "use_mrd": LeftOut(False, "leave it out: a voice is trained with HiFi-GAN's discriminators"),
        "add_speaker": LeftOut("", "leave it out, and train with --init-from on data of all speakers"),
        "train_part": LeftOut("all", "leave it out: all parts are trained"),
        "step_order": ALTERNATING,
        "mos_predictor": LeftOut(None, READS),
        "mos_sampling_rate": LeftOut(0, READS),
        "recogniser": LeftOut(None, READS, False),
        "check_with": LeftOut(None, READS, False),
    },
    "asr": {
        "batch_seconds": LIMIT,
        "best_by": LeftOut("cer", BEST),
        "attention_dropout": DROPOUT,
        "final_dropout": DROPOUT,
        "mask_feature_prob": LeftOut(0.0, "leave it out: SpecAugment masks frames, mask_time_prob"),
        "mask_feature_length": LeftOut(10, "leave it out: SpecAugment masks frames, mask_time_length"),
        "optimizer": LeftOut("adamw", "leave it out: AdamW trains; --adapters lora takes less memory"),
        "num_text_samples": LeftOut(8, "leave it out: the transcripts of 8 clips are shown", False),
        "speed_change": LeftOut(0.0, NOISE),
        "noise_probability": LeftOut(0.5, NOISE),
        "noise_snr_low": LeftOut(5.0, NOISE),
        "noise_snr_high": LeftOut(20.0, NOISE),
    },
}


def renamed(kind: str) -> dict[str, str]:
    """Return today's names of a kind's options by their former ones."""
    return {**RENAMED[""], **RENAMED.get(kind, {})}


def left_out(kind: str) -> dict[str, LeftOut]:
    """Return the options by name that a kind of model had, or all commands."""
    return {**LEFT_OUT[""], **LEFT_OUT.get(kind, {})}


def with_current_options(values: Mapping[str, Any], kind: str, *, is_stored: bool = False) -> dict[str, Any]:
    """Return the values of a file with today's names of options, and without those that change nothing any more: what
    was left out at its former default, and of a training that is stored also what did not change it."""
    names, gone = renamed(kind), left_out(kind)
    # Beside today's name, a former one is left as it is, and refused as an unknown key.
    found = {name if names.get(name) in values else names.get(name, name): value for name, value in values.items()}
    return {
        name: value
        for name, value in found.items()
        if name not in gone or not (value == gone[name].default or (is_stored and not gone[name].changes_training))
    }


def explain_former(name: str, kind: str) -> tuple[str, str] | None:
    """Return the message and the hint for an option that is none any more; None for any other name."""
    if name in (gone := left_out(kind)):
        return f"there is no option {name} any more", gone[name].instead
    if name in (names := renamed(kind)):
        return f"{name} has another name", f"it is {names[name]}"
    return None
