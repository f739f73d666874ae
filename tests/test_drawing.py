"""Elements of SVG, and the colours of spectrograms."""

import numpy as np
import torch
from skimage.color import rgb2lab

from gputrain.drawing import colour_map, spectrogram_picture, svg_element
from tests.tables import each_row


def test_equal_steps_look_equal():
    """The distances are those of CIE 1976 in CIELAB, over steps long enough for 8 bits."""
    lab = rgb2lab(colour_map()[None] / 255)[0]
    assert (np.diff(lab[:, 0]) > 0).all()
    assert np.abs(np.diff(lab[::15, 0]) - 98 / 17).max() < 1  # Lightness rises evenly.
    steps = np.linalg.norm(np.diff(lab[::15], axis=0), axis=1)
    assert steps.max() / steps.min() < 1.5
    assert tuple(colour_map()[0]) == (0, 0, 0)


@each_row((-1.0,), (2.0,))
def test_what_is_beyond_has_the_colour_of_the_limit(value):
    assert torch.equal(
        spectrogram_picture(torch.full((3, 4), value)), spectrogram_picture(torch.full((3, 4), float(value > 0)))
    )


def test_elements_escape_and_round():
    assert svg_element("a", "<", class_='"', text_anchor="end", x=1.25, y=3) == (
        '<a class="&#34;" text-anchor="end" x="1.2" y="3">&lt;</a>'
    )
    assert svg_element("path", d="M0 0") == '<path d="M0 0"/>'
