"""What several tests share."""

from pathlib import Path

import pytest
import skimage.data
from PIL import Image

PHOTOGRAPHS = ("astronaut.png", "chelsea.png", "coffee.png", "rocket.jpg", "motorcycle_left.png", "retina.jpg")


@pytest.fixture(scope="session")
def photographs(tmp_path_factory) -> Path:
    """A folder of small real photographs, about 150 pixels a side."""
    folder = tmp_path_factory.mktemp("photographs")
    for name in PHOTOGRAPHS:
        with Image.open(Path(skimage.data.__file__).parent / name) as image:
            image.thumbnail((200, 200))
            image.convert("RGB").save(folder / name.replace(".jpg", ".png"))
    return folder
