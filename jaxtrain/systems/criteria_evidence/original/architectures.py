"""Model family `architectures` as torch modules: selectable pooling, deeper heads, named outputs."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers import AutoModel
from transformers.utils import ModelOutput

from jaxtrain.systems.criteria_evidence.architecture_models import (
    classifier_of,
    first_present,
    labels_of,
    nested,
    pooling_of,
    span_depth,
    span_of,
)
from jaxtrain.systems.criteria_evidence.original import datasets
from jaxtrain.systems.criteria_evidence.torch_deep_heads import (
    ClassificationHead,
    SequencePooler,
    SpanPredictionHead,
)

Config = Mapping[str, Any] | None


# --- models ------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class CriteriaOutput(ModelOutput):
    logits: torch.Tensor | None = None


@dataclasses.dataclass
class EvidenceOutput(ModelOutput):
    start_logits: torch.Tensor | None = None
    end_logits: torch.Tensor | None = None


@dataclasses.dataclass
class ShareOutput(ModelOutput):
    logits: torch.Tensor | None = None
    start_logits: torch.Tensor | None = None
    end_logits: torch.Tensor | None = None


JointOutput = ShareOutput
TEXT = ("input_ids", "attention_mask", "token_type_ids")


class _Model(nn.Module):
    """Base of the models: takes tensors by name, or one mapping of them; ignores names that it does not read."""

    answer: Callable[[Mapping[str, Any]], ModelOutput]

    def forward(
        self,
        batch: Mapping[str, Any] | None = None,
        /,
        *,
        input_ids=None,
        attention_mask=None,
        token_type_ids=None,
        return_dict: bool = True,
        **more: Any,
    ):
        """Return a ModelOutput, or a tuple with return_dict=False. Raises TypeError for a positional tensor."""
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask, "token_type_ids": token_type_ids}
        return self._answer(batch, inputs | more, return_dict)

    def _answer(self, batch: Any, tensors: Mapping[str, Any], return_dict: bool):
        if batch is not None and not isinstance(batch, Mapping):
            raise TypeError(f"{type(self).__name__} takes tensors by name or one mapping, got {type(batch).__name__}")
        inputs = {**(batch or {}), **{name: value for name, value in tensors.items() if value is not None}}
        output = self.answer(inputs)
        return output if return_dict else output.to_tuple()


def encode(encoder: nn.Module, inputs: Mapping[str, Any], side: str = ""):
    """Return the encoder's output for one side's text, and its mask; missing tensors fall back to unprefixed ones."""
    tensors = {name: first_present(inputs.get(f"{side}{name}"), inputs.get(name)) for name in TEXT}
    outputs = encoder(**{name: value for name, value in tensors.items() if value is not None})
    return outputs, tensors["attention_mask"]


def pooled_by(pooler: SequencePooler, outputs: Any, mask: Any) -> torch.Tensor:
    return pooler(outputs.last_hidden_state, mask, getattr(outputs, "pooler_output", None))


class Criteria(_Model):
    """Classifier of whether the annotated symptom is present; returns a CriteriaOutput."""

    def __init__(
        self,
        model_name: str = "bert-base-uncased",
        *,
        head_cfg: Config = None,
        task_cfg: Config = None,
        num_labels: int = 2,
        classifier_dropout: float = 0.1,
        classifier_layer_num: int = 1,
        classifier_hidden_dims: Sequence[int] | None = None,
    ):
        super().__init__()
        head, task = dict(head_cfg or {}), dict(task_cfg or {})
        labels = first_present(task.get("num_labels"), head.get("num_labels"), num_labels)
        options = classifier_of(head, labels, classifier_dropout, classifier_layer_num, classifier_hidden_dims)
        self.encoder = AutoModel.from_pretrained(model_name)
        width = self.encoder.config.hidden_size
        self.pooler = SequencePooler(width, pooling_of(head, task))
        self.classifier = ClassificationHead(width, **options)

    def answer(self, inputs: Mapping[str, Any]) -> CriteriaOutput:
        return CriteriaOutput(self.classifier(pooled_by(self.pooler, *encode(self.encoder, inputs))))


class Evidence(_Model):
    """Span model that finds the supporting sentence in the post; returns an EvidenceOutput."""

    def __init__(
        self,
        model_name: str = "bert-base-uncased",
        *,
        head_cfg: Config = None,
        task_cfg: Config = None,
        dropout_prob: float = 0.1,
    ):
        super().__init__()
        head, task = dict(head_cfg or {}), dict(task_cfg or {})
        layers = first_present(head.get("layers"), task.get("layers"), 1)
        self.encoder = AutoModel.from_pretrained(model_name)
        self.span_head = SpanPredictionHead(self.encoder.config.hidden_size, **span_of(head, layers, dropout_prob))

    def answer(self, inputs: Mapping[str, Any]) -> EvidenceOutput:
        return EvidenceOutput(*self.span_head(encode(self.encoder, inputs)[0].last_hidden_state))


class Share(_Model):
    """Criteria and evidence heads on one shared encoder; returns a ShareOutput."""

    def __init__(
        self,
        model_name: str = "bert-base-uncased",
        *,
        head_cfg: Config = None,
        task_cfg: Config = None,
        criteria_num_labels: int = 2,
        criteria_dropout: float = 0.1,
        criteria_layer_num: int = 1,
        criteria_hidden_dims: Sequence[int] | None = None,
        evidence_dropout: float = 0.1,
    ):
        super().__init__()
        (criteria, evidence, _), task = nested(head_cfg), dict(task_cfg or {})
        labels = labels_of(criteria, task, criteria_num_labels)
        options = classifier_of(criteria, labels, criteria_dropout, criteria_layer_num, criteria_hidden_dims)
        self.encoder = AutoModel.from_pretrained(model_name)
        width = self.encoder.config.hidden_size
        self.pooler = SequencePooler(width, pooling_of(criteria, task))
        self.criteria_head = ClassificationHead(width, **options)
        self.evidence_head = SpanPredictionHead(width, **span_of(evidence, span_depth(evidence), evidence_dropout))

    def answer(self, inputs: Mapping[str, Any]) -> ShareOutput:
        outputs, mask = encode(self.encoder, inputs)
        logits = self.criteria_head(pooled_by(self.pooler, outputs, mask))
        return ShareOutput(logits, *self.evidence_head(outputs.last_hidden_state))


class Joint(_Model):
    """Model with two encoders; dropout(align(sentence vector)) is added to every token of the post.

    Returns a JointOutput.
    """

    def __init__(
        self,
        model_name: str = "bert-base-uncased",
        *,
        head_cfg: Config = None,
        task_cfg: Config = None,
        criteria_num_labels: int = 2,
        criteria_dropout: float = 0.1,
        criteria_layer_num: int = 1,
        criteria_hidden_dims: Sequence[int] | None = None,
        evidence_dropout: float = 0.1,
        fusion_dropout: float = 0.1,
        **ignored: Any,
    ):
        super().__init__()
        (criteria, evidence, shared), task = nested(head_cfg), dict(task_cfg or {})
        labels = labels_of(criteria, task, criteria_num_labels)
        options = classifier_of(criteria, labels, criteria_dropout, criteria_layer_num, criteria_hidden_dims)
        names = ("criteria_model_name", "evidence_model_name")
        first, second = (first_present(task.get(name), shared.get(name), model_name) for name in names)
        self.criteria_encoder, self.evidence_encoder = (
            AutoModel.from_pretrained(first),
            AutoModel.from_pretrained(second),
        )
        ours, theirs = self.criteria_encoder.config.hidden_size, self.evidence_encoder.config.hidden_size
        self.pooler = SequencePooler(ours, pooling_of(criteria, task))
        self.criteria_head = ClassificationHead(ours, **options)
        self.align = nn.Identity() if ours == theirs else nn.Linear(ours, theirs)
        self.fusion_dropout = nn.Dropout(first_present(shared.get("dropout"), fusion_dropout))
        self.evidence_head = SpanPredictionHead(theirs, **span_of(evidence, span_depth(evidence), evidence_dropout))

    def forward(  # type: ignore[override]
        self,
        batch: Mapping[str, Any] | None = None,
        /,
        *,
        criteria_input_ids=None,
        criteria_attention_mask=None,
        criteria_token_type_ids=None,
        evidence_input_ids=None,
        evidence_attention_mask=None,
        evidence_token_type_ids=None,
        return_dict: bool = True,
        **more: Any,
    ):
        """Return a JointOutput, or a tuple with return_dict=False; missing tensors fall back to unprefixed ones."""
        first = (criteria_input_ids, criteria_attention_mask, criteria_token_type_ids)
        second = (evidence_input_ids, evidence_attention_mask, evidence_token_type_ids)
        inputs = {f"criteria_{name}": value for name, value in zip(TEXT, first, strict=True)}
        inputs |= {f"evidence_{name}": value for name, value in zip(TEXT, second, strict=True)}
        return self._answer(batch, inputs | more, return_dict)

    def answer(self, inputs: Mapping[str, Any]) -> ShareOutput:
        pooled = pooled_by(self.pooler, *encode(self.criteria_encoder, inputs, "criteria_"))
        hidden = encode(self.evidence_encoder, inputs, "evidence_")[0].last_hidden_state
        start, end = self.evidence_head(hidden + self.fusion_dropout(self.align(pooled))[:, None])
        return JointOutput(self.criteria_head(pooled), start, end)


# --- data: text and criterion are read as a pair -----------------------------------------------------------------


class CriteriaDataset(datasets.CriteriaDataset):
    pairs = True


class EvidenceDataset(datasets.EvidenceDataset):
    pairs = True


class ShareDataset(datasets.ShareDataset):
    pairs = True


class JointDataset(datasets.JointDataset):
    pairs = True


Model = Criteria  # its name in the original, where each architecture has a module of its own
