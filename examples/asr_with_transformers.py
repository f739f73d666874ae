"""Train a speech recogniser of transformers with settings that gputrain chooses.

    python examples/asr_with_transformers.py FOLDER [--model facebook/wav2vec2-xls-r-300m] [--gpu l4] [--steps 1000]

FOLDER holds recordings, each with a .txt of the same name, or a metadata.csv with lines `name|text` and the recordings
in wavs/. Without --model a small one with random weights is trained. With --gpu the settings for that GPU are printed,
and nothing is trained.
"""

import argparse
from pathlib import Path

import librosa
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import Trainer, TrainingArguments, Wav2Vec2Config, Wav2Vec2ForCTC

from gputrain.hw import create_optimal_config

LETTERS = " 'abcdefghijklmnopqrstuvwxyz"  # Letters are numbered from 1; 0 is the blank of CTC.
CTC = {"vocab_size": len(LETTERS) + 1, "pad_token_id": 0, "ctc_zero_infinity": True, "ctc_loss_reduction": "mean"}
SMALL = {"hidden_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 256}
SMALL |= {"conv_dim": (64,) * 7, "feat_extract_norm": "layer", "do_stable_layer_norm": True, "layerdrop": 0.0}


class Clips(list):
    """Pairs of a sound file and its text, read on access."""

    def __getitem__(self, number):
        path, text = super().__getitem__(number)
        wave, _ = librosa.load(path, sr=16_000)
        wave = (wave - wave.mean()) / (wave.std() + 1e-7)
        labels = [1 + LETTERS.index(letter) for letter in text.lower() if letter in LETTERS]
        return {"audio": {"array": wave, "sampling_rate": 16_000}, "labels": labels}


def read(folder: Path) -> list[tuple[Path, str]]:
    if (folder / "metadata.csv").exists():
        lines = (folder / "metadata.csv").read_text(encoding="utf-8").splitlines()
        return [(folder / "wavs" / f"{name}.wav", text) for name, text in (line.split("|")[:2] for line in lines)]
    texts = sorted(folder.rglob("*.txt"))
    return [(text.with_suffix(".wav"), text.read_text(encoding="utf-8").strip()) for text in texts]


def collate(items):
    waves = [torch.from_numpy(item["audio"]["array"]) for item in items]
    labels = pad_sequence([torch.tensor(item["labels"]) for item in items], batch_first=True, padding_value=-100)
    mask = pad_sequence([torch.ones(len(wave), dtype=torch.long) for wave in waves], batch_first=True)
    return {"input_values": pad_sequence(waves, batch_first=True), "attention_mask": mask, "labels": labels}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    for name, default in (("model", ""), ("gpu", None), ("batch-size", 32), ("steps", 1000), ("output", "outputs/asr")):
        parser.add_argument(f"--{name}", default=default, type=type(default or ""))
    requested = parser.parse_args()
    clips, small = read(requested.folder), Wav2Vec2Config(**CTC, **SMALL, apply_spec_augment=False)
    model = Wav2Vec2ForCTC.from_pretrained(requested.model, **CTC) if requested.model else Wav2Vec2ForCTC(small)
    config, manager = create_optimal_config(Clips(clips), model, requested.batch_size, gpu=requested.gpu)
    print(config)
    if requested.gpu:
        return
    settings = {
        "max_steps": requested.steps,
        "learning_rate": 3e-4,
        "logging_steps": 10,
        "remove_unused_columns": False,
    }
    arguments = TrainingArguments(requested.output, **config.training_arguments(by_length=True), **settings)
    kept = manager.prepare(Clips(clips), config)
    trainer = Trainer(model, arguments, train_dataset=kept, data_collator=collate, callbacks=[manager.callback()])
    manager.train_with_recovery(trainer, config=config)
    manager.save_config(config, Path(requested.output) / "optimal_config.json")


if __name__ == "__main__":
    main()
