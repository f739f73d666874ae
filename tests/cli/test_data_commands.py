"""The guide's data commands, with their underscores, on real files."""

import json

from PIL import Image

from tests.command import gputrain_here


def test_preprocess_then_validate_as_in_the_guide(photographs, tmp_path):
    (tmp_path / "raw").mkdir()
    for path in photographs.iterdir():
        (tmp_path / "raw" / path.name).write_bytes(path.read_bytes())
    (tmp_path / "raw" / "broken.jpg").write_bytes(b"\xff\xd8\xff\xe0 not much of a picture")
    words = (
        "prepare-data", "--mode", "preprocess", "--input_dir", tmp_path / "raw", "--output_dir", tmp_path / "data",
        "--target_size", 64, "--resize_mode", "cover", "--num_workers", 2,
    )  # fmt: skip
    result = gputrain_here(*words)
    assert result.returncode == 0, result.stderr
    assert "broken.jpg" in result.stderr
    assert "made      6" in result.stdout
    assert "refused   1" in result.stdout
    assert {Image.open(path).size for path in (tmp_path / "data").glob("*.png")} == {(64, 64)}
    assert "made      0" in gputrain_here(*words).stdout

    reports = []
    for number, command in enumerate((["prepare-data", "--mode", "validate"], ["validate"])):
        path = tmp_path / f"{number}.json"
        result = gputrain_here(*command, "--input_dir", tmp_path / "data", "--output_file", path)
        assert result.returncode == 0, result.stderr
        assert "agrees with the files" in result.stdout
        reports.append(json.loads(path.read_text()))
    assert reports[0] == reports[1]
    assert reports[0]["pictures"] == 6
