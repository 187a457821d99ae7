"""Lightning's command line with the compiled Trainer: `from jaxtrain.lightning.cli import LightningCLI`.

Subcommands, config files and flags are Lightning's own, and so is every other name of `lightning.pytorch.cli`.
"""

import inspect
from typing import TYPE_CHECKING, Any

from lightning.pytorch import cli as lightning_cli

from jaxtrain.lazy import library_names, signature_of
from jaxtrain.lightning import Trainer

if TYPE_CHECKING:
    from lightning.pytorch.cli import *  # noqa: F403  # pyright: ignore[reportAssignmentType]
else:
    __getattr__, __dir__ = library_names(__name__, "lightning.pytorch.cli")


class LightningCLI(lightning_cli.LightningCLI):
    """lightning.pytorch.cli.LightningCLI whose trainer_class is, if left out, the compiled Trainer."""

    @signature_of(lightning_cli.LightningCLI.__init__)
    def __init__(self, *arguments: Any, **options: Any):
        bound = inspect.signature(super().__init__).bind_partial(*arguments, **options)
        super().__init__(**{"trainer_class": Trainer, **bound.arguments})
