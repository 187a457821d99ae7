"""A file that is written aside appears whole or not at all."""

import pytest

from torch_bridge.atomic_file import replacing


def test_a_write_that_fails_leaves_the_old_file_and_nothing_beside_it(tmp_path):
    path = tmp_path / "config.yaml"
    with replacing(path) as aside:
        aside.write_text("old")
    with pytest.raises(OSError, match="full"):
        _write_half(path)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def _write_half(path):
    with replacing(path) as aside:
        aside.write_text("ne")
        raise OSError("full")


def test_a_folder_takes_the_place_of_the_old_one(tmp_path):
    path = tmp_path / "stage"
    for name in ("first", "second"):
        with replacing(path) as aside:
            aside.mkdir()
            (aside / name).touch()
    assert [file.name for file in path.iterdir()] == ["second"]
