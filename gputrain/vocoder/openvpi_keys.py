"""The table of openvpi's configuration keys, KEYS, with the options that they become.

It holds the keys that openvpi/SingingVocoders has in its NSF-HiFiGAN configurations, or reads with a default.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from gputrain.errors import UserError

Command = Literal["train", "prepare"]
Values = Mapping[str, object]  # The values of a whole file; nested keys are joined by dots.

BOTH: tuple[Command, ...] = ("train", "prepare")
TRAIN: tuple[Command, ...] = ("train",)
PREPARE: tuple[Command, ...] = ("prepare",)
NOTHING = object()  # Marks keys without a value for null.


@dataclass(frozen=True)
class Ignored:
    """Marks a key as ignored; the user is warned with the reason."""

    why: str


Outcome = dict[str, object] | Ignored


@dataclass(frozen=True)
class Key:
    """A key of openvpi's files. `turn` returns our options for its value and the whole file, or raises UserError with
    the reason against the value and a remedy."""

    name: str
    turn: Callable[[Any, Values], Outcome]
    options: tuple[str, ...] = ()  # Options that it may become.
    words: str = ""  # Description of the result for the page.
    remark: str = ""
    null: object = NOTHING  # Value that null stands for; NOTHING makes null an error.
    of: tuple[Command, ...] = TRAIN
    fate: Literal["honoured", "met", "refused"] = "honoured"


# Kinds of keys -------------------------------------------------------------------------------------------------------


def same(name: str, option: str = "", remark: str = "", null: object = NOTHING, of: tuple[Command, ...] = TRAIN) -> Key:
    """Returns a key whose value is that of our option (default name: the last part of the key)."""
    option = option or name.rpartition(".")[2]
    return Key(name, lambda value, file: {option: value}, (option,), remark=remark, null=null, of=of)


def chosen(
    name: str, choices: Mapping[Any, dict[str, object]], why: str, instead: str, *, prefix: str = "",
    of: tuple[Command, ...] = TRAIN,
) -> Key:  # fmt: skip
    """Returns a key with few values, with or without `prefix`, each of which stands for options; others are refused."""

    def turn(value: Any, file: Values) -> Outcome:
        value = value.removeprefix(prefix) if isinstance(value, str) else value
        if not isinstance(value, (str, int)) or isinstance(value, bool) or value not in choices:
            raise UserError(why, hint=instead)
        return choices[value]

    names = {option for options in choices.values() for option in options}
    values: dict[str, Any] = {}  # The first of equivalent values.
    for value, options in choices.items():
        values.setdefault(as_typed(options), value)
    words = "; ".join(f"`{value}`: {options}" for options, value in values.items())
    return Key(name, turn, tuple(sorted(names)), words, f"Anything else is refused: {why}.", of=of)


def as_typed(options: Mapping[str, object]) -> str:
    """Returns options as they are typed on the command line."""
    flags = []
    for option, value in options.items():
        flag = option.replace("_", "-")
        flags.append(f"--{'' if value else 'no-'}{flag}" if isinstance(value, bool) else f"--{flag} {value}")
    return f"`{' '.join(flags)}`"


def met(
    name: str, why: str, *values: object, otherwise: str = "", instead: str = "", null: object = NOTHING,
    of: tuple[Command, ...] = TRAIN,
) -> Key:  # fmt: skip
    """Returns a key that asks for our fixed behaviour: with these values, or with any if none are given."""

    def turn(value: Any, file: Values) -> Outcome:
        if values and value not in values:
            raise UserError(otherwise, hint=instead)
        return {}

    words = f"At {' or '.join(f'`{shown(value)}`' for value in values)}: {why}" if values else why
    because = "" if otherwise == why else f": {otherwise}"
    remark = f"Anything else is refused{because}." if values else ""
    return Key(name, turn, words=words, remark=remark, null=null, of=of, fate="met")


def shown(value: object) -> str:
    """Returns a value as in YAML."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def place(name: str, *shipped: object, null: object = NOTHING) -> Key:
    """Returns a key for the place of openvpi's files, which ours does not use."""
    why = "prepare-data has --input-dir and --output-dir for it, train-vocoder --data-path"

    def turn(value: Any, file: Values) -> Outcome:
        return {} if value in ("", [], *shipped) else Ignored(why)

    return Key(name, turn, words=why, remark="A warning is logged if it is set.", null=null, of=BOTH, fate="met")


