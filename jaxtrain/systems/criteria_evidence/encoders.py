"""One function that builds the encoder a config describes."""

from flax import nnx

from jaxtrain.systems.criteria_evidence.bert import BertEncoder
from jaxtrain.systems.criteria_evidence.deberta import DebertaEncoder
from jaxtrain.systems.criteria_evidence.encoder_config import Encoder


def build_encoder(config: Encoder, *, rngs: nnx.Rngs) -> BertEncoder | DebertaEncoder:
    """A freshly drawn encoder."""
    kind = DebertaEncoder if config.kind == "deberta" else BertEncoder
    return kind(config, rngs=rngs)


def unread_by(config: Encoder, prefix: str, pooled_is_read: bool) -> tuple[str, ...]:
    """Key prefixes of parameters that no output depends on. torch gives them no gradient, so its optimizers pass over
    them, weight decay too; they are kept out of the optimizer here for the same reason."""
    unread = []
    if config.has_pooler and not pooled_is_read:
        unread.append(f"{prefix}.pooler.")
    if config.kind == "deberta" and not (config.relative_attention and config.pos_att_type):
        unread += [f"{prefix}.encoder.rel_embeddings.", f"{prefix}.encoder.LayerNorm."]
    if config.kind == "deberta" and not config.num_hidden_layers:
        unread += [f"{prefix}.encoder."]
    return tuple(unread)
