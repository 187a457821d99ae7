"""Model family `base` (`psy_agents_noaug.models`): a transformer encoder with a small classifier, optional LoRA."""

from flax import nnx

from jaxtrain import nn
from jaxtrain.errors import UserError
from jaxtrain.systems.criteria_evidence.encoder_config import Encoder
from jaxtrain.systems.criteria_evidence.encoders import build_encoder
from jaxtrain.systems.criteria_evidence.lora import add_lora
from jaxtrain.systems.criteria_evidence.transformer_parts import masked_mean


class TransformerEncoder(nnx.Module):
    """Encoder that returns one vector per text [batch, width]: the first token's hidden state ("cls", without the
    pooler) or the masked mean ("mean"). Raises UserError for another pooling_strategy."""

    def __init__(self, encoder: Encoder, pooling_strategy: str = "cls", lora=None, *, rngs):
        if pooling_strategy not in ("cls", "mean"):
            raise UserError(f"pooling_strategy: {pooling_strategy!r} is unknown, wanted cls or mean")
        self.encoder = add_lora(build_encoder(encoder, rngs=rngs), lora, encoder, rngs=rngs)
        self.pooling_strategy = pooling_strategy

    def __call__(self, input_ids, attention_mask=None, token_type_ids=None, rngs=None):
        """Return the pooled vectors. token_type_ids are ignored because the original never passes them."""
        hidden = self.encoder(input_ids, attention_mask, None, rngs).hidden
        if self.pooling_strategy == "cls":
            return hidden[:, 0]
        mask = (input_ids == input_ids) if attention_mask is None else attention_mask
        return masked_mean(hidden, mask, 1e-9)


class Head(nnx.Module):
    """Classifier: (Dropout, Linear), or (Linear, ReLU, Dropout, Linear) with a hidden_dim.

    State-dict keys are classifier.1, or classifier.0 and classifier.3 with a hidden_dim.
    """

    def __init__(self, in_features: int, num_classes: int, dropout: float, hidden_dim: int | None, *, rngs: nnx.Rngs):
        if hidden_dim:
            first, last = nn.Linear(in_features, hidden_dim, rngs=rngs), nn.Linear(hidden_dim, num_classes, rngs=rngs)
            parts = [first, nn.Activation(nn.ACTIVATIONS["relu"]), nn.Dropout(dropout), last]
        else:
            parts = [nn.Dropout(dropout), nn.Linear(in_features, num_classes, rngs=rngs)]
        self.classifier = nn.Sequential(*parts)

    def __call__(self, x, rngs=None):
        return self.classifier(x, rngs)


class Classifier(nnx.Module):
    """The original's CriteriaModel and EvidenceModel, which are identical: here evidence is a classification too."""

    def __init__(
        self,
        encoder: Encoder,
        *,
        num_classes: int = 2,
        dropout: float = 0.1,
        hidden_dim: int | None = None,
        pooling_strategy: str = "cls",
        lora=None,
        rngs: nnx.Rngs,
    ):
        self.encoder = TransformerEncoder(encoder, pooling_strategy, lora, rngs=rngs)
        self.head = Head(encoder.hidden_size, num_classes, dropout, hidden_dim, rngs=rngs)

    def __call__(self, input_ids, attention_mask=None, token_type_ids=None, rngs=None) -> dict:
        return {"logits": self.head(self.encoder(input_ids, attention_mask, token_type_ids, rngs), rngs)}
