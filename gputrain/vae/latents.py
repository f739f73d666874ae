"""The factors by which a pipeline scales the latents of an autoencoder, and where those of a trained one come from.

A denoiser is trained on latents scaled by the factors in the config.json of its autoencoder. An encoder that was not
trained makes the same latents as before, so the factors of its source stay; of other encoders they are measured.
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from gputrain.errors import UserError
from gputrain.stored import from_json

FACT = "latents"  # Key in the facts of a checkpoint.
NEAR = 1.5  # Factor between a measured and a published scaling factor that may be of the same model.


@dataclass(frozen=True)
class LatentScaling:
    """Keys of diffusers' config.json: the denoiser of a pipeline gets (latents - shift_factor) * scaling_factor. Mean
    and standard deviation by channel are of few autoencoders."""

    scaling_factor: float
    shift_factor: float | None = None
    latents_mean: list[float] | None = None
    latents_std: list[float] | None = None

    @classmethod
    def of_config(cls, config: Mapping[str, Any], path: Path) -> "LatentScaling":
        """Returns the factors of a config.json. Raises UserError if they are no numbers."""
        values = {name: config[name] for name in cls.__dataclass_fields__ if config.get(name) is not None}
        try:
            return from_json(cls, values, "it")
        except ValueError as error:
            raise UserError(f"{path}: {error}", hint="use the file that belongs to the weights") from None

    def config(self) -> dict[str, Any]:
        """Returns the keys of config.json. Means by channel are left out where there are none: older diffusers do not
        know them."""
        return {name: value for name, value in asdict(self).items() if value is not None or name == "shift_factor"}

    def __str__(self) -> str:
        shift = "no shift_factor" if self.shift_factor is None else f"shift_factor {self.shift_factor:.6g}"
        return f"scaling_factor {self.scaling_factor:.6g}, {shift}"


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
        "Stable Diffusion 1 and 2", LatentScaling(0.18215), 4, r"^cond_stage_model\.",
        r"vae-ft-(mse|ema)|kl-f8|sd-?_?v?[12]|diffusion-v?[12]|v[12]-[1-5]",
    ),
)  # fmt: skip


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
        return math.exp(abs(math.log(family.scaling.scaling_factor / measured.scaling_factor)))

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
    """

    source: str
    scaling: LatentScaling | None = None
    told_by: str = ""
    published: bool = False
    pictures: TrainedPictures | None = None
    encoder_trained: bool = False

    def facts(self) -> dict[str, Any]:
        return {FACT: asdict(self)}

    @classmethod
    def of_facts(cls, facts: Mapping[str, Any], path: Path) -> "LatentSource | None":
        """Returns the source in the facts of a checkpoint; None if there is none, as in those of earlier versions."""
        try:
            return from_json(cls, facts[FACT], FACT) if FACT in facts else None
        except ValueError as error:
            raise UserError(f"{path}: damaged: {error}", hint="use another checkpoint of the run") from None
