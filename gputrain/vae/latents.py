"""The factors by which a pipeline scales the latents of an autoencoder, and where those of a trained one come from.

A denoiser is trained on latents scaled by the factors in the config.json of its autoencoder, or, with
AutoencoderKLFlux2, on patches normalised by the statistics among its weights. An encoder that was not
trained makes the same latents as before, so the factors of its source stay; of other encoders they are measured.
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gputrain.errors import UserError
from gputrain.serialization import TRAIN_AGAIN, converted, from_json, unreadable
from gputrain.vae.architecture import PATCH

FACT = "latents"  # Key in the facts of a checkpoint.
STATISTICS = "bn"  # The module of AutoencoderKLFlux2 that holds the statistics of patches, without a weight.
BATCH_NORM_EPS = 1e-4
NEAR = 1.5  # Factor between a measured and a published scaling factor that may be of the same model.


@dataclass(frozen=True)
class PatchStatistics:
    """Mean and variance by channel of latents whose patches of 2x2 positions are channels, as AutoencoderKLFlux2 holds
    them: the denoiser of a pipeline gets (patches - mean) / sqrt(var + eps)."""

    mean: list[float]
    var: list[float]
    eps: float = BATCH_NORM_EPS
    batches: int = 1  # How many batches they are of; nothing reads it.

    @classmethod
    def of_tensors(cls, tensors: Mapping[str, Tensor], channels: int, eps: float = BATCH_NORM_EPS) -> "PatchStatistics":
        """Returns the statistics among the tensors of a file, of latents with `channels`. Raises KeyError if one is
        missing, ValueError if they are none of these latents."""
        mean, var = (tensors[f"{STATISTICS}.running_{name}"].float() for name in ("mean", "var"))
        shape = (channels * PATCH**2,)
        for name, values, least in (("mean", mean, -math.inf), ("var", var, 0.0)):
            if values.shape != shape:
                raise ValueError(f"{STATISTICS}.running_{name} is {(*values.shape,)}, expected {shape}")
            if not values.isfinite().all() or values.min() < least:
                raise ValueError(f"{STATISTICS}.running_{name}: not all values are those of a {name}")
        batches = tensors.get(f"{STATISTICS}.num_batches_tracked")
        return cls(mean.tolist(), var.tolist(), eps, 1 if batches is None else int(batches))

    def tensors(self) -> dict[str, Tensor]:
        """Returns them by diffusers' names."""
        return {
            f"{STATISTICS}.num_batches_tracked": torch.tensor(self.batches),
            f"{STATISTICS}.running_mean": torch.tensor(self.mean),
            f"{STATISTICS}.running_var": torch.tensor(self.var),
        }


@dataclass(frozen=True)
class LatentScaling:
    """Keys of diffusers' config.json: the denoiser of a pipeline gets (latents - shift_factor) * scaling_factor. Mean
    and standard deviation by channel are of few autoencoders. An AutoencoderKLFlux2 has `patches` instead, in its
    weights."""

    scaling_factor: float | None = None
    shift_factor: float | None = None
    latents_mean: list[float] | None = None
    latents_std: list[float] | None = None
    patches: PatchStatistics | None = None

    @classmethod
    def of_config(
        cls, config: Mapping[str, Any], path: Path, patches: PatchStatistics | None = None
    ) -> "LatentScaling":
        """Returns the factors of a config.json, with the statistics that are in the weights. Raises UserError if they
        are no numbers."""
        names = [field.name for field in fields(cls) if field.name != "patches"]
        values = {name: config[name] for name in names if config.get(name) is not None}
        try:
            if patches:
                patches = replace(patches, eps=converted(float, config["batch_norm_eps"], "batch_norm_eps"))
            return replace(from_json(cls, values, "it"), patches=patches)
        except ValueError as error:
            raise UserError(f"{path}: {error}", hint="use the file that belongs to the weights") from None

    def config(self) -> dict[str, Any]:
        """Returns the keys of config.json. Factors are left out where there are none: older diffusers do not know those
        by channel, and an AutoencoderKLFlux2 has none. Of others, no shift is a null."""
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "patches"}
        nulls = {"shift_factor"} if self.scaling_factor is not None else set()
        return {name: value for name, value in values.items() if value is not None or name in nulls}

    def __str__(self) -> str:
        texts = []
        if self.scaling_factor is not None:
            texts.append(f"scaling_factor {self.scaling_factor:.6g}")
            texts.append("no shift_factor" if self.shift_factor is None else f"shift_factor {self.shift_factor:.6g}")
        texts += [f"{name} by channel" for name in ("latents_mean", "latents_std") if getattr(self, name) is not None]
        if self.patches:
            texts.append(
                f"patches of 2x2 with {len(self.patches.mean)} channels, means {format_span(self.patches.mean)}, "
                f"variances {format_span(self.patches.var)}"
            )
        return ", ".join(texts)


