"""Rules that split linear layers over the devices of `shard.tensor`.

A layer split by columns computes a part of the outputs on every device. One split by rows takes a part of the inputs,
and the products are summed. A pair of them communicates only once. Source: Shoeybi et al. 2019 (Megatron-LM), sec. 3.
"""

import math
from collections.abc import Mapping

from jaxtrain.errors import UserError

Rules = Mapping[str, tuple[str | None, ...]]  # pattern of a parameter's key -> mesh axis of each of its axes


def columns(layers: str) -> Rules:
    """Return rules that split the outputs of the Linear layers whose names match a pattern: weight [out, in], bias
    [out], LoRA's B."""
    return {
        rf"(?:{layers})\.(base_layer\.)?weight": ("tensor", None),
        rf"(?:{layers})\.(base_layer\.)?bias": ("tensor",),
        rf"(?:{layers})\.lora_B(\.\w+\.weight)?": ("tensor", None),
    }


def rows(layers: str) -> Rules:
    """Return rules that split the inputs of the Linear layers whose names match a pattern: weight [out, in], LoRA's A;
    the bias is not split."""
    return {
        rf"(?:{layers})\.(base_layer\.)?weight": (None, "tensor"),
        rf"(?:{layers})\.lora_A(\.\w+\.weight)?": (None, "tensor"),
    }


def check_divides(tensor: int, sizes: Mapping[str, int]) -> None:
    """Raise UserError if shard.tensor does not divide one of the sizes. sizes: name of the setting -> size."""
    for name, size in sizes.items():
        if size % tensor:
            common = math.gcd(*sizes.values())
            fit = ", ".join(str(n) for n in range(1, common + 1) if common % n == 0)
            raise UserError(f"shard.tensor: {tensor} does not divide {name} {size}; what divides all sizes here: {fit}")