def dead(name: str, shipped: object, why: str, instead: str) -> Key:
    """Returns a key that no code of openvpi's reads. Its value in their files is ignored with a warning."""

    def turn(value: Any, file: Values) -> Outcome:
        if value != shipped:
            raise UserError(why, hint=instead)
        return Ignored(why)

    return Key(name, turn, words=why, remark=f"`{shipped}`, as openvpi ships it, only logs a warning.", fate="refused")


# Keys that depend on others -------------------------------------------------------------------------------------------


CONSTANT = "lr_scheduler.scheduler.WarmupLR"
COSINE = "torch.optim.lr_scheduler.CosineAnnealingLR"


def is_fast(file: Values) -> bool:
    return "fast_task" in str(file.get("task_cls", "fast_task"))  # Our default too.


def periods(value: Any, file: Values) -> Outcome:
    """Ignores the value if the fast task has fast_mpd_periods, as openvpi does."""
    beaten = is_fast(file) and "model_args.fast_mpd_periods" in file
    return {} if beaten else {"discriminator_periods": value}


def fast_periods(value: Any, file: Values) -> Outcome:
    return {"discriminator_periods": value} if is_fast(file) else {}


def dilations(value: Any, file: Values) -> Outcome:
    if isinstance(value, str):
        return {"resblock_dilation_sizes": value}
    if not isinstance(value, list) or not all(isinstance(row, list) for row in value):
        raise UserError("expected a list of lists", hint="such as [[1, 3, 5], [1, 3, 5], [1, 3, 5]]")
    return {"resblock_dilation_sizes": ";".join(",".join(map(str, row)) for row in value)}


def clipping(value: Any, file: Values) -> Outcome:
    return {"gradient_clip": 0.0 if value is False else value}


def kept(value: Any, file: Values) -> Outcome:
    if value == 0:
        raise UserError("no checkpoint would be kept", hint="at least 1; -1 keeps all")
    return {"keep_checkpoints": 0 if value == -1 else value}


def rate_of_all(value: Any, file: Values) -> Outcome:
    return {"learning_rate": value, "discriminator_learning_rate": 0.0}


def sanity_steps(value: Any, file: Values) -> Outcome:
    """Translates Lightning's number of validation batches before training; 0 skips them, -1 runs all."""
    if isinstance(value, bool) or not isinstance(value, int) or value < -1:
        raise UserError("expected a number of validation steps", hint="0 to start without an evaluation, otherwise 1")
    return {"eval_first": value != 0}


def finetuning(value: Any, file: Values) -> Outcome:
    if not isinstance(value, bool):
        raise UserError("expected true or false")
    if value and not (file.get("finetune_ckpt_path") or file.get("init_from")):
        raise UserError(
            "finetune_ckpt_path names no file", hint="name the checkpoint to start from, or set it to false"
        )
    return {}


def pretrained(value: Any, file: Values) -> Outcome:
    return {} if value == "" or file.get("finetune_enabled") is False else {"init_from": value}


def steps(value: Any, file: Values) -> Outcome:
    """Translates the scheduler: constant after a warm-up, or a cosine, with a warm-up if the file sets one."""
    if value not in (CONSTANT, COSINE):
        raise UserError("after a warm-up the rate is constant or follows a cosine", hint=f"one of {CONSTANT}, {COSINE}")
    if value == CONSTANT:
        return {"learning_rate_schedule": "constant"}
    warms_up = "lr_scheduler_args.warmup_steps" in file or "warmup_steps" in file
    return {"learning_rate_schedule": "cosine", **({} if warms_up else {"warmup_steps": 0})}


