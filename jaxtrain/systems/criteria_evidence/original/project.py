"""Model family `Project` as torch modules: heads, and the models Criteria, Evidence, Share and Joint.

The original calls each of them `Model`, in a package of its own. The encoder is transformers' model, so its features
(config, gradient checkpointing, save_pretrained) are available.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import AutoModel

from jaxtrain.systems.criteria_evidence.project_models import classifier_options, part
from jaxtrain.systems.criteria_evidence.torch_heads import ClassificationHead, Hidden, SpanPredictionHead

Config = Mapping[str, Any] | None


def read(encoder: nn.Module, input_ids, attention_mask, token_type_ids) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the hidden states, and one vector per text: the pooler's output, or the first token without a pooler."""
    named = {"input_ids": input_ids, "attention_mask": attention_mask, "token_type_ids": token_type_ids}
    outputs = encoder(**{name: value for name, value in named.items() if value is not None})
    hidden = outputs.last_hidden_state
    pooled = getattr(outputs, "pooler_output", None)
    return hidden, hidden[:, 0] if pooled is None else pooled


def classifier(width: int, *options: Any) -> ClassificationHead:
    chosen = classifier_options(*options)
    return ClassificationHead(width, chosen.pop("num_labels"), chosen.pop("dropout"), **chosen)


class Criteria(nn.Module):
    """Classifier of whether the annotated symptom is present. forward -> logits [batch, class]."""

    def __init__(
        self,
        model_name: str = "bert-base-uncased",
        *,
        head_cfg: Config = None,
        task_cfg: Config = None,
        num_labels: int = 2,
        classifier_dropout: float = 0.1,
        classifier_layer_num: int = 1,
        classifier_hidden_dims: Hidden = None,
    ):
        super().__init__()
        self.encoder = AutoModel.from_pretrained(model_name)
        self.classifier = classifier(
            self.encoder.config.hidden_size,
            head_cfg,
            task_cfg,
            num_labels,
            classifier_dropout,
            classifier_layer_num,
            classifier_hidden_dims,
        )

    def forward(self, input_ids, attention_mask=None, token_type_ids=None) -> torch.Tensor:
        return self.classifier(read(self.encoder, input_ids, attention_mask, token_type_ids)[1])


class Evidence(nn.Module):
    """Span model that finds the supporting sentence in the post. forward -> start and end logits [batch, token]."""

    def __init__(
        self,
        model_name: str = "bert-base-uncased",
        *,
        head_cfg: Config = None,
        task_cfg: Config = None,
        dropout_prob: float = 0.1,
    ):
        super().__init__()
        self.encoder = AutoModel.from_pretrained(model_name)
        dropout = dict(head_cfg or {}).get("dropout", dropout_prob)
        self.span_head = SpanPredictionHead(self.encoder.config.hidden_size, dropout)

    def forward(self, input_ids, attention_mask=None, token_type_ids=None) -> tuple[torch.Tensor, torch.Tensor]:
        return self.span_head(read(self.encoder, input_ids, attention_mask, token_type_ids)[0])


class Share(nn.Module):
    """Criteria and evidence heads on one encoder. forward -> (logits, start, end), or a dict with return_dict=True."""

    def __init__(
        self,
        model_name: str = "bert-base-uncased",
        *,
        head_cfg: Config = None,
        task_cfg: Config = None,
        criteria_num_labels: int = 2,
        criteria_dropout: float = 0.1,
        criteria_layer_num: int = 1,
        criteria_hidden_dims: Hidden = None,
        evidence_dropout: float = 0.1,
    ):
        super().__init__()
        self.encoder = AutoModel.from_pretrained(model_name)
        width = self.encoder.config.hidden_size
        self.criteria_head = classifier(
            width,
            part(head_cfg, "criteria"),
            task_cfg,
            criteria_num_labels,
            criteria_dropout,
            criteria_layer_num,
            criteria_hidden_dims,
        )
        dropout = part(head_cfg, "evidence").get("dropout", evidence_dropout)
        self.evidence_head = SpanPredictionHead(width, dropout)

    def forward(self, input_ids, attention_mask=None, token_type_ids=None, return_dict: bool = False):
        hidden, pooled = read(self.encoder, input_ids, attention_mask, token_type_ids)
        return answer(self.criteria_head(pooled), *self.evidence_head(hidden), return_dict)


class Joint(nn.Module):
    """Model with two encoders; `fusion` of the sentence's vector is added to every token of the post.

    With this linear span head the fusion changes neither loss nor prediction (see project_models.Joint).
    """

    def __init__(
        self,
        criteria_model_name: str = "bert-base-uncased",
        evidence_model_name: str = "bert-base-uncased",
        *,
        head_cfg: Config = None,
        task_cfg: Config = None,
        criteria_num_labels: int = 2,
        criteria_dropout: float = 0.1,
        criteria_layer_num: int = 1,
        criteria_hidden_dims: Hidden = None,
        evidence_dropout: float = 0.1,
        fusion_dropout: float = 0.1,
    ):
        super().__init__()
        self.criteria_encoder = AutoModel.from_pretrained(criteria_model_name)
        self.evidence_encoder = AutoModel.from_pretrained(evidence_model_name)
        ours, theirs = self.criteria_encoder.config.hidden_size, self.evidence_encoder.config.hidden_size
        self.criteria_head = classifier(
            ours,
            part(head_cfg, "criteria"),
            task_cfg,
            criteria_num_labels,
            criteria_dropout,
            criteria_layer_num,
            criteria_hidden_dims,
        )
        self.fusion = nn.Sequential(nn.Dropout(fusion_dropout), nn.Linear(ours, theirs), nn.GELU())
        dropout = part(head_cfg, "evidence").get("dropout", evidence_dropout)
        self.evidence_head = SpanPredictionHead(theirs, dropout)

    def forward(
        self,
        criteria_input_ids,
        criteria_attention_mask=None,
        criteria_token_type_ids=None,
        evidence_input_ids=None,
        evidence_attention_mask=None,
        evidence_token_type_ids=None,
        return_dict: bool = False,
    ):
        """Return (logits, start, end) or a dict. Without evidence ids, both encoders read the sentence."""
        first = (criteria_input_ids, criteria_attention_mask, criteria_token_type_ids)
        second = (evidence_input_ids, evidence_attention_mask, evidence_token_type_ids)
        pooled = read(self.criteria_encoder, *first)[1]
        hidden = read(self.evidence_encoder, *(first if evidence_input_ids is None else second))[0]
        start, end = self.evidence_head(hidden + self.fusion(pooled)[:, None])
        return answer(self.criteria_head(pooled), start, end, return_dict)


def answer(logits, start, end, return_dict: bool):
    """Return (logits, start, end), or a dict with return_dict."""
    if return_dict:
        return {"logits": logits, "start_logits": start, "end_logits": end}
    return logits, start, end
