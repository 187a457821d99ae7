"""Model family `architectures`: selectable pooling, deeper heads, and (text, criterion) pairs as input."""

from collections.abc import Sequence
from typing import Any

from flax import nnx

from jaxtrain import nn
from jaxtrain.errors import UserError
from jaxtrain.systems.criteria_evidence.encoder_config import Encoder
from jaxtrain.systems.criteria_evidence.encoders import build_encoder
from jaxtrain.systems.criteria_evidence.transformer_parts import SequencePooler

ACTIVATIONS = {"relu": "relu", "silu": "silu", "gelu": "gelu", "geglu": "gelu"}  # geglu is the original's name for gelu


def hidden_widths(width: int, layers: int, hidden: int | Sequence[int] | None, activation: str) -> list[int]:
    """Return the widths of the layers - 1 hidden layers after an input of `width`; [] if layers is 1.

    hidden: one width for all, a list of layers - 1 widths, or None for `width`; ignored if layers is 1.
    Raises UserError for layers < 1, a list of another length, or an unknown activation.
    """
    if layers < 1:
        raise UserError("layers must be >= 1")
    if layers == 1:
        return []
    one = width if hidden is None else hidden
    widths = [one] * (layers - 1) if isinstance(one, int) else list(one)
    if len(widths) != layers - 1:
        raise UserError("Number of hidden dimensions must equal layers - 1.")
    if activation not in ACTIVATIONS:
        raise UserError(f"Unsupported activation '{activation}'")
    return widths


def hidden_stack(in_features: int, layers: int, hidden, activation: str, dropout: float, rngs) -> tuple:
    """Return (Linear, activation, dropout) x (layers - 1) and its output width; arguments as in hidden_widths."""
    widths = hidden_widths(in_features, layers, hidden, activation)
    parts = []
    for before, width in zip([in_features, *widths], widths, strict=False):
        act = nn.Activation(nn.ACTIVATIONS[ACTIVATIONS[activation]])
        parts += [nn.Linear(before, width, rngs=rngs), act, nn.Dropout(dropout)]
    return nn.Sequential(*parts), [in_features, *widths][-1]


class ClassificationHead(nnx.Module):
    """Classifier: `ffn` of (Linear, activation, dropout) x (layers - 1), then dropout, then the Linear `out`."""

    def __init__(
        self, in_features, num_labels, layers=1, hidden=None, activation="gelu", dropout=0.1, *, rngs: nnx.Rngs
    ):
        self.ffn, width = hidden_stack(in_features, layers, hidden, activation, dropout, rngs)
        self.dropout = nn.Dropout(dropout)
        self.out = nn.Linear(width, num_labels, rngs=rngs)

    def __call__(self, x, rngs=None):
        return self.out(self.dropout(self.ffn(x, rngs), rngs))


class SpanPredictionHead(nnx.Module):
    """Span head: the hidden stack `layers`, then dropout and `out_proj` to start and end logits [batch, token]."""

    def __init__(self, in_features, layers=1, hidden=None, activation="gelu", dropout=0.1, *, rngs: nnx.Rngs):
        self.layers, width = hidden_stack(in_features, layers, hidden, activation, dropout, rngs)
        self.dropout = nn.Dropout(dropout)
        self.out_proj = nn.Linear(width, 2, rngs=rngs)

    def __call__(self, x, rngs=None):
        y = self.out_proj(self.dropout(self.layers(x, rngs), rngs))
        return y[..., 0], y[..., 1]


