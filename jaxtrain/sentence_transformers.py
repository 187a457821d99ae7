"""sentence-transformers' trainers with a compiled step: `from jaxtrain.sentence_transformers import
SentenceTransformerTrainer`.

Losses, collators, samplers, evaluators and files are the library's own, and so is every other public name.
"""

from typing import TYPE_CHECKING

import sentence_transformers

from jaxtrain.lazy import library_names
from jaxtrain.transformers import CompiledTraining

if TYPE_CHECKING:
    from sentence_transformers import *  # noqa: F403  # pyright: ignore[reportAssignmentType]
    from sentence_transformers import util as util
    from sentence_transformers.sentence_transformer import evaluation as evaluation
    from sentence_transformers.sentence_transformer import losses as losses
    from sentence_transformers.sentence_transformer import modules as models  # noqa: F401
else:
    __getattr__, __dir__ = library_names(__name__, "sentence_transformers")


class _CompiledTraining(CompiledTraining):
    clears_all_gradients = True  # by a callback of the library's


class SentenceTransformerTrainer(_CompiledTraining, sentence_transformers.SentenceTransformerTrainer):
    """sentence_transformers.SentenceTransformerTrainer with a compiled training step."""


class CrossEncoderTrainer(_CompiledTraining, sentence_transformers.CrossEncoderTrainer):
    """sentence_transformers.CrossEncoderTrainer with a compiled training step."""


class SparseEncoderTrainer(_CompiledTraining, sentence_transformers.SparseEncoderTrainer):
    """sentence_transformers.SparseEncoderTrainer with a compiled training step."""


class MultiVectorEncoderTrainer(_CompiledTraining, sentence_transformers.MultiVectorEncoderTrainer):
    """sentence_transformers.MultiVectorEncoderTrainer with a compiled training step."""