def least_rate(value: Any, file: Values) -> Outcome:
    """Ignores the value for a cosine with eta_min."""
    return {} if is_cosine(file) and "lr_scheduler_args.eta_min" in file else {"min_learning_rate": value}


def end_of_cosine(value: Any, file: Values) -> Outcome:
    return {"min_learning_rate": value} if is_cosine(file) else {}


def length_of_cosine(value: Any, file: Values) -> Outcome:
    ends = (file.get("max_updates"), file.get("num_steps"))
    if is_cosine(file) and value not in ends:
        raise UserError("a cosine ends where training does", hint="leave it out, or set it to max_updates")
    return {}


def is_cosine(file: Values) -> bool:
    return file.get("lr_scheduler_args.scheduler_cls") == COSINE


OPTIMIZERS = {"torch.optim.AdamW": "adamw", "modules.optimizer.muon.Muon_AdamW": "muon"}
NO_OPTIMIZER = ("only AdamW and Muon are supported", f"one of {', '.join(OPTIMIZERS)}")


def optimizer(block: str, whose: str, prefix: str) -> list[Key]:
    """Returns the keys of the block of the generator's or the discriminators' optimizer."""
    decay = f"{prefix}weight_decay"

    def is_muon(file: Values) -> bool:
        return "Muon" in str(file.get(f"{block}.optimizer_cls", file.get("optimizer_cls", "")))

    def decay_of_all(value: Any, file: Values) -> Outcome:
        if not is_muon(file):
            return {decay: value}
        if value != 0 and f"{block}.adamw_args.weight_decay" not in file:
            raise UserError("parameters of AdamW have no decay with Muon", hint="write it as muon_args.weight_decay")
        return {} if f"{block}.muon_args.weight_decay" in file else {decay: value}

    def decay_of_matrices(value: Any, file: Values) -> Outcome:
        return {decay: value} if is_muon(file) else {}

    def decay_of_rest(value: Any, file: Values) -> Outcome:
        if is_muon(file) and value != 0:
            raise UserError("parameters of AdamW have no decay with Muon", hint="set it to 0")
        return {}

    shared = "Shared by both networks, so both blocks must have the same."
    for_muon = "Used with Muon_AdamW only."
    choices: dict[str, dict[str, object]] = {cls: {f"{whose}_optimizer": name} for cls, name in OPTIMIZERS.items()}
    return [
        chosen(f"{block}.optimizer_cls", choices, *NO_OPTIMIZER),
        same(f"{block}.lr", f"{prefix}learning_rate"),
        same(f"{block}.beta1", "beta1", shared),
        same(f"{block}.beta2", "beta2", shared),
        Key(f"{block}.weight_decay", decay_of_all, (decay,),
            remark="With Muon_AdamW, `muon_args.weight_decay` takes precedence."),
        Key(f"{block}.muon_args.weight_decay", decay_of_matrices, (decay,), remark=for_muon),
        Key(f"{block}.adamw_args.weight_decay", decay_of_rest, remark=f"{for_muon} Anything else is refused.",
            words="At `0`: parameters of AdamW have no decay with Muon", fate="met"),
        met(f"{block}.verbose", "nothing is printed", False, otherwise="nothing prints it", instead="set it to false"),
    ]  # fmt: skip


# The table ------------------------------------------------------------------------------------------------------------

TASKS: dict[str, dict[str, object]] = {
    "nsf_HiFigan_task.nsf_HiFigan": {"discriminators": "msd,mpd"},
    "nsf_HiFigan_fast_task.nsf_HiFigan": {"discriminators": "fast_mrd,fast_mpd"},
}
WORKS_HERE = "Has no effect in openvpi; works here."
SAME = """batch_size crop_mel_frames val_num volume_aug volume_aug_prob key_aug key_aug_prob aug_min aug_max pc_aug
 pc_aug_rate pc_aug_key audio_num_mel_bins fft_size win_size fmin fmax lab_aux_melloss lab_aux_stftloss use_stftloss
 loss_fft_sizes loss_hop_sizes loss_win_lengths mel_vmin mel_vmax seed finetune_strict_shapes"""