def first_present(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


def pooling_of(head: dict, task: dict) -> str:
    return first_present(head.get("pooling"), task.get("pooling"), "cls")


def classifier_of(head: dict, num_labels: int, dropout: float, layer_num: int, hidden_dims) -> dict:
    """Return ClassificationHead's options. `head` (head_cfg) wins over hidden_dims, and hidden_dims over layer_num."""
    head_depth = None if hidden_dims is None else len(hidden_dims) + 1
    return {
        "num_labels": num_labels,
        "layers": first_present(head.get("layers"), head_depth, layer_num),
        "hidden": first_present(head.get("hidden"), hidden_dims),
        "activation": first_present(head.get("activation"), "gelu"),
        "dropout": first_present(head.get("dropout"), dropout),
    }


def span_of(head: dict, layers: int, dropout: float) -> dict:
    return {
        "layers": layers,
        "hidden": head.get("hidden"),
        "activation": first_present(head.get("activation"), "gelu"),
        "dropout": first_present(head.get("dropout"), dropout),
    }


def nested(head_cfg) -> tuple[dict, dict, dict]:
    """Return the criteria, evidence and shared parts of a head_cfg; a flat head_cfg is used for all three."""
    head = dict(head_cfg or {})
    if {"criteria", "evidence", "shared"} & set(head):
        return dict(head.get("criteria") or {}), dict(head.get("evidence") or {}), dict(head.get("shared") or {})
    return head, head, head


def span_depth(head: dict) -> int:
    """Return an evidence head's `layers`; by default 2 for a single width, one more than a list of widths, else 1."""
    hidden = head.get("hidden")
    if head.get("layers") is not None:
        return head["layers"]
    if isinstance(hidden, int):
        return 2
    return len(hidden) + 1 if hidden is not None else 1


def labels_of(head: dict, task: dict, default: int) -> int:
    return task.get("criteria_num_labels") or task.get("num_labels") or head.get("num_labels") or default


class Criteria(nnx.Module):
    def __init__(
        self,
        encoder: Encoder,
        *,
        head_cfg=None,
        task_cfg=None,
        num_labels: int = 2,
        classifier_dropout: float = 0.1,
        classifier_layer_num: int = 1,
        classifier_hidden_dims=None,
        rngs: nnx.Rngs,
    ):
        head, task = dict(head_cfg or {}), dict(task_cfg or {})
        labels = first_present(task.get("num_labels"), head.get("num_labels"), num_labels)
        options = classifier_of(head, labels, classifier_dropout, classifier_layer_num, classifier_hidden_dims)
        self.encoder = build_encoder(encoder, rngs=rngs)
        self.pooler = SequencePooler(encoder.hidden_size, pooling_of(head, task), rngs=rngs)
        self.classifier = ClassificationHead(encoder.hidden_size, **options, rngs=rngs)

    def __call__(self, input_ids, attention_mask=None, token_type_ids=None, rngs=None) -> dict:
        encoding = self.encoder(input_ids, attention_mask, token_type_ids, rngs)
        return {"logits": self.classifier(self.pooler(encoding.hidden, attention_mask, encoding.pooled), rngs)}


class Evidence(nnx.Module):
    def __init__(self, encoder: Encoder, *, head_cfg=None, task_cfg=None, dropout_prob: float = 0.1, rngs):
        head, task = dict(head_cfg or {}), dict(task_cfg or {})
        layers = first_present(head.get("layers"), task.get("layers"), 1)
        self.encoder = build_encoder(encoder, rngs=rngs)
        self.span_head = SpanPredictionHead(encoder.hidden_size, **span_of(head, layers, dropout_prob), rngs=rngs)

    def __call__(self, input_ids, attention_mask=None, token_type_ids=None, rngs=None) -> dict:
        start, end = self.span_head(self.encoder(input_ids, attention_mask, token_type_ids, rngs).hidden, rngs)
        return {"start_logits": start, "end_logits": end}


class Share(nnx.Module):
    def __init__(
        self,
        encoder: Encoder,
        *,
        head_cfg=None,
        task_cfg=None,
        criteria_num_labels: int = 2,
        criteria_dropout: float = 0.1,
        criteria_layer_num: int = 1,
        criteria_hidden_dims=None,
        evidence_dropout: float = 0.1,
        rngs: nnx.Rngs,
    ):
        (criteria, evidence, _), task = nested(head_cfg), dict(task_cfg or {})
        labels = labels_of(criteria, task, criteria_num_labels)
        options = classifier_of(criteria, labels, criteria_dropout, criteria_layer_num, criteria_hidden_dims)
        width = encoder.hidden_size
        self.encoder = build_encoder(encoder, rngs=rngs)
        self.pooler = SequencePooler(width, pooling_of(criteria, task), rngs=rngs)
        self.criteria_head = ClassificationHead(width, **options, rngs=rngs)
        span = span_of(evidence, span_depth(evidence), evidence_dropout)
        self.evidence_head = SpanPredictionHead(width, **span, rngs=rngs)

    def __call__(self, input_ids, attention_mask=None, token_type_ids=None, rngs=None) -> dict:
        encoding = self.encoder(input_ids, attention_mask, token_type_ids, rngs)
        logits = self.criteria_head(self.pooler(encoding.hidden, attention_mask, encoding.pooled), rngs)
        start, end = self.evidence_head(encoding.hidden, rngs)
        return {"logits": logits, "start_logits": start, "end_logits": end}


class Joint(nnx.Module):
    """Model with two encoders; dropout(align(criteria vector)) is added to every token of the post.

    With a one-layer span head the addition changes no prediction (see project_models.Joint); deeper heads use it.
    """

    def __init__(
        self,
        criteria_encoder: Encoder,
        evidence_encoder: Encoder,
        *,
        head_cfg=None,
        task_cfg=None,
        criteria_num_labels: int = 2,
        criteria_dropout: float = 0.1,
        criteria_layer_num: int = 1,
        criteria_hidden_dims=None,
        evidence_dropout: float = 0.1,
        fusion_dropout: float = 0.1,
        rngs: nnx.Rngs,
    ):
        (criteria, evidence, shared), task = nested(head_cfg), dict(task_cfg or {})
        ours, theirs = criteria_encoder.hidden_size, evidence_encoder.hidden_size
        labels = labels_of(criteria, task, criteria_num_labels)
        options = classifier_of(criteria, labels, criteria_dropout, criteria_layer_num, criteria_hidden_dims)
        self.criteria_encoder = build_encoder(criteria_encoder, rngs=rngs)
        self.evidence_encoder = build_encoder(evidence_encoder, rngs=rngs)
        self.pooler = SequencePooler(ours, pooling_of(criteria, task), rngs=rngs)
        self.criteria_head = ClassificationHead(ours, **options, rngs=rngs)
        self.align = nn.Identity() if ours == theirs else nn.Linear(ours, theirs, rngs=rngs)
        self.fusion_dropout = nn.Dropout(first_present(shared.get("dropout"), fusion_dropout))
        span = span_of(evidence, span_depth(evidence), evidence_dropout)
        self.evidence_head = SpanPredictionHead(theirs, **span, rngs=rngs)

    def __call__(
        self,
        input_ids=None,
        attention_mask=None,
        token_type_ids=None,
        criteria_input_ids=None,
        criteria_attention_mask=None,
        criteria_token_type_ids=None,
        evidence_input_ids=None,
        evidence_attention_mask=None,
        evidence_token_type_ids=None,
        rngs=None,
    ) -> dict:
        """Return the logits by name. A missing criteria_* or evidence_* tensor falls back to the unprefixed one."""
        both = (input_ids, attention_mask, token_type_ids)
        criteria = (criteria_input_ids, criteria_attention_mask, criteria_token_type_ids)
        evidence = (evidence_input_ids, evidence_attention_mask, evidence_token_type_ids)
        ids, mask, types = (first_present(separate, shared) for separate, shared in zip(criteria, both, strict=True))
        first = self.criteria_encoder(ids, mask, types, rngs)
        pooled = self.pooler(first.hidden, mask, first.pooled)
        ids, mask, types = (first_present(separate, shared) for separate, shared in zip(evidence, both, strict=True))
        second = self.evidence_encoder(ids, mask, types, rngs)
        fused = second.hidden + self.fusion_dropout(self.align(pooled), rngs)[:, None]
        start, end = self.evidence_head(fused, rngs)
        return {"logits": self.criteria_head(pooled, rngs), "start_logits": start, "end_logits": end}
