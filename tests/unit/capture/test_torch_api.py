"""The private API of torch that the capture uses: one file, and a sentence when it changes."""

import pathlib
import re

import pytest
import torch
from torch._guards import TracingContext

from jaxtrain.errors import UserError
from torch_bridge.capture import torch_api

PRIVATE = re.compile(r"torch\._(dynamo|functorch|guards|decomp|inductor)\b|from functorch")


def test_the_installed_torch_has_what_the_capture_uses():
    torch_api.check()


def test_a_change_of_torch_is_told_in_a_sentence(monkeypatch):
    monkeypatch.delattr(TracingContext, "try_get")
    with pytest.raises(
        UserError, match=rf"torch {re.escape(torch.__version__)} has no torch._guards.TracingContext.try_get"
    ):
        torch_api.check()


def test_one_file_uses_it():
    files = pathlib.Path(torch_api.__file__).parent.glob("*.py")
    assert [file.name for file in files if PRIVATE.search(file.read_text())] == ["torch_api.py"]
