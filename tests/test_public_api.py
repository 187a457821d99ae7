"""The names that other people's scripts import."""

import subprocess
import sys

import pytest

import jaxtrain


@pytest.mark.parametrize("name", jaxtrain.__all__)
def test_every_public_name_resolves(name):
    assert getattr(jaxtrain, name) is not None


def test_importing_jaxtrain_loads_neither_jax_nor_torch():
    code = "import sys, jaxtrain; print(sorted({'jax', 'torch', 'flax', 'pydantic'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        jaxtrain.Nothing  # noqa: B018
