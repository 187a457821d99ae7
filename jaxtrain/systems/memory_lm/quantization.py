"""Rows of a bank in 8 or 4 bits with one float32 scale each. For inference only."""

import jax.numpy as jnp

from jaxtrain.errors import UserError

LIMITS = {8: 127, 4: 7}


def quantize(memory, bits: int):
    """memory: float [row, width] -> int8 [row, width] (4 bits: [row, width / 2]) and scales float32 [row].

    A scale is max|row| / 127 (4 bits: / 7), at least 1e-8; values round half to even. In 4 bits column 2j fills the low
    half of a byte, 2j + 1 the high half. Raises UserError for an odd width in 4 bits.
    """
    if bits not in LIMITS:
        raise UserError(f"memory.memory_quant_bits: {bits}, wanted 8 or 4")
    memory = jnp.asarray(memory, jnp.float32)
    top = LIMITS[bits]
    scales = jnp.maximum(jnp.abs(memory).max(-1) / top, 1e-8)
    values = jnp.clip(jnp.round(memory / scales[:, None]), -top - 1, top).astype(jnp.int8)
    if bits == 8:
        return values, scales
    if memory.shape[-1] % 2:
        raise UserError(f"a bank of odd width {memory.shape[-1]} cannot be packed into 4 bits; use 8")
    low, high = values[:, 0::2], values[:, 1::2]
    return (low & 0x0F) | (high << 4), scales


def dequantize(values, scales, bits: int):
    """float32 [row, width] from `quantize`'s parts."""
    if bits == 4:
        low = (values << 4) >> 4  # arithmetic shifts bring the sign back
        values = jnp.stack([low, values >> 4], axis=-1).reshape(values.shape[0], -1)
    return values.astype(jnp.float32) * scales[:, None]
