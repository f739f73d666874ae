"""Declared options: types, ranges and files as a user meets them."""

import json
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gputrain.config import (
    assemble,
    check_stored,
    checked,
    config,
    flatten,
    leaves,
    opt,
    read_file,
    to_yaml,
)
from gputrain.engine.checkpoint import saved_settings
from gputrain.errors import UserError
from gputrain.former_options import left_out, renamed, with_current_options
from gputrain.kinds import kinds, read_defaults
from gputrain.tts.config import TrainTts
from gputrain.vae.config import TrainVae
from tests.tables import each_row


@config(panel="Inner")
class Inner:
    size: int = opt(default=8, help="Size.", min=1, max=64)
    channels: tuple[int, ...] = opt(default=(), help="Channels.", min=1)
    fast: bool | None = opt(default=None, help="Fast.")


@config(panel="Outer")
class Outer:
    folder: Path = opt(help="Folder.")
    inner: Inner = Inner()
    rate: float = opt(default=0.5, help="Rate.", min=0)
    name: str = opt(default="", help="Name.")


def test_leaves_are_flat_and_know_their_place():
    found = leaves(Outer)
    assert list(found) == ["folder", "size", "channels", "fast", "rate", "name"]
    assert found["size"].path == ("inner", "size")
    assert found["size"].panel == "Inner"
    assert found["fast"].plain_type is bool
    assert found["folder"].required


def test_assemble_nests():
    made = assemble(Outer, {"folder": "x", "size": 9, "channels": [3, 4], "rate": "1e-3"})
    assert made == Outer(folder=Path("x"), inner=Inner(size=9, channels=(3, 4)), rate=0.001)


@each_row(
    ({"folder": "x", "sise": 3}, "unknown key 'sise'"),
    ({"folder": "x", "size": None}, "size is null"),
    ({"folder": "x", "size": 3.5}, "size is 3.5, expected a whole number"),
    ({"folder": "x", "size": True}, "size is True, expected a whole number"),
    ({"folder": "x", "size": "many"}, "size is 'many', expected a whole number"),
    ({"folder": "x", "size": [1]}, r"size is \[1\], expected a whole number"),
    ({"folder": "x", "size": 65}, "size is 65, expected 1 to 64"),
    ({"folder": "x", "rate": -1}, "rate is -1.0, expected at least 0"),
    ({"folder": "x", "rate": float("nan")}, "rate is nan, expected at least 0"),
    ({"folder": "x", "fast": 1}, "fast is 1, expected true or false"),
    ({"folder": "x", "channels": [1, 0]}, "channels is 0, expected at least 1"),
    ({"folder": "x", "channels": "1,b"}, "channels is '1,b', expected a list of whole numbers"),
    ({"folder": "x", "name": 3}, "name is 3, expected a text"),
    ({"folder": {"a": 1}}, "folder is {'a': 1}, expected a path"),
    ({}, "folder is missing"),
)
def test_wrong_values_are_named(values, message):
    with pytest.raises(UserError, match=message):
        assemble(Outer, values)


@given(
    st.builds(
        lambda folder, size, channels, fast, rate, name: Outer(
            folder=Path(folder), inner=Inner(size=size, channels=tuple(channels), fast=fast), rate=rate, name=name
        ),
        st.text(st.characters(exclude_characters="\0/", exclude_categories=["Cs"]), min_size=1),
        st.integers(1, 64),
        st.lists(st.integers(1, 9)),
        st.none() | st.booleans(),
        st.floats(0, 1e9),
        st.text(st.characters(exclude_categories=["Cs"])),
    )
)
def test_yaml_gives_the_same_configuration_back(tmp_path_factory, settings):
    path = tmp_path_factory.mktemp("yaml") / "config.yaml"
    path.write_text(to_yaml(settings), encoding="utf-8")
    assert assemble(Outer, read_file(path)) == settings
    assert assemble(Outer, flatten(settings)) == settings


def test_the_guides_json(tmp_path):
    path = tmp_path / "large.json"
    path.write_text(
        json.dumps({"channels": [192, 384, 768, 768], "z_channels": 32, "image_size": 1024, "batch_size": 12})
    )
    settings = assemble(TrainVae, {"data_path": "x", **read_file(path)})
    assert settings.architecture.block_out_channels == (192, 384, 768, 768)
    assert settings.architecture.latent_channels == 32
    assert settings.schedule.batch_size == 12


@each_row(
    ({"image_size": 100}, "image_size 100 is not a multiple of 8"),
    ({"image_size": 16, "adversarial_weight": 0.5}, "image_size 16 is too small for the discriminator"),
    ({"channels": [100, 128]}, "100 is not divisible into 32 groups"),
    ({"channels": [64]}, "an autoencoder needs at least two blocks"),
    ({"use_bf16": True, "mixed_precision": False}, "contradict each other"),
    ({"discriminator_channels": 24}, "not a multiple of 16"),
)
def test_contradictions_are_refused_with_a_remedy(values, message):
    with pytest.raises(UserError, match=message) as caught:
        assemble(TrainVae, {"data_path": "x", **values})
    assert caught.value.hint


