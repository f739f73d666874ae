"""Drawings as SVG and as pixels, and the colours of spectrograms."""

import xml.etree.ElementTree as ElementTree

import numpy as np
import torch
from PIL import Image
from skimage.color import rgb2lab

from gputrain.drawing import (
    INK,
    Drawing,
    Inset,
    Label,
    Line,
    Rectangle,
    colour_map,
    spectrogram_picture,
    svg_element,
)
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


def test_shapes_are_drawn_in_order_as_svg_and_as_pixels():
    picture = Image.new("RGB", (3, 2), "#00ff00")
    drawing = Drawing(40, 30, "#000000", [Inset(4, 2, picture), Rectangle(5, 2, 10, 20, "#ff0000", "a & b")])
    drawing.shapes += [Line(0, 25, 40, 25, "#0000ff"), Label(20, 10, "<t>", INK)]
    pixels = np.asarray(drawing.image(scale=2))
    assert (pixels[4:8, 8:10] == (0, 255, 0)).all()  # The rectangle hides the rest of the picture.
    assert (pixels[4:44, 10:30] == (255, 0, 0)).all()
    assert (pixels == (255, 0, 0)).all(axis=2).sum() == 40 * 20
    assert (pixels == (0, 0, 255)).all(axis=2).sum() == 80 * 4
    root = ElementTree.fromstring(drawing.svg('"quoted" & <more>'))
    assert root.attrib["aria-label"] == '"quoted" & <more>'
    shapes = [(shape.tag.split("}")[1], "".join(shape.itertext())) for shape in root]
    assert shapes == [("rect", ""), ("image", ""), ("rect", "a & b"), ("line", ""), ("text", "<t>")]
    assert [shape.attrib.get("fill") for shape in root][-1] == INK
    page = ElementTree.fromstring(drawing.svg("", page_colour="currentColor"))
    assert (page[0].tag.split("}")[1], page[-1].attrib["fill"]) == ("image", "currentColor")


def test_elements_escape_and_round():
    assert svg_element("a", "<", class_='"', text_anchor="end", x=1.25, y=3) == (
        '<a class="&#34;" text-anchor="end" x="1.2" y="3">&lt;</a>'
    )
    assert svg_element("path", d="M0 0") == '<path d="M0 0"/>'
