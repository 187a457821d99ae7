"""The names that other people's scripts import."""

import subprocess
import sys

import pytest

import jaxtrain
from jaxtrain.__main__ import COMMANDS, main


@pytest.mark.parametrize("name", jaxtrain.__all__)
def test_every_public_name_resolves(name):
    assert getattr(jaxtrain, name) is not None


def test_importing_jaxtrain_loads_neither_jax_nor_torch():
    code = "import sys, jaxtrain; print(sorted({'jax', 'torch', 'flax', 'pydantic'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        jaxtrain.Nothing  # noqa: B018


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_says_what_it_does_with_an_example(name, capsys):
    with pytest.raises(SystemExit) as stopped:
        main([name, "--help"])
    assert stopped.value.code == 0
    told = capsys.readouterr().out
    assert "example:" in told
    assert f"python -m jaxtrain.{name}" in told


def test_an_unknown_command_is_refused_with_the_known_ones(capsys):
    assert main(["trian"]) == 2
    assert "evaluate" in capsys.readouterr().err
