"""The models in plain torch. They load an exported state dict with strict=True; no transformers, no peft needed."""

import torch
from torch import nn
from torch.nn import functional

from jaxtrain.systems.criteria_evidence import model as options
from jaxtrain.systems.criteria_evidence import torch_deep_heads, torch_heads
from jaxtrain.systems.criteria_evidence.architecture_models import classifier_of, span_depth, span_of
from jaxtrain.systems.criteria_evidence.project_models import classifier_options
from jaxtrain.systems.criteria_evidence.torch_encoders import Encoder, PeftEncoder


class Twin(nn.Module):
    """Model of any architecture of the families project and architectures; children in the originals' order."""

    def __init__(self, architecture, config):
        super().__init__()
        model = config.model
        self.deep, self.architecture = model.family == "architectures", architecture
        criteria, evidence = model.criteria.chosen(), model.evidence.chosen()
        sizes = options.encoders_of(architecture, model)
        for name, size in sizes.items():
            encoder = Encoder(size)
            self.add_module(name, PeftEncoder(encoder, model.lora, size) if model.lora.enabled else encoder)
        first, last = (list(sizes.values())[i].hidden_size for i in (0, -1))
        if self.deep and architecture != "evidence":
            self.pooler = torch_deep_heads.SequencePooler(first, criteria.get("pooling", "cls"))
        if architecture != "evidence":
            name = "classifier" if architecture == "criteria" else "criteria_head"
            self.add_module(name, self._classifier(first, model.num_labels, criteria))
        if architecture == "joint":
            self._fuse(first, last, model.fusion_dropout)
        if architecture != "criteria":
            name = "span_head" if architecture == "evidence" else "evidence_head"
            self.add_module(name, self._spans(last, evidence))

    def _fuse(self, first, last, dropout):
        if self.deep:
            self.align = nn.Identity() if first == last else nn.Linear(first, last)
            self.fusion_dropout = nn.Dropout(dropout)
        else:
            self.fusion = nn.Sequential(nn.Dropout(dropout), nn.Linear(first, last), nn.GELU())

    def _classifier(self, width, labels, head):
        if self.deep:
            return torch_deep_heads.ClassificationHead(width, **classifier_of(head, labels, 0.1, 1, None))
        chosen = classifier_options(head, None, labels, 0.1, 1, None)
        return torch_heads.ClassificationHead(width, chosen.pop("num_labels"), chosen.pop("dropout"), **chosen)

    def _spans(self, width, head):
        if not self.deep:
            return torch_heads.SpanPredictionHead(width, head.get("dropout", 0.1))
        layers = head.get("layers", 1) if self.architecture == "evidence" else span_depth(head)
        return torch_deep_heads.SpanPredictionHead(width, **span_of(head, layers, 0.1))

    def _vector(self, hidden, pooled, mask):
        if self.deep:
            return self.pooler(hidden, mask, pooled)
        return hidden[:, 0] if pooled is None else pooled

    def forward(self, batch):
        outputs = {}
        read = lambda side: [batch.get(f"{side}{n}") for n in ("input_ids", "attention_mask", "token_type_ids")]
        if self.architecture == "joint":
            texts = read("criteria_")
            hidden, pooled = self.criteria_encoder(*texts)
            vector = self._vector(hidden, pooled, texts[1])
            outputs["logits"] = self.criteria_head(vector)
            added = self.fusion_dropout(self.align(vector)) if self.deep else self.fusion(vector)
            outputs["start_logits"], outputs["end_logits"] = self.evidence_head(
                self.evidence_encoder(*read("evidence_"))[0] + added[:, None]
            )
            return outputs
        texts = read("")
        hidden, pooled = self.encoder(*texts)
        if self.architecture != "evidence":
            head = self.classifier if self.architecture == "criteria" else self.criteria_head
            outputs["logits"] = head(self._vector(hidden, pooled, texts[1]))
        if self.architecture != "criteria":
            head = self.span_head if self.architecture == "evidence" else self.evidence_head
            outputs["start_logits"], outputs["end_logits"] = head(hidden)
        return outputs


class BaseTwin(nn.Module):
    """Model of family base; criteria and evidence have the same one."""

    def __init__(self, config):
        super().__init__()
        model = config.model
        size = options.encoders_of("criteria", model)["encoder"]
        encoder = Encoder(size)
        self.encoder, self.head = nn.Module(), nn.Module()
        self.encoder.encoder = PeftEncoder(encoder, model.lora, size) if model.lora.enabled else encoder
        dropout, hidden = nn.Dropout(model.criteria.chosen().get("dropout", 0.1)), model.base_hidden
        last = nn.Linear(hidden or size.hidden_size, model.num_labels)
        parts = [nn.Linear(size.hidden_size, hidden), nn.ReLU(), dropout, last] if hidden else [dropout, last]
        self.head.classifier = nn.Sequential(*parts)
        self.mean = model.base_pooling == "mean"

    def forward(self, batch):
        hidden, _ = self.encoder.encoder(batch["input_ids"], batch["attention_mask"])
        weight = batch["attention_mask"][..., None].to(hidden.dtype)
        vector = (hidden * weight).sum(1) / weight.sum(1).clamp(min=1e-9) if self.mean else hidden[:, 0]
        return {"logits": self.head.classifier(vector)}


def build(architecture, config):
    return BaseTwin(config) if config.model.family == "base" else Twin(architecture, config)


def call(module, batch):
    return module({key: value.long() if not value.is_floating_point() else value for key, value in batch.items()})


def loss(module, batch, config):
    """Return the task's loss in torch, for parity tests and as the DDP baseline."""
    outputs, settings, valid = call(module, batch), config.loss, batch["valid"].bool()
    parts = []
    if "logits" in outputs:
        rows = classification_rows(outputs["logits"], batch["labels"].long(), settings)
        rows = rows * batch["row_weight"] if "row_weight" in batch else rows
        parts.append((mean_of(rows, valid), settings.weights.criteria))
    if "start_logits" in outputs:
        mask = batch.get("evidence_attention_mask", batch.get("attention_mask")) != 0
        total = 0.0
        for name in ("start", "end"):
            shown = mask if settings.mask_padding else torch.ones_like(mask)
            positions = batch[f"{name}_positions"].long()
            rows = position_rows(outputs[f"{name}_logits"], positions, shown, settings.label_smoothing)
            total = total + mean_of(rows, valid)
        parts.append((total / 2, settings.weights.evidence))
    return parts[0][0] if len(parts) == 1 else sum(value * weight for value, weight in parts)


def mean_of(rows: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """Return the mean over the valid rows, in a form of fixed shapes, which torch.compile takes whole."""
    return torch.where(valid, rows, 0.0).sum() / valid.sum()


def position_rows(logits, positions, visible, smoothing):
    """Return each row's cross-entropy over the visible tokens; 0 if the row has no answer."""
    log_p = logits.masked_fill(~visible, torch.finfo(logits.dtype).min).log_softmax(-1)
    picked = log_p.gather(-1, positions.clamp(min=0)[:, None])[:, 0]
    spread = log_p.masked_fill(~visible, 0.0).sum(-1) / visible.sum(-1).clamp(min=1)
    return torch.where(positions >= 0, -(1 - smoothing) * picked - smoothing * spread, 0.0)


def classification_rows(logits, labels, settings):
    rows = functional.cross_entropy(logits, labels, label_smoothing=settings.label_smoothing, reduction="none")
    if settings.focal_gamma:
        rows = rows * (1 - logits.softmax(-1).gather(-1, labels[:, None])[:, 0]) ** settings.focal_gamma
    return rows