SAME_OF_MODEL = """mini_nsf noise_sigma upsample_rates upsample_kernel_sizes upsample_initial_channel
 resblock_kernel_sizes fast_mpd_init_channel fast_mpd_strides fast_mpd_kernel_size fast_mrd_init_channel
 fast_mrd_strides fast_mrd_fft_sizes fast_mrd_hop_sizes fast_mrd_win_lengths"""
FP32: dict[str, object] = {"mixed_precision": False}
FP16: dict[str, object] = {"mixed_precision": True, "use_bf16": False}
BF16: dict[str, object] = {"mixed_precision": True, "use_bf16": True}
PRECISIONS = {"32-true": FP32, "32": FP32, 32: FP32, "16-mixed": FP16, "16": FP16, 16: FP16, "bf16-mixed": BF16,
              "bf16": BF16}  # fmt: skip
ONE_CARD = "training runs in one process on one GPU"

TABLE = [
    # Model
    chosen("task_cls", TASKS, "the others train other models or use other losses", f"one of {', '.join(TASKS)}",
           prefix="training."),
    *[same(f"model_args.{name}") for name in SAME_OF_MODEL.split()],
    chosen("model_args.resblock", {"1": {"resblock": "1"}}, 'only kind "1" is supported, and openvpi uses its other '
           'kind for anything but the text "1"', 'write it with quotation marks, "1", or leave it out'),
    Key("model_args.resblock_dilation_sizes", dilations, ("resblock_dilation_sizes",)),
    Key("model_args.discriminator_periods", periods, ("discriminator_periods",)),
    Key("model_args.fast_mpd_periods", fast_periods, ("discriminator_periods",),
        remark="Takes precedence over `discriminator_periods` with the fast task, ignored with the other."),
    # Sound and data
    same("audio_sample_rate", of=BOTH),
    same("hop_size", of=BOTH),
    *[same(name) for name in SAME.split()],
    same("fmax_for_loss", remark="0 is half of the rate.", null=0.0),
    same("lab_aux_loss", "lab_aux_melloss"),
    same("num_valid_plots", remark=WORKS_HERE),
    same("aux_step", "discriminator_start", WORKS_HERE, null=0),
    met("aug_num", "one crop is cut from a clip at a time", 1, otherwise="no code of openvpi's reads it",
        instead="leave it out, or set it to 1"),
    # Optimizers
    *optimizer("generater_optimizer_args", "generator", ""),
    *optimizer("discriminate_optimizer_args", "discriminator", "discriminator_"),
    Key("lr", rate_of_all, ("learning_rate", "discriminator_learning_rate"),
        remark="Outside of a block: for both networks."),
    chosen("optimizer_cls", {cls: {"generator_optimizer": name, "discriminator_optimizer": name}
           for cls, name in OPTIMIZERS.items()}, *NO_OPTIMIZER),
    Key("lr_scheduler_args.scheduler_cls", steps, ("learning_rate_schedule",),
        f"`{CONSTANT}`: `--learning-rate-schedule constant`; `{COSINE}`: `--learning-rate-schedule cosine`",
        f"{WORKS_HERE} Anything else is refused."),
    same("lr_scheduler_args.warmup_steps", remark=WORKS_HERE),
    Key("lr_scheduler_args.min_lr", least_rate, ("min_learning_rate",), remark=WORKS_HERE),
    Key("lr_scheduler_args.eta_min", end_of_cosine, ("min_learning_rate",),
        remark=f"{WORKS_HERE} Used with a cosine only."),
    Key("lr_scheduler_args.T_max", length_of_cosine, remark="Anything else is refused.",
        words="At the value of `max_updates`: a cosine ends where training does", fate="met"),
    Key("clip_grad_norm", clipping, ("gradient_clip",), null=0.0,
        remark=f"{WORKS_HERE} `off` is 0."),
    same("accumulate_grad_batches", "accumulation_steps", WORKS_HERE),
    # Schedule
    same("max_updates", "num_steps", "Steps of the generator; openvpi counts those of the discriminators too."),
    same("ds_workers", "num_workers"),
    same("dataloader_prefetch_factor", "prefetch_factor"),
    same("val_check_interval", "evaluate_steps", "Each evaluation keeps a checkpoint."),
    same("log_interval", "log_freq"),
    Key("num_ckpt_keep", kept, ("keep_checkpoints",), remark="-1 keeps all, as our 0 does."),
    same("permanent_ckpt_start", "permanent_start", null=0),
    same("permanent_ckpt_interval", "permanent_interval"),
    Key("num_sanity_val_steps", sanity_steps, ("eval_first",),
        "`0`: `--no-eval-first`; any other number: a run begins with a whole evaluation"),
    Key("finetune_enabled", finetuning, words="`false`: `finetune_ckpt_path` is ignored"),
    Key("finetune_ckpt_path", pretrained, ("init_from",), null=""),
    same("finetune_ignored_params", null=[]),
    met("freezing_enabled", "all parameters are trained", False, otherwise="no part of a network can be frozen",
        instead="set it to false; --discriminator-warmup-steps protects a pretrained generator"),
    met("frozen_params", "without freezing_enabled, which is refused, it does nothing", null=[]),
    # Hardware
    chosen("pl_trainer_accelerator", {"auto": {"device": "auto"}, "gpu": {"device": "cuda"}, "cuda": {"device": "cuda"},
           "cpu": {"device": "cpu"}}, "training runs on CUDA or the CPU", "auto, gpu or cpu"),
    chosen("pl_trainer_precision", PRECISIONS, "weights are fp32, with or without 16-bit arithmetic",
           "32-true, 16-mixed or bf16-mixed"),
    met("pl_trainer_devices", ONE_CARD, "auto", 1, "1", [0], otherwise=ONE_CARD,
        instead="set it to 1; the variable CUDA_VISIBLE_DEVICES selects the GPU"),
    met("pl_trainer_num_nodes", ONE_CARD, 1, otherwise=ONE_CARD, instead="set it to 1"),
    *[met(f"pl_trainer_strategy.{name}", f"{ONE_CARD}, which needs no strategy", value, otherwise=ONE_CARD,
          instead=f"leave it out, or set it to {shown(value)}")
      for name, value in (("name", "auto"), ("process_group_backend", "nccl"), ("find_unused_parameters", True))],
    met("nccl_p2p", f"{ONE_CARD}, so nothing is sent between GPUs", True, otherwise=ONE_CARD,
        instead="leave it out, or set it to true"),
    # Preparation
    chosen("pe", {"parselmouth": {"f0_method": "parselmouth"}, "harvest": {"f0_method": "pyworld"}},
           "openvpi supports these two", "parselmouth or harvest, or leave it out and name our f0_method", of=PREPARE),
    same("f0_min", of=PREPARE),
    same("f0_max", of=PREPARE),
    same("binarization_args.num_workers", remark=WORKS_HERE, of=PREPARE),
    met("binarization_args.shuffle", "training always shuffles, independently of the order in the store", True,
        otherwise="training always shuffles", instead="leave it out, or set it to true", of=PREPARE),
    place("data_input_path"),
    place("data_out_path"),
    place("raw_data_dir"),
    place("binary_data_dir", null=""),
    place("DataIndexPath", "data"),
    place("train_set_name", "train"),
    place("valid_set_name", "valid"),
    # Refused
    dead("sampler_frame_count_grid", 6, "no code of openvpi's reads it: batches are of batch_size crops",
         "leave it out"),
    met("gan_d_scale", "each network has its own optimizer", 1, otherwise="it belongs to openvpi's task of one step",
        instead="leave it out; --discriminator-learning-rate sets how fast the discriminators learn"),
]  # fmt: skip
KEYS = {key.name: key for key in TABLE}
