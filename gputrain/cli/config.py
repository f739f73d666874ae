"""Commands that serve several kinds of model: their options, together. Imports no torch."""

from typing import Literal

from gputrain.config import config, leaves, opt
from gputrain.errors import UserError
from gputrain.vae.config import PrepareData
from gputrain.vocoder.config import Sound

OF_IMAGES = ("mode", "target_size", "resize_mode", "format", "min_size", "max_megapixels")


@config(panel="Preparation")
class Prepare(PrepareData):
    kind: Literal["images", "vocoder"] = opt(
        default="images", help="What is prepared: pictures for train-vae, or recordings for a vocoder."
    )
    sound: Sound = Sound()

    def __post_init__(self) -> None:
        """An option of the other kind would do nothing, so it is refused."""
        known = leaves(type(self))
        given = {name for name in OF_IMAGES if getattr(self, name) != known[name].default}
        if self.kind == "images":
            given = {name for name, leaf in leaves(Sound).items() if getattr(self.sound, name) != leaf.default}
        if given:
            name = sorted(given)[0]
            raise UserError(f"{name} does nothing with --kind {self.kind}", hint=f"drop {known[name].flag}")
        super().__post_init__()
