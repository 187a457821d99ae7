"""Settings of the four tasks."""

from typing import Any, Literal

from pydantic import Field, model_validator

from jaxtrain.config import MOST_LAYERS, DataConfig, Section
from jaxtrain.systems.criteria_evidence.encoder_config import PRESETS, Encoder, with_defaults
from jaxtrain.systems.criteria_evidence.lora import Lora

__all__ = ["Data", "Decode", "Encoder", "Head", "JointModel", "LossSettings", "LossWeights", "Model"]


class Head(Section):
    """One head. Keys left out take the family's own defaults; `pooling` and `activation` are family architectures'."""

    dropout: float | None = Field(default=None, ge=0, lt=1)  # 0.1 if left out
    layers: int | None = Field(default=None, ge=1, le=MOST_LAYERS)  # 1 if left out: a single Linear
    hidden: int | list[int] | None = None  # widths of the layers before the last one
    activation: str | None = None  # relu, silu, gelu
    pooling: Literal["cls", "mean", "max", "attn"] | None = None

    def chosen(self) -> dict[str, Any]:
        return {key: value for key, value in self.model_dump().items() if value is not None}


class Model(Section):
    """One encoder and its heads."""

    family: Literal["project", "architectures", "base"] = "project"
    pretrained: str | None = None  # a local Hugging Face folder or a hub id: sizes, weights and tokenizer; null: random
    encoder: Encoder = Encoder()  # sizes; filled in from `pretrained`
    num_labels: int = Field(default=2, ge=2)
    criteria: Head = Head()  # the classifier
    evidence: Head = Head()  # the span head
    encoder_dropout: float | None = Field(default=None, ge=0, lt=1)  # in place of both dropout rates of the encoder
    freeze_layers: int = Field(default=0, ge=0)  # keep the embeddings and the first n layers fixed
    freeze_encoder: bool = False
    lora: Lora = Lora()
    base_pooling: Literal["cls", "mean"] = "cls"  # family base
    base_hidden: int | None = Field(default=None, ge=1)  # family base: width of a hidden layer

    @model_validator(mode="before")
    @classmethod
    def _sizes(cls, values: Any) -> Any:
        return resolve_sizes(values, "pretrained", "encoder")

    @model_validator(mode="after")
    def _depth(self):
        for encoder in (self.encoder, getattr(self, "evidence_encoder", self.encoder)):
            if self.freeze_layers > encoder.num_hidden_layers:
                raise ValueError(f"freeze_layers {self.freeze_layers} is more than {encoder.num_hidden_layers} layers")
        return self


class JointModel(Model):
    """Two encoders: `encoder` reads the sentence, `evidence_encoder` the post."""

    evidence_pretrained: str | None = None  # `pretrained` if left out
    evidence_encoder: Encoder = Encoder()
    fusion_dropout: float = Field(default=0.1, ge=0, lt=1)

    @model_validator(mode="before")
    @classmethod
    def _second_sizes(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        values = dict(values)
        if values.get("evidence_pretrained") is None and values.get("pretrained") is not None:
            values["evidence_pretrained"] = values["pretrained"]
        values = resolve_sizes(values, "evidence_pretrained", "evidence_encoder")
        if values.get("evidence_encoder") is None and values.get("encoder") is not None:
            values["evidence_encoder"] = values["encoder"]
        return resolve_sizes(values, "pretrained", "encoder")


def resolve_sizes(values: Any, source: str, target: str) -> Any:
    """Encoder sizes from what `source` names, under those that the config gives; a saved config needs no file."""
    if not isinstance(values, dict):
        return values
    values = dict(values)
    chosen = values.get(target)
    chosen = chosen.model_dump() if isinstance(chosen, Encoder) else dict(chosen or {})
    name = values.get(source)
    if name is not None and "hidden_size" not in chosen:
        chosen = {**named_sizes(name), **chosen}
    if chosen:
        values[target] = with_defaults(chosen)
    return values


def named_sizes(name: str) -> dict[str, Any]:
    """Sizes of a well-known model, or those in the config.json of a folder or hub model."""
    if name in PRESETS:
        return with_defaults(PRESETS[name])
    from jaxtrain.systems.criteria_evidence import hf_folder

    return hf_folder.read_sizes(name)


class Data(DataConfig):
    path: str | None = None  # CSV with the columns below; null: synthetic posts with a learnable signal
    synthetic_posts: int = Field(default=150, ge=20)  # posts, four sentences each, if there is no path
    sentence_column: str = "sentence_text"  # what criteria reads, and the answer that evidence looks for
    status_column: str = "status"  # 1 present, 0 absent
    context_column: str = "post_text"  # what evidence, share and joint search
    post_column: str = "post_id"  # rows of one post stay together
    criterion_column: str | None = None  # looked at before criterion_id and DSM5_symptom
    criteria_file: str | None = None  # JSON list of {id, text}: the criteria in words
    pair_with_criterion: bool | None = None  # read (text, criterion); family architectures does, project does not
    tokenizer: str | None = None  # tokenizer.json, folder or hub id; model.pretrained if left out
    max_length: int = Field(default=256, ge=8)  # tokens of a sentence
    evidence_max_length: int = Field(default=512, ge=8)  # tokens of a post
    split: Literal["posts", "rows"] | None = None  # null: posts; rows if compat is original
    split_seed: int = Field(default=42, ge=0, lt=2**32)  # apart from `seed`, so that runs are scored on the same rows
    ratios: tuple[float, float, float] = (0.8, 0.1, 0.1)
    on_missing_answer: Literal["drop", "error", "keep"] = "drop"  # keep: the row counts for its label only
    padding: Literal["fixed", "buckets"] = "fixed"  # buckets: to the batch's longest text, rounded up to one of a few
    num_buckets: int = Field(default=4, ge=1)  # widths, and so compiled programs
    cache_dir: str | None = None  # keep tokens here; null: tokenize anew every time

    @model_validator(mode="after")
    def _whole(self):
        if abs(sum(self.ratios) - 1) > 1e-3 or min(self.ratios) < 0:
            raise ValueError(f"ratios {list(self.ratios)} do not add up to 1")
        return self


class LossWeights(Section):
    criteria: float = Field(default=1.0, ge=0)
    evidence: float = Field(default=1.0, ge=0)


class LossSettings(Section):
    weights: LossWeights = LossWeights()  # share and joint: criteria * classification + evidence * span
    class_weights: Literal["none", "balanced", "effective"] | list[float] = "none"  # of the training rows
    effective_beta: float = Field(default=0.999, gt=0, lt=1)  # class_weights effective: Cui et al. 2019
    label_smoothing: float = Field(default=0.0, ge=0, lt=1)
    focal_gamma: float = Field(default=0.0, ge=0)  # 0: plain cross-entropy
    mask_padding: bool = False  # spans compete among the text's own tokens only; the original lets padding in


class Decode(Section):
    """How a span is read off the logits."""

    valid_only: bool = False  # start <= end, inside the text; false: both maxima on their own, as the original
    max_tokens: int = Field(default=128, ge=1)  # valid_only: longest span
