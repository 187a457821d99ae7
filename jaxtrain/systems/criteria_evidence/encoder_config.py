"""Sizes and options of an encoder under Hugging Face's names, so that a `config.json` can be read unchanged."""

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from jaxtrain.config import Section

KINDS = {
    "bert": "bert",
    "roberta": "roberta",
    "xlm-roberta": "roberta",
    "camembert": "roberta",
    "deberta-v2": "deberta",
}


class Encoder(Section):
    """Sizes and options of one encoder. The defaults are BERT's; `with_defaults` adds those of the other kinds."""

    kind: Literal["bert", "roberta", "deberta"] = "bert"
    model_type: str | None = None  # what config.json says: bert, roberta, xlm-roberta, deberta-v2, ...
    vocab_size: int = Field(default=30522, ge=1)
    hidden_size: int = Field(default=768, ge=1)
    num_hidden_layers: int = Field(default=12, ge=0)
    num_attention_heads: int = Field(default=12, ge=1)
    intermediate_size: int = Field(default=3072, ge=1)
    max_position_embeddings: int = Field(default=512, ge=1)  # roberta: the longest text + 2, positions start at 2
    type_vocab_size: int = Field(default=2, ge=0)
    layer_norm_eps: float = Field(default=1e-12, gt=0)
    hidden_act: str = "gelu"
    pad_token_id: int = Field(default=0, ge=0)
    hidden_dropout_prob: float = Field(default=0.1, ge=0, lt=1)
    attention_probs_dropout_prob: float = Field(default=0.1, ge=0, lt=1)
    initializer_range: float = Field(default=0.02, gt=0)  # standard deviation of freshly drawn weights
    # DeBERTa-v2 and v3 only
    relative_attention: bool = True
    position_buckets: int = 256  # log buckets per direction; 0 or less: one row per distance
    max_relative_positions: int = -1  # below 1: max_position_embeddings
    pos_att_type: tuple[Literal["c2p", "p2c"], ...] = ("p2c", "c2p")
    share_att_key: bool = True
    norm_rel_ebd: str = "layer_norm"
    position_biased_input: bool = False
    embedding_size: int | None = Field(default=None, ge=1)  # width of the tables if it is not hidden_size
    conv_kernel_size: int = Field(default=0, ge=0)  # 0: no convolution next to the first layer
    conv_groups: int = Field(default=1, ge=1)
    conv_act: str = "tanh"

    @field_validator("pos_att_type", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        if isinstance(value, str):
            return tuple(part.strip() for part in value.lower().split("|") if part.strip())
        return () if value is None else value

    @model_validator(mode="after")
    def _heads_divide(self):
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size {self.hidden_size} is not a multiple of num_attention_heads {self.num_attention_heads}"
            )
        return self

    @property
    def has_pooler(self) -> bool:
        """Return True if the encoder returns a pooled output beside the hidden states."""
        return self.kind != "deberta"

    @property
    def longest(self) -> int:
        """Return the maximum number of tokens of a text."""
        if self.kind == "roberta":
            return self.max_position_embeddings - self.pad_token_id - 1
        if self.kind == "deberta" and not self.position_biased_input:
            return 1 << 20  # relative positions are clipped, not limited
        return self.max_position_embeddings

    @property
    def relative_span(self) -> int:
        """Return the number of rows per direction of DeBERTa's relative-position table."""
        return self.position_buckets if self.position_buckets > 0 else self.relative_limit

    @property
    def relative_limit(self) -> int:
        """Return the distance from which on DeBERTa treats all distances alike."""
        return self.max_relative_positions if self.max_relative_positions > 0 else self.max_position_embeddings


DEFAULTS: dict[str, dict[str, Any]] = {
    "bert": {},
    "roberta": {"layer_norm_eps": 1e-5, "type_vocab_size": 1, "pad_token_id": 1, "max_position_embeddings": 514}
    | {"vocab_size": 50265},
    "deberta": {"layer_norm_eps": 1e-7, "type_vocab_size": 0, "vocab_size": 128100},
}

_LARGE = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
_XLM = {"kind": "roberta", "model_type": "xlm-roberta", "vocab_size": 250002}
_DEBERTA = {"kind": "deberta", "model_type": "deberta-v2"}

PRESETS: dict[str, dict[str, Any]] = {
    "bert-base-uncased": {"kind": "bert"},
    "bert-large-uncased": {"kind": "bert", **_LARGE},
    "roberta-base": {"kind": "roberta"},
    "roberta-large": {"kind": "roberta", **_LARGE},
    "xlm-roberta-base": _XLM,
    "xlm-roberta-large": {**_XLM, **_LARGE},
    "microsoft/deberta-v3-base": _DEBERTA,
    "microsoft/deberta-v3-large": {**_DEBERTA, **_LARGE},
}
PRESETS |= {f"google-bert/{name}": PRESETS[name] for name in ("bert-base-uncased", "bert-large-uncased")}
PRESETS |= {f"FacebookAI/{name}": value for name, value in list(PRESETS.items()) if "roberta" in name}


def with_defaults(values: dict[str, Any]) -> dict[str, Any]:
    """Return the defaults of the encoder's kind, updated with `values`."""
    return {**DEFAULTS.get(values.get("kind", "bert"), {}), **values}


def from_hf(config: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of `Encoder` from the mapping in a config.json.

    Raises ValueError if model_type is none of bert, roberta, xlm-roberta, camembert, deberta-v2.
    """
    model_type = config.get("model_type")
    if model_type not in KINDS:
        raise ValueError(f"model_type {model_type!r} is unknown here; known are {', '.join(KINDS)}")
    kind = KINDS[model_type]
    known = {name: config[name] for name in Encoder.model_fields if config.get(name) is not None}
    if kind == "deberta":  # absent keys take transformers' defaults, not the values of v3
        absent = {"relative_attention": False, "position_buckets": -1, "pos_att_type": (), "share_att_key": False}
        absent |= {"norm_rel_ebd": "none", "position_biased_input": True}
        known = {**absent, **known}
    return with_defaults({**known, "kind": kind, "model_type": model_type})


def to_hf(config: Encoder) -> dict[str, Any]:
    """Return the content of a config.json from which transformers builds the same encoder."""
    values = config.model_dump(mode="json")
    kind = values.pop("kind")
    defaults = {"bert": ("bert", "BertModel"), "roberta": ("roberta", "RobertaModel")}
    model_type, architecture = defaults.get(kind, ("deberta-v2", "DebertaV2Model"))
    values["model_type"] = values["model_type"] or model_type
    if values["model_type"] == "xlm-roberta":
        architecture = "XLMRobertaModel"
    only_deberta = set(list(Encoder.model_fields)[list(Encoder.model_fields).index("relative_attention") :])
    if kind != "deberta":
        values = {key: value for key, value in values.items() if key not in only_deberta}
    else:
        values["pos_att_type"] = list(values["pos_att_type"])
        if values["embedding_size"] is None:
            del values["embedding_size"]
    return {**values, "architectures": [architecture]}
