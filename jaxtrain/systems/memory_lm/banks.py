"""Banks of learned memory tokens.

A bank holds `latents` [token, rank or width]; a chapter is a range of its rows. `expand` turns selected latents into
the vectors that attention reads. State-dict keys and initialisation: docs/memory_lm.md.
"""

import jax.numpy as jnp
from flax import nnx

from jaxtrain import nn
from jaxtrain.errors import UserError
from jaxtrain.nn import initializers
from jaxtrain.nn.linear import linear


class MemoryBank(nnx.Module):
    """Bank with the parameter `memory` [tokens, width], drawn from N(0, std)."""

    def __init__(self, tokens: int, width: int, std: float = 0.02, *, rngs: nnx.Rngs):
        self.memory = nnx.Param(initializers.normal(rngs.params(), (tokens, width), std))

    @property
    def latents(self):
        return self.memory[...]

    def expand(self, latents):
        return latents

    def get_memory(self):
        """Return all memory vectors, [tokens, width]."""
        return self.expand(self.latents)


class FactorizedMemoryBank(MemoryBank):
    """Low-rank bank: the memory is A B^T with A [tokens, rank] and B [width, rank]."""

    def __init__(self, tokens: int, width: int, rank: int, std: float = 0.02, *, rngs: nnx.Rngs):
        self.A = nnx.Param(initializers.normal(rngs.params(), (tokens, rank), std))
        self.B = nnx.Param(initializers.normal(rngs.params(), (width, rank), rank**-0.5))

    @property
    def latents(self):
        return self.A[...]

    def expand(self, latents):
        return linear(latents, self.B[...])


class ReducedDimMemoryBank(MemoryBank):
    """Bank with `memory` [tokens, rank]; attention works in the reduced width `rank`."""

    def __init__(self, tokens: int, rank: int, std: float = 0.02, *, rngs: nnx.Rngs):
        super().__init__(tokens, rank, std, rngs=rngs)


class QuantizedMemoryBank(nnx.Module):
    """Bank quantised to 8 or 4 bits, for inference.

    quantized_memory: int8 [tokens, width], for 4 bits [tokens, width / 2]; scales: [tokens].
    """

    def __init__(self, memory, bits: int = 8):
        values, scales = quantize(memory, bits)
        self.quantized_memory = nn.Buffer(values)
        self.scales = nn.Buffer(scales)
        self.bits = bits

    @property
    def latents(self):
        return dequantize(self.quantized_memory[...], self.scales[...], self.bits)

    def expand(self, latents):
        return latents

    def get_memory(self):
        """Return all memory vectors, dequantised, float32 [tokens, width]."""
        return self.latents


class ChapteredMemoryBank(nnx.Module):
    """Bank split into chapters of consecutive tokens; its state-dict keys have the prefix `base_bank.`.

    Raises UserError if num_chapters does not divide the number of tokens.
    """

    def __init__(self, base_bank: nnx.Module, num_chapters: int):
        tokens = base_bank.latents.shape[0]
        if tokens % num_chapters:
            raise UserError(f"memory.num_chapters: {tokens} memory tokens are no multiple of {num_chapters} chapters")
        self.base_bank = base_bank
        self.num_chapters = num_chapters
        self.chapter_tokens = tokens // num_chapters

    def get_memory(self):
        return self.base_bank.get_memory()

    def chapters(self):
        """Return the latents by chapter, [chapter, token, rank or width]."""
        latents = self.base_bank.latents
        return latents.reshape(self.num_chapters, self.chapter_tokens, latents.shape[-1])

    def select(self, indices):
        """Return the memory of the chapters `indices` [..., k], [..., k, token, width]."""
        return self.base_bank.expand(nn.rows(self.chapters(), indices))


def make_bank(memory, width: int, rngs: nnx.Rngs) -> nnx.Module:
    """Return the bank of a `memory` section. width: memory_dim, or the model's width."""
    std, tokens = memory.memory_init_std, memory.num_memory_tokens
    if memory.use_low_rank_memory and memory.low_rank_mode == "reduced_dim":
        bank = ReducedDimMemoryBank(tokens, memory.memory_rank, std, rngs=rngs)
    elif memory.use_low_rank_memory:
        bank = FactorizedMemoryBank(tokens, width, memory.memory_rank, std, rngs=rngs)
    else:
        bank = MemoryBank(tokens, width, std, rngs=rngs)
    return ChapteredMemoryBank(bank, memory.num_chapters) if memory.use_chapters else bank


def deployed(model: nnx.Module) -> nnx.Module:
    """Return the model for evaluation and decoding: a copy with quantised banks if `memory.quantize_memory` is set,
    else the model itself."""
    memory = model.memory
    if not memory.quantize_memory:
        return model
    return quantize_memory_for_deployment(nnx.clone(model), memory.memory_quant_bits)


def quantize_memory_for_deployment(model: nnx.Module, bits: int = 8) -> nnx.Module:
    """Replace every bank of a model by its quantised form, in place; return the model.

    Low-rank banks are multiplied out first; a reduced-dim bank keeps its reduced width.
    """
    for i, bank in enumerate(list(model.memory_banks)):
        if isinstance(bank, ChapteredMemoryBank):
            bank.base_bank = QuantizedMemoryBank(bank.base_bank.get_memory(), bits)
        else:
            model.memory_banks[i] = QuantizedMemoryBank(bank.get_memory(), bits)
    return model


LIMITS = {8: 127, 4: 7}


def quantize(memory, bits: int):
    """Quantise memory, float [row, width], to int8 [row, width] (4 bits: [row, width / 2]) and scales float32 [row].

    A scale is max|row| / 127 (4 bits: / 7), at least 1e-8; values round half to even. With 4 bits, column 2j is the low
    half of a byte and column 2j + 1 the high half. Raises UserError for other bits, and for an odd width with 4 bits.
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
    """Return float32 [row, width] from the results of `quantize`."""
    if bits == 4:
        low = (values << 4) >> 4  # arithmetic shifts restore the sign
        values = jnp.stack([low, values >> 4], axis=-1).reshape(values.shape[0], -1)
    return values.astype(jnp.float32) * scales[:, None]
