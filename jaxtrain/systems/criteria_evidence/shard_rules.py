"""Tensor-parallel rules of the encoders: `shard.tensor` splits the heads and the feed-forward layer's inner width."""

from jaxtrain.runtime.tensor_rules import Rules, check_divides, columns, rows
from jaxtrain.systems.criteria_evidence.model import encoders_of

COLUMNS = r".*\.attention\.self\.(pos_)?(query|key|value)(_proj)?|.*\.layer\.\d+\.intermediate\.dense"
ROWS = r".*\.layer\.\d+\.(attention\.)?output\.dense"


def shard_rules(architecture: str, config) -> Rules:
    """Return the rules of all encoders, LoRA adapters included.

    Raises UserError if shard.tensor does not divide an encoder's number of heads or its intermediate size.
    """
    sizes = {}
    for name, encoder in encoders_of(architecture, config.model).items():
        sizes[f"{name}.num_attention_heads"] = encoder.num_attention_heads
        sizes[f"{name}.intermediate_size"] = encoder.intermediate_size
    check_divides(config.shard.tensor, sizes)
    return {**columns(COLUMNS), **rows(ROWS)}
