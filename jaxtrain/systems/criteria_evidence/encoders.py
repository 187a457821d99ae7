"""Build encoders from their configs, and list the encoder parameters that get no gradient."""

from flax import nnx

from jaxtrain.systems.criteria_evidence.bert import BertEncoder
from jaxtrain.systems.criteria_evidence.deberta import DebertaEncoder
from jaxtrain.systems.criteria_evidence.encoder_config import Encoder


def build_encoder(config: Encoder, *, rngs: nnx.Rngs) -> BertEncoder | DebertaEncoder:
    """Return a randomly initialised encoder of the config's kind."""
    kind = DebertaEncoder if config.kind == "deberta" else BertEncoder
    return kind(config, rngs=rngs)


def unread_by(config: Encoder, prefix: str, pooled_is_read: bool) -> tuple[str, ...]:
    """Return the key prefixes of parameters that no output depends on.

    In torch their gradient is None, so its optimizers skip them, weight decay included. They are excluded from the
    optimizer here to match.
    """
    unread = []
    if config.has_pooler and not pooled_is_read:
        unread.append(f"{prefix}.pooler.")
    if config.kind == "deberta" and not (config.relative_attention and config.pos_att_type):
        unread += [f"{prefix}.encoder.rel_embeddings.", f"{prefix}.encoder.LayerNorm."]
    if config.kind == "deberta" and not config.num_hidden_layers:
        unread += [f"{prefix}.encoder."]
    return tuple(unread)
