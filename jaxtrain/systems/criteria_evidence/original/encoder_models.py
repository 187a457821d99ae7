"""Model family `psy_agents_noaug.models` as torch modules: an encoder with its tokenizer, and a small classifier."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers import AutoModel, AutoTokenizer

from jaxtrain.errors import UserError
from jaxtrain.systems.criteria_evidence.lora import Lora

POOLINGS = ("cls", "mean")


class TransformerEncoder(nn.Module):
    """Encoder that returns one vector per text [batch, width]: the first token's hidden state ("cls", without the
    pooler) or the masked mean ("mean").

    `encoder` is transformers' model, `tokenizer` its tokenizer. lora_config: enabled, r, alpha, dropout,
    target_modules; needs peft. Raises UserError for another pooling_strategy.
    """

    def __init__(
        self,
        model_name: str = "bert-base-uncased",
        freeze_encoder: bool = False,
        pooling_strategy: str = "cls",
        max_length: int = 512,
        gradient_checkpointing: bool = False,
        lora_config: Mapping[str, Any] | None = None,
    ):
        super().__init__()
        if pooling_strategy not in POOLINGS:
            raise UserError(f"Unknown pooling strategy: {pooling_strategy}, wanted one of {', '.join(POOLINGS)}")
        self.model_name, self.pooling_strategy, self.max_length = model_name, pooling_strategy, max_length
        self.freeze_encoder, self.gradient_checkpointing = freeze_encoder, gradient_checkpointing
        self.lora_config = lora_config
        self.tokenizer = AutoTokenizer.from_pretrained(model_name)
        self.encoder = AutoModel.from_pretrained(model_name)
        self.hidden_size = self.encoder.config.hidden_size
        if gradient_checkpointing:
            self.encoder.gradient_checkpointing_enable()
        if freeze_encoder:
            self.freeze()
        if lora_config and lora_config.get("enabled", True):
            self.encoder = with_lora(self.encoder, lora_config)

    def freeze(self) -> None:
        """Freeze the encoder's parameters."""
        for parameter in self.encoder.parameters():
            parameter.requires_grad = False

    def unfreeze(self) -> None:
        """Make the encoder's parameters trainable."""
        for parameter in self.encoder.parameters():
            parameter.requires_grad = True

    def tokenize(self, texts: Any, text_pairs: Any = None, **options: Any):
        """Tokenize to tensors, padded and truncated to max_length; `options` override the tokenizer's arguments."""
        settings = {"padding": "max_length", "truncation": True, "max_length": self.max_length, "return_tensors": "pt"}
        return self.tokenizer(texts, text_pairs, **{**settings, **options})

    def encode_texts(self, texts: Sequence[str], device: torch.device | str | None = None) -> torch.Tensor:
        """Return the vectors [text, width] of texts, in the encoder's present mode, on `device` or where it is."""
        target = next(self.encoder.parameters()).device if device is None else device
        tokens = self.tokenize(list(texts)).to(target)
        return self(tokens["input_ids"], tokens["attention_mask"])

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        hidden = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        if self.pooling_strategy == "cls":
            return hidden[:, 0]
        weight = attention_mask[..., None].to(hidden.dtype)
        return (hidden * weight).sum(1) / weight.sum(1).clamp(min=1e-9)


def with_lora(encoder: nn.Module, config: Mapping[str, Any]) -> nn.Module:
    """Return the encoder with peft's adapters, by default on query and value. Raises UserError without peft."""
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        raise UserError("lora_config: needs peft: pip install peft") from None
    settings = Lora()
    names = {name.rpartition(".")[2] for name, _ in encoder.named_modules()}
    usual = ["query_proj", "value_proj"] if "query_proj" in names else ["query", "value"]
    return get_peft_model(
        encoder,
        LoraConfig(
            r=config.get("r", settings.r),
            lora_alpha=config.get("alpha", config.get("lora_alpha", settings.alpha)),
            lora_dropout=config.get("dropout", config.get("lora_dropout", settings.dropout)),
            target_modules=list(config.get("target_modules") or usual),
            bias="none",
        ),
    )


class ClassificationHead(nn.Module):
    """Classifier: (Dropout, Linear), or (Linear, ReLU, Dropout, Linear) with a hidden_dim.

    State-dict keys are classifier.1, or classifier.0 and classifier.3 with a hidden_dim.
    """

    def __init__(self, input_dim: int, num_classes: int = 2, dropout: float = 0.1, hidden_dim: int | None = None):
        super().__init__()
        if hidden_dim:
            first, last = nn.Linear(input_dim, hidden_dim), nn.Linear(hidden_dim, num_classes)
            self.classifier = nn.Sequential(first, nn.ReLU(), nn.Dropout(dropout), last)
        else:
            self.classifier = nn.Sequential(nn.Dropout(dropout), nn.Linear(input_dim, num_classes))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.classifier(x)


CriteriaHead = EvidenceHead = ClassificationHead


class CriteriaModel(nn.Module):
    """Encoder with a classification head. encoder: a TransformerEncoder, or your own module with a `hidden_size`."""

    def __init__(self, encoder: nn.Module, num_classes: int = 2, dropout: float = 0.1, hidden_dim: int | None = None):
        super().__init__()
        self.encoder, self.num_classes = encoder, num_classes
        self.head = ClassificationHead(encoder.hidden_size, num_classes, dropout, hidden_dim)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(input_ids, attention_mask))

    @torch.no_grad()
    def predict(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """Return the most likely class of every row, int [batch]."""
        return self(input_ids, attention_mask).argmax(-1)


class EvidenceModel(CriteriaModel):
    """CriteriaModel under another name: in this family evidence is a classification too."""
