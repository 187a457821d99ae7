"""Fixtures that several files of these tests share."""

import pytest

from jaxtrain import config_io


@pytest.fixture
def config(tmp_path):
    """Load a digits config with more text in its file, and overrides."""
    path = tmp_path / "c.yaml"

    def load(text="", *overrides):
        path.write_text("task: digits.classify\n" + text, encoding="utf-8")
        return config_io.load(path, overrides)[1]

    return load
