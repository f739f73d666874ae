"""Folders for compiled code where a home cannot be written to, as in containers."""

import os
import tempfile
from pathlib import Path

import pytest

from gputrain import caches
from gputrain.caches import cache_folder, can_write_into, provide_home

pytestmark = pytest.mark.skipif(os.name != "posix", reason="Windows has other variables")


@pytest.fixture(autouse=True)
def _places(tmp_path, monkeypatch):
    """A folder for temporary files, and a home below a file, which no user can make, not even root."""
    (tmp_path / "file").touch()
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setenv("HOME", str(tmp_path / "file/home"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    for cached in (caches.temporary_folder, caches.say_once):
        cached.cache_clear()
    yield
    caches.temporary_folder.cache_clear()


def test_a_home_that_can_be_written_to_or_made_is_used(tmp_path, monkeypatch):
    for home in (tmp_path, tmp_path / "new/home"):
        monkeypatch.setenv("HOME", str(home))
        assert cache_folder() == home / ".cache/gputrain"
        provide_home()
        assert os.environ["HOME"] == str(home)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg/gputrain"
    assert not (tmp_path / "new").exists()


def test_otherwise_a_temporary_folder_of_the_user_is_kept(tmp_path, caplog):
    caplog.set_level("INFO")
    folder = tmp_path / f"temporary/gputrain-{os.getuid()}"
    assert cache_folder() == cache_folder() == folder
    assert folder.stat().st_mode & 0o777 == 0o700
    said = f"caches are kept in {folder}, because {tmp_path}/file/home/.cache/gputrain cannot be written to"
    assert caplog.messages == [said]
    assert not can_write_into(tmp_path / "file")
    provide_home()
    assert (os.environ["HOME"], cache_folder()) == (str(folder), folder / ".cache/gputrain")


def test_a_user_without_a_home_gets_one(tmp_path, monkeypatch):
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    assert cache_folder() == tmp_path / f"temporary/gputrain-{os.getuid()}"
    provide_home()
    assert os.environ["HOME"] == str(cache_folder())
    assert os.environ["USER"]


def test_compiled_code_is_run_from_no_folder_that_others_can_write_to(tmp_path):
    shared = tmp_path / f"temporary/gputrain-{os.getuid()}"
    shared.mkdir()
    shared.chmod(0o777)
    assert cache_folder() != shared
    assert cache_folder().parent == shared.parent
    assert cache_folder().stat().st_mode & 0o777 == 0o700
