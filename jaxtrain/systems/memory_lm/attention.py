"""Layers: self-attention with rotary positions and grouped heads, memory cross-attention, and the MLP."""

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain import nn
from jaxtrain.errors import UserError
from jaxtrain.nn.dropout import dropout
from jaxtrain.runtime import spread
from jaxtrain.systems.memory_lm.config import check_heads


class Rotary(nnx.Module):
    """Rotary positions. inv_freq [head width / 2] is a buffer because the original saves it. Source: Su et al. 2021.

    Raises UserError for an odd head width.
    """

    def __init__(self, width: int, theta: float):
        if width % 2:
            raise UserError(f"model.num_heads: rotary positions need an even head width, got {width}")
        self.inv_freq = nn.Buffer(theta ** (-jnp.arange(0, width, 2, dtype=jnp.float32) / width))

    def table(self, positions):
        """Return cos and sin [..., width] of int positions [...]."""
        return rotary_angles(positions, self.inv_freq[...])


def rotary_angles(positions, inv_freq):
    angles = positions[..., None].astype(jnp.float32) * inv_freq
    angles = jnp.concatenate([angles, angles], axis=-1)
    return jnp.cos(angles), jnp.sin(angles)


class SelfAttention(nnx.Module):
    """Causal self-attention; the projections have no bias."""

    def __init__(self, config, *, rngs: nnx.Rngs):
        width, head = config.hidden_dim, config.hidden_dim // config.num_heads
        self.q_proj = nn.Linear(width, width, bias=False, rngs=rngs)
        self.k_proj = nn.Linear(width, config.kv_heads * head, bias=False, rngs=rngs)
        self.v_proj = nn.Linear(width, config.kv_heads * head, bias=False, rngs=rngs)
        self.o_proj = nn.Linear(width, width, bias=False, rngs=rngs)
        self.rotary = Rotary(head, config.rope_theta) if config.use_rope else None
        self.head = head
        self.dropout = config.attention_dropout

    def __call__(self, x, view, layer: int, rngs=None):
        """Attend within x [batch, time, width]. `view` (cache.View) holds the mask, and cached keys and values."""
        q, k, v = (
            project(x).reshape(*x.shape[:2], -1, self.head) for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.rotary is not None:
            cos, sin = self.rotary.table(view.positions)
            q, k = nn.rotate(q, cos, sin), nn.rotate(k, cos, sin)
        k, v = view.extend(layer, k, v)
        y = view.attend(q, k, v, self.dropout, rngs)
        return self.o_proj(y.reshape(*x.shape[:2], -1))


class MLP(nnx.Module):
    """Feed-forward layer. swiglu: down(silu(gate(x)) * up(x)); other activations: down(act(up(x))), without a gate."""

    def __init__(self, config, *, rngs: nnx.Rngs):
        width, inner = config.hidden_dim, config.intermediate_dim
        gated = config.hidden_activation == "swiglu"
        self.gate_proj = nn.Linear(width, inner, bias=False, rngs=rngs) if gated else None
        self.up_proj = nn.Linear(width, inner, bias=False, rngs=rngs)
        self.down_proj = nn.Linear(inner, width, bias=False, rngs=rngs)
        self.activation = nn.ACTIVATIONS["silu" if gated else config.hidden_activation]
        self.dropout = config.dropout

    def __call__(self, x, rngs=None):
        y = self.up_proj(x)
        y = self.activation(y) if self.gate_proj is None else self.activation(self.gate_proj(x)) * y
        return dropout(self.down_proj(y), self.dropout, rngs)


class MemoryCrossAttention(nnx.Module):
    """Cross-attention from the residual stream (queries) to memory tokens (keys, values); no positions, no mask.

    width: of the residual stream. memory_width: of memory vectors. kv_heads must divide heads. rank: of low-rank
    projections (None for full ones). reduced: attention works in memory_width instead of width (reduced-dim banks).
    """

    def __init__(self, width, memory_width, heads, kv_heads, dropout=0.0, rank=None, reduced=False, *, rngs):
        inner = memory_width if reduced else width
        check_heads(inner, heads, kv_heads)
        head = inner // heads
        sizes = {
            "q": (width, inner),
            "k": (memory_width, kv_heads * head),
            "v": (memory_width, kv_heads * head),
            "o": (inner, width),
        }
        for name, (into, out) in sizes.items():
            if rank is None or reduced:
                setattr(self, f"{name}_proj", nn.Linear(into, out, bias=False, rngs=rngs))
            else:
                setattr(self, f"{name}_down", nn.Linear(into, rank, bias=False, rngs=rngs))
                setattr(self, f"{name}_up", nn.Linear(rank, out, bias=False, rngs=rngs))
        self.low_rank = rank is not None and not reduced
        self.head = head
        self.dropout = dropout

    @property
    def output(self) -> nn.Linear:
        """Return the last projection; it is initialised to zero so that an untrained memory adds nothing."""
        return self.o_up if self.low_rank else self.o_proj

    def project(self, name: str, x):
        if self.low_rank:
            return getattr(self, f"{name}_up")(getattr(self, f"{name}_down")(x))
        return getattr(self, f"{name}_proj")(x)

    def heads(self, name: str, x):
        """Project x [..., width] with projection `name` and split it into [..., head, head width]."""
        y = self.project(name, x)
        return y.reshape(*y.shape[:-1], -1, self.head)

    def __call__(self, x, memory, rngs=None):
        """Read memory [token, memory width], or per sample [batch, token, memory width], for x [batch, time, width]."""
        return self.merge(self.attend(self.heads("q", x), memory, rngs))

    def attend(self, q, memory, rngs=None):
        """Attend with one softmax over all memory tokens; q and the result are [batch, time, head, head width]."""
        k, v = self.heads("k", memory), self.heads("v", memory)
        if memory.ndim == 3:
            return nn.attention(q, k, v, dropout_rate=self.dropout, rngs=rngs)
        if spread.parts("sequence") > 1:  # rows whose tokens are sharded cannot be flattened
            k, v = (jnp.broadcast_to(x, (len(q), *x.shape)) for x in (k, v))
            return nn.attention(q, k, v, dropout_rate=self.dropout, rngs=rngs)
        flat = q.reshape(1, -1, *q.shape[2:])  # all rows share the bank: avoid a copy per sample
        return nn.attention(flat, k[None], v[None], dropout_rate=self.dropout, rngs=rngs).reshape(q.shape)

    def attend_chapters(self, q, memory, weights, rngs=None):
        """Attend with a softmax within each chapter; return the weighted sum over chapters.

        memory: [batch, chapter, token, memory width]; weights: [batch, chapter]. Returns [batch, time, head, head
        width] in float32.
        """
        k, v = self.heads("k", memory), self.heads("v", memory)
        groups = q.shape[2] // k.shape[-2]
        k, v = (jnp.repeat(each, groups, axis=-2) for each in (k, v))
        scores = jnp.einsum("bqhd,bckhd->bhqck", q, k).astype(jnp.float32) * self.head**-0.5
        p = dropout(jax.nn.softmax(scores, axis=-1), self.dropout, rngs) * weights[:, None, None, :, None]
        return jnp.einsum("bhqck,bckhd->bqhd", p.astype(v.dtype), v)

    def attend_routed(self, q, chapters, indices, weights, rngs=None):
        """Let every token read its own chapters with a softmax within each; return the weighted sum in float32.

        chapters: [chapter, token, memory width]; indices, weights: [batch, time, slot]. Slots are computed one at a
        time and recomputed in the backward pass, so only one slot's gathered chapters are in memory.
        """

        def slot(total, scores, mix, weight):
            return total + mix(jax.nn.softmax(scores, axis=-1)) * weight[..., None]

        return self._slots(slot, lambda zeros: zeros, q, chapters, indices, weights, rngs).reshape(q.shape)

    def attend_jointly(self, q, chapters, indices, weights, rngs=None):
        """Do `attend_routed` with one joint softmax over all chapters of a token; weights scale keys and values.

        The softmax is accumulated over slots with a running maximum (online softmax).
        """

        def slot(carry, scores, mix, weight):
            largest, total, y = carry
            scores = scores * weight[..., None]
            grown = jax.lax.stop_gradient(jnp.maximum(largest, scores.max(-1)))
            p, decay = jnp.exp(scores - grown[..., None]), jnp.exp(largest - grown)
            return grown, total * decay + p.sum(-1), y * decay[..., None] + mix(p) * weight[..., None]

        start = lambda zeros: (zeros[..., 0] - jnp.inf, zeros[..., 0], zeros)
        _, total, y = self._slots(slot, start, q, chapters, indices, weights, rngs)
        return (y / total[..., None]).reshape(q.shape)

    def _slots(self, slot, start, q, chapters, indices, weights, rngs):
        """Fold `slot` over the slots of `indices`, from start(zeros); return the last carry.

        slot(carry, scores [batch, time, kv, group, token], mix, weight [batch, time, 1, 1]) returns the next carry.
        mix: probabilities in the shape of scores -> weighted sum of the values, after dropout.
        """
        k, v = self.heads("k", chapters), self.heads("v", chapters)
        grouped = q.reshape(*q.shape[:2], k.shape[-2], -1, self.head)

        def read(carry, q, k, v, index, weight, key):
            keys, values = (nn.rows(each, index) for each in (k, v))  # [batch, time, token, kv, head width]
            scores = jnp.einsum("btngd,btknd->btngk", q, keys).astype(jnp.float32) * self.head**-0.5

            def mix(p):
                p = dropout(p, self.dropout, None if key is None else lambda: key)
                return jnp.einsum("btngk,btknd->btngd", p.astype(values.dtype), values).astype(jnp.float32)

            return slot(carry, scores, mix, weight[..., None, None])

        use_keys = rngs is not None and self.dropout > 0
        carry = start(jnp.zeros(grouped.shape, jnp.float32))
        for i in range(indices.shape[-1]):
            key = rngs() if use_keys else None
            carry = jax.checkpoint(read)(carry, grouped, k, v, indices[..., i], weights[..., i], key)
        return carry

    def merge(self, y):
        """Join the heads [batch, time, head, head width] and project to [batch, time, width]."""
        return self.project("o", y.reshape(*y.shape[:2], -1))
