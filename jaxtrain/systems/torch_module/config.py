"""Sections of `task: torch_module`: what to import, and how a batch meets the module."""

from typing import Annotated, Any

from pydantic import Field

from jaxtrain.config import DataConfig, ImportPath, Section


class Model(Section):
    target: Annotated[str, ImportPath] = Field(min_length=3)  # of the module's class, or a function that gives one
    kwargs: dict[str, Any] = {}  # its arguments
    inputs: list[str] | None = None  # batch entries that the module takes, in order; by name if left out


class Data(DataConfig):
    target: Annotated[str | None, ImportPath] = None  # of a function ([split,] **kwargs) -> torch Dataset or None
    kwargs: dict[str, Any] = {}


class LossSection(Section):
    target: Annotated[str | None, ImportPath] = (
        None  # loss module's class, function (output, batch); null: the model's own
    )
    kwargs: dict[str, Any] = {}  # arguments of a loss module's class
    target_key: str | None = None  # batch entry that a loss module compares with; searched for if left out
