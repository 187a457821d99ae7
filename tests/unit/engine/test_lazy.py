"""Names and functions that load at first use are there when they are asked for."""

import dataclasses
import functools
import importlib

import pytest

from jaxtrain.lazy import lazy
from jaxtrain.task import TorchTwin

pytest.importorskip("torch", reason="the originals' names are torch objects")
SYSTEMS = ("digits", "hjepa", "fmri_autoencoder", "criteria_evidence", "memory_lm", "set_completion")


def functions_of(record):
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        value = value.func if isinstance(value, functools.partial) else value
        if isinstance(value, TorchTwin):
            yield from functions_of(value)
        elif isinstance(value, lazy):
            yield value
        elif isinstance(value, dict):
            yield from (each for each in value.values() if isinstance(each, lazy))


@pytest.mark.parametrize("name", SYSTEMS)
def test_every_lazy_function_of_a_task_exists(name):
    system = importlib.import_module(f"jaxtrain.systems.{name}")
    found = [function for task in system.TASKS.values() for function in functions_of(task)]
    for function in found:
        module, _, attribute = function.target.partition(":")
        assert callable(getattr(importlib.import_module(module), attribute))
    assert len(found) >= 3


@pytest.mark.parametrize("name", SYSTEMS[1:])
def test_every_name_of_the_original_is_offered(name):
    system = importlib.import_module(f"jaxtrain.systems.{name}")
    offered = [each for names in system.ORIGINAL_NAMES.values() for each in names]
    assert all(callable(getattr(system, each)) or each.isupper() for each in offered)
    with pytest.raises(AttributeError, match="no_such_name"):
        system.no_such_name  # noqa: B018
