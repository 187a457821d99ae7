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
    from trl.scripts.utils import ScriptArguments as ScriptArguments  # type checkers see none of these as trl's names
    from trl.scripts.utils import TrlParser as TrlParser
    from trl.trainer.distillation_config import DistillationConfig as DistillationConfig
    from trl.trainer.dpo_config import DPOConfig as DPOConfig
    from trl.trainer.grpo_config import GRPOConfig as GRPOConfig
    from trl.trainer.kto_config import KTOConfig as KTOConfig
    from trl.trainer.model_config import ModelConfig as ModelConfig
    from trl.trainer.reward_config import RewardConfig as RewardConfig
    from trl.trainer.rloo_config import RLOOConfig as RLOOConfig
    from trl.trainer.sft_config import SFTConfig as SFTConfig
    from trl.trainer.utils import get_peft_config as get_peft_config
    from trl.trainer.utils import get_quantization_config as get_quantization_config
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