def format_span(values: list[float]) -> str:
    return f"{min(values):.3g} to {max(values):.3g}"


class Family(NamedTuple):
    """Published models with the same factors: the number of channels of their latents, the names of tensors beside the
    autoencoder's in their files, and words in the names and headers of files."""

    name: str
    scaling: LatentScaling
    channels: int
    tensors: str
    words: str


# The factors are those of the config.json of each model's autoencoder on the Hub; names of tensors as in diffusers'
# CHECKPOINT_KEY_NAMES. The first that fits is taken: files of Playground 2.5 have the names of SDXL's, too.
FAMILIES = (
    Family("Stable Diffusion 3", LatentScaling(1.5305, 0.0609), 16, r"(^|\.)joint_blocks\.", r"sd-?_?3|diffusion-v?3"),
    Family("FLUX.1", LatentScaling(0.3611, 0.1159), 16, r"(^|\.)double_blocks\.", r"flux"),
    Family("Playground 2.5", LatentScaling(0.5), 4, r"^edm_mean$", r"playground"),
    Family("SDXL", LatentScaling(0.13025), 4, r"^conditioner\.", r"sdxl|diffusion-xl|(^|[-_.])xl([-_.]|$)"),
    Family(
        "Stable Diffusion 1 and 2",
        LatentScaling(0.18215),
        4,
        r"^cond_stage_model\.",
        r"vae-ft-(mse|ema)|kl-f8|sd-?_?v?[12]|diffusion-v?[12]|v[12]-[1-5]",
    ),
)


def family_of(names: Iterable[str], words: str, channels: int) -> Family | None:
    """Returns the family that the tensors of a file, or otherwise words of its name and header, tell."""
    names, words = list(names), words.lower()
    fitting = [family for family in FAMILIES if family.channels == channels]
    by_tensors = (family for family in fitting if any(re.search(family.tensors, name) for name in names))
    by_words = (family for family in fitting if re.search(family.words, words))
    return next(by_tensors, None) or next(by_words, None)


def nearest_family(measured: LatentScaling, channels: int) -> Family | None:
    """Returns the family whose scaling factor is nearest to the measured one; None if none is near."""

    def ratio(family: Family) -> float:
        published, found = family.scaling.scaling_factor, measured.scaling_factor
        return math.exp(abs(math.log(published / found))) if published and found else math.inf

    near = [family for family in FAMILIES if family.channels == channels and ratio(family) < NEAR]
    return min(near, key=ratio, default=None)


@dataclass(frozen=True)
class TrainedPictures:
    """The pictures of a run, on which the factors of its latents are measured."""

    data_path: list[str]
    image_size: int
    held_out_share: float


@dataclass(frozen=True)
class LatentSource:
    """The pretrained autoencoder that a run began with, as its checkpoints keep it in their facts.

    `scaling` are its factors, as `told_by` says; None if it does not have any, or its file does not say them.
    `published` is true of a file of another program. `pictures`: of a run of gputrain, whose factors are measured.
    `config`: the keys of its config.json that an export keeps.
    """

    source: str
    scaling: LatentScaling | None = None
    told_by: str = ""
    published: bool = False
    pictures: TrainedPictures | None = None
    encoder_trained: bool = False
    config: dict[str, Any] = field(default_factory=dict)

    def facts(self) -> dict[str, Any]:
        return {FACT: asdict(self)}

    @classmethod
    def of_facts(cls, facts: Mapping[str, Any], path: Path) -> "LatentSource | None":
        """Returns the source in the facts of a checkpoint; None if there is none, as of a run from scratch."""
        try:
            return from_json(cls, facts[FACT]) if FACT in facts else None
        except ValueError:
            raise unreadable(path, TRAIN_AGAIN) from None
