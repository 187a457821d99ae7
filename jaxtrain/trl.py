"""TRL's trainers with compiled models: `from jaxtrain.trl import SFTConfig, SFTTrainer`.

Data, generation, rewards, references, logging and files are TRL's own, and so is every other public name. TRL's losses
count tokens and keep metrics in Python, so a step is not one program: forward and backward of the trained model run
compiled, updates run in torch. Generation and the reference model run in torch.
"""

from typing import TYPE_CHECKING

import trl

from jaxtrain.lazy import library_names
from jaxtrain.transformers import CompiledTraining

if TYPE_CHECKING:
    from trl import *  # noqa: F403  # pyright: ignore[reportAssignmentType]
else:
    __getattr__, __dir__ = library_names(__name__, "trl")


class SFTTrainer(CompiledTraining, trl.SFTTrainer):
    """trl.SFTTrainer with a compiled model."""


class DPOTrainer(CompiledTraining, trl.DPOTrainer):
    """trl.DPOTrainer with a compiled model."""


class KTOTrainer(CompiledTraining, trl.KTOTrainer):
    """trl.KTOTrainer with a compiled model."""


class RewardTrainer(CompiledTraining, trl.RewardTrainer):
    """trl.RewardTrainer with a compiled model."""


class GRPOTrainer(CompiledTraining, trl.GRPOTrainer):
    """trl.GRPOTrainer with a compiled model."""


class RLOOTrainer(CompiledTraining, trl.RLOOTrainer):
    """trl.RLOOTrainer with a compiled model."""


class DistillationTrainer(CompiledTraining, trl.DistillationTrainer):
    """trl.DistillationTrainer with a compiled model."""
