"""Banks of learned memory tokens.

A bank holds `latents` [token, rank or width], which chapters select rows of, and `expand` turns selected latents into
the vectors that attention reads. Source: the state_dict keys and initialisation of docs/memory_lm.md.
"""

import jax.numpy as jnp
from flax import nnx

from jaxtrain import nn
from jaxtrain.errors import UserError
from jaxtrain.nn import initializers
from jaxtrain.nn.linear import linear


class MemoryBank(nnx.Module):
    """memory: [tokens, width], normal with `std`."""

    def __init__(self, tokens: int, width: int, std: float = 0.02, *, rngs: nnx.Rngs):
        self.memory = nnx.Param(initializers.normal(rngs.params(), (tokens, width), std))

    @property
    def latents(self):
        return self.memory[...]

    def expand(self, latents):
        return latents

    def get_memory(self):
        """Every memory vector: [tokens, width]."""
        return self.expand(self.latents)


class FactorizedMemoryBank(MemoryBank):
    """A: [tokens, rank], B: [width, rank]; the memory is A B^T."""

    def __init__(self, tokens: int, width: int, rank: int, std: float = 0.02, *, rngs: nnx.Rngs):
        self.A = nnx.Param(initializers.normal(rngs.params(), (tokens, rank), std))
        self.B = nnx.Param(initializers.normal(rngs.params(), (width, rank), rank**-0.5))

    @property
    def latents(self):
        return self.A[...]

    def expand(self, latents):
        return linear(latents, self.B[...])


class ReducedDimMemoryBank(MemoryBank):
    """memory: [tokens, rank]; attention works in the reduced width."""

    def __init__(self, tokens: int, rank: int, std: float = 0.02, *, rngs: nnx.Rngs):
        super().__init__(tokens, rank, std, rngs=rngs)


class QuantizedMemoryBank(nnx.Module):
    """A bank in 8 or 4 bits for inference. quantized_memory: int8 [tokens, width or width / 2]; scales: [tokens]."""

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
        """float32 [tokens, width]."""
        return self.latents


class ChapteredMemoryBank(nnx.Module):
    """A bank cut into chapters of consecutive tokens; keys gain `base_bank.`."""

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
        """Latents by chapter: [chapter, token, rank or width]."""
        latents = self.base_bank.latents
        return latents.reshape(self.num_chapters, self.chapter_tokens, latents.shape[-1])

    def select(self, indices):
        """Memory of the chapters `indices` [..., k]: [..., k, token, width]."""
        return self.base_bank.expand(nn.rows(self.chapters(), indices))


def make_bank(memory, width: int, rngs: nnx.Rngs) -> nnx.Module:
    """The bank that a `memory` section describes. width: memory_dim, or the model's."""
    std, tokens = memory.memory_init_std, memory.num_memory_tokens
    if memory.use_low_rank_memory and memory.low_rank_mode == "reduced_dim":
        bank = ReducedDimMemoryBank(tokens, memory.memory_rank, std, rngs=rngs)
    elif memory.use_low_rank_memory:
        bank = FactorizedMemoryBank(tokens, width, memory.memory_rank, std, rngs=rngs)
    else:
        bank = MemoryBank(tokens, width, std, rngs=rngs)
    return ChapteredMemoryBank(bank, memory.num_chapters) if memory.use_chapters else bank


def deployed(model: nnx.Module) -> nnx.Module:
    """The model as it is evaluated and decoded: a copy with quantised banks where `memory.quantize_memory` asks for it,
    else itself."""
    memory = model.memory
    if not memory.quantize_memory:
        return model
    return quantize_memory_for_deployment(nnx.clone(model), memory.memory_quant_bits)


def quantize_memory_for_deployment(model: nnx.Module, bits: int = 8) -> nnx.Module:
    """Replace every bank of a model by its quantised form, in place; low-rank banks are multiplied out first.

    A reduced-dim bank stays in its reduced width. Gives the model back.
    """
    for i, bank in enumerate(list(model.memory_banks)):
        if isinstance(bank, ChapteredMemoryBank):
            bank.base_bank = QuantizedMemoryBank(bank.base_bank.get_memory(), bits)
        else:
            model.memory_banks[i] = QuantizedMemoryBank(bank.get_memory(), bits)
    return model


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
