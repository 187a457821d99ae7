"""Sections of `task: torch_module`: what to import, and how a batch meets the module."""

from typing import Any

from pydantic import Field

from jaxtrain.config import DataConfig, Section


class Model(Section):
    target: str = Field(min_length=3)  # import path of the module's class, or of a function that returns a module
    kwargs: dict[str, Any] = {}  # its arguments
    inputs: list[str] | None = None  # batch entries that the module takes, in order; by name where left out


class Data(DataConfig):
    target: str | None = None  # import path of a function (split, **kwargs) -> torch Dataset or None
    kwargs: dict[str, Any] = {}


class LossSection(Section):
    target: str | None = None  # import path of a loss module's class or function (output, batch); null: the model's own
    kwargs: dict[str, Any] = {}  # arguments of a loss module's class
    target_key: str | None = None  # batch entry that a loss module compares with; found where left out
