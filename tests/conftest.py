"""What several tests share."""

import os
from pathlib import Path

# Tests run beside each other: a thread each, for what they start too, as OpenMP's threads only wait for one another.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

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