@config()
class Spelt(Outer):
    spellings: ClassVar[dict[str, str]] = {"width": "size", "side": "size", "lr": "rate"}


def test_other_names_are_keys_too_and_never_written(tmp_path):
    found = leaves(Spelt)
    assert list(found) == list(leaves(Outer))
    assert found["size"].names == ("size", "width", "side")
    assert found["size"].flags == ["--size", "--width", "--side"]
    assert found["name"].names == ("name",)
    made = assemble(Spelt, {"folder": "x", "width": 9, "lr": "1e-3"})
    assert made == Spelt(folder=Path("x"), inner=Inner(size=9), rate=0.001)
    assert checked(Spelt, {"side": 9}) == {"size": 9}
    written = to_yaml(made)
    assert "size: 9" in written
    assert "rate: 0.001" in written
    assert "width" not in written
    assert "lr" not in written


@each_row(
    ({"width": 1, "size": 1}, "c.yaml: width and size are one and the same key", "keep one of them"),
    ({"width": 1, "side": 2}, "c.yaml: width and side are one and the same key", "keep one of them"),
    ({"width": 99}, "c.yaml: width is 99, expected 1 to 64", ""),
    ({"width": None}, "c.yaml: width is null", "leave the key out"),
    ({"width": "many"}, "c.yaml: width is 'many', expected a whole number", ""),
    ({"widht": 3}, "c.yaml: unknown key 'widht'", "did you mean 'width'?"),
)
def test_errors_name_the_key_as_it_is_spelt(values, message, hint):
    with pytest.raises(UserError) as caught:
        assemble(Spelt, {"folder": "x", **values}, "c.yaml")
    assert message in caught.value.message
    assert hint in caught.value.hint


def test_a_spelling_that_is_a_field_is_an_error():
    @config()
    class Twice(Outer):
        spellings: ClassVar[dict[str, str]] = {"rate": "size"}

    with pytest.raises(AssertionError, match="the spelling rate is a field"):
        leaves(Twice)


@pytest.mark.parametrize("kind", kinds())
def test_every_former_name_leads_to_an_option_and_is_none_itself(kind):
    known = {name for leaf in leaves(kinds()[kind].train).values() for name in leaf.names}
    former = renamed(kind)
    assert set(former.values()) <= known
    assert {leaf.name for leaf in leaves(kinds()[kind].train).values()}.isdisjoint(former)


def test_a_file_with_former_names_is_read_and_refused_beside_todays(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text("kind: tts\ndata_dir: [speech]\nlog_freq: 7\nbatch_room: 2.5\nevaluate_steps: 40\n")
    made = assemble(TrainTts, read_defaults(file, TrainTts))
    assert made.data.data_path == (Path("speech"),)
    assert (made.saving.log_every_steps, made.saving.evaluate_every_steps) == (7, 40)
    assert made.data.max_batch_audio_ratio == 2.5
    file.write_text("kind: vae\neq_probability: 0.0\neq_weight: 0.5\n")  # The first one changed nothing.
    with pytest.raises(UserError, match="there is no option eq_weight any more") as caught:
        read_defaults(file, TrainVae)
    assert "leave it out" in caught.value.hint
    file.write_text("lean: false\n")
    assert read_defaults(file, TrainVae) == {"recompute_norms": False}
    file.write_text("lean: false\nrecompute_norms: true\n")
    with pytest.raises(UserError, match="lean has another name") as caught:
        read_defaults(file, TrainVae)
    assert caught.value.hint == "it is recompute_norms"


@each_row("vae", "vocoder", "tts", "asr")
def test_runs_that_stored_options_of_earlier_versions_are_readable(kind):
    """If they have the value that the option had by default, and so did nothing."""
    settings, folder = kinds()[kind].train, {"data_path": ["data"]}
    gone = left_out(kind)
    assert not gone.keys() & leaves(settings).keys()
    stored = {**flatten(assemble(settings, folder)), **{name: former.default for name, former in gone.items()}}
    assert with_current_options(stored, kind) == flatten(assemble(settings, folder))
    for name, former in gone.items():
        other = with_current_options({**stored, name: "another value"}, kind, is_stored=True)
        content: Any = {"config": other, "kind": kind}
        assert saved_settings(settings, content, Path("run.pt")) == assemble(settings, folder)  # For use.
        if former.changes_training:
            with pytest.raises(UserError, match=f"run.pt: was trained with {name} another value"):
                check_stored(settings, other, Path("run.pt"))
        else:
            check_stored(settings, other, Path("run.pt"))


CHANGED_DEFAULTS = {"vocoder": {"fmax": 16000.0}}  # What had another default then.


@pytest.mark.parametrize("kind", kinds())
def test_a_stored_configuration_of_the_first_release_is_read(kind):
    """Every option of its time is named in it, with its default."""
    train = kinds()[kind].train
    made = assemble(train, read_defaults(Path(__file__).parent / "data" / "stored" / f"{kind}.yaml", train))
    given = {"data_path": "data", "yes": True, **CHANGED_DEFAULTS.get(kind, {})}  # An end that is given says yes.
    assert flatten(made) == flatten(assemble(train, given))
