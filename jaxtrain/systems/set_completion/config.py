"""Settings of set completion and of the sparse autoencoder on its activations."""

from pydantic import Field, model_validator

from jaxtrain.config import MOST_LAYERS, DataConfig, Section


class ModelConfig(Section):
    vocab_size: int = Field(default=140, ge=2)  # tokens of vocab.json
    weapon_vocab_size: int = Field(default=130, ge=1)  # weapons of weapon_vocab.json
    embedding_dim: int = Field(default=32, ge=1)
    hidden_dim: int = Field(default=512, ge=1)
    output_dim: int | None = Field(default=None, ge=1)  # vocab_size if left out
    num_layers: int = Field(default=3, ge=0, le=MOST_LAYERS)
    num_heads: int = Field(default=8, ge=1)
    num_inducing_points: int = Field(default=32, ge=1)
    use_layer_norm: bool = True
    dropout: float = Field(default=0.3, ge=0, lt=1)
    pad_token_id: int | None = Field(default=None, ge=0)  # the last token if left out

    @model_validator(mode="after")
    def _whole_heads(self):
        if self.hidden_dim % self.num_heads:
            raise ValueError(f"hidden_dim {self.hidden_dim} is not a multiple of num_heads {self.num_heads}")
        return self

    @property
    def padding(self) -> int:
        return self.vocab_size - 1 if self.pad_token_id is None else self.pad_token_id

    def arguments(self) -> dict:
        """Return the arguments of `SetCompletionModel(**arguments)`; model_params.json holds the same."""
        filled = {"output_dim": self.output_dim or self.vocab_size, "pad_token_id": self.padding}
        return self.model_dump() | filled


class SyntheticConfig(Section):
    """The corpus with planted rules that stands in where data.path is left out; see synthetic.py."""

    sets: int = Field(default=4000, ge=10)
    weapons: int = Field(default=6, ge=1)
    archetypes: int = Field(default=3, ge=1, le=7)  # ways to play each weapon; each plants two rules
    seed: int = Field(default=0, ge=0)


class SetDataConfig(DataConfig):
    path: str | None = None  # tokenized.csv (tab separated), .db or .sqlite, http(s):// or s3://; synthetic if left out
    vocab_path: str | None = None  # vocab.json
    weapon_vocab_path: str | None = None  # weapon_vocab.json
    table_name: str = "data"  # of a SQLite file
    max_rows: int | None = Field(default=None, ge=1)  # read only the first rows
    fraction: float = Field(default=1.0, gt=0, le=1)  # of the rows, drawn before the split
    split_seed: int = Field(default=0, ge=0, lt=2**32)  # fixes the split and what validation and test hide
    validation_size: float = Field(default=0.1, ge=0, lt=1)
    test_size: float = Field(default=0.2, ge=0, lt=1)
    masks_per_set: int = Field(default=5, ge=1)  # samples per set and epoch, each hiding other tokens
    skew_factor: float = Field(default=1.2, ge=0)  # P(hide k tokens) ~ k^skew_factor
    include_null: bool = False  # one more sample per set that shows only <NULL>
    null_token_id: int | None = Field(default=None, ge=0)  # id of <NULL>; model.vocab_size - 2 if left out
    synthetic: SyntheticConfig = SyntheticConfig()

    @model_validator(mode="after")
    def _files_together(self):
        if self.path and not (self.vocab_path and self.weapon_vocab_path):
            raise ValueError("path needs vocab_path and weapon_vocab_path too")
        if self.validation_size + self.test_size >= 1:
            raise ValueError("validation_size and test_size leave nothing to train on")
        return self

    @property
    def instances(self) -> int:
        return self.masks_per_set + self.include_null


class SaeConfig(Section):
    primary: str | None = None  # weights of the frozen model: a run folder, .pt or .safetensors; random if left out
    expansion_factor: float = Field(default=4.0, gt=0)  # features per dimension of the activation
    l1_coefficient: float = Field(default=5e-6, ge=0)
    l1_warmup_steps: int = Field(default=6000, ge=0)
    l1_start: float = Field(default=0.0, ge=0)
    usage_coefficient: float = Field(default=1.5, ge=0)  # of the KL of the average usage
    usage_warmup_steps: int = Field(default=6000, ge=0)
    usage_period_steps: int = Field(default=60000, ge=1)
    usage_floor: float = Field(default=0.05, ge=0)
    usage_gradient: bool = False  # True lets the penalty act on the features; the original's has no gradient
    target_usage: float = Field(default=0.05, gt=0, lt=1)
    top_k: int = Field(default=0, ge=0)  # keep only the k largest features of a set; 0 keeps all
    train_decoder: bool = True  # False, and always under compat: original, leaves the dictionary at its random start
    dead_threshold: float = Field(default=1e-6, ge=0)  # average usage below it is dead
    buffer_size: int = Field(default=100_000, ge=1)  # activations kept
    batch_size: int = Field(default=1024, ge=1)  # activations per update, drawn from the buffer
    steps_before_train: int = Field(default=50_000, ge=1)  # activations in the buffer before the first update
    resample_steps: tuple[int, ...] = (7000, 14000, 28000)  # updates after which dead features start afresh
    resample_weight: float = Field(default=0.2, gt=0)  # norm of their new encoder rows
    resample_bias: float = 0.0

    @model_validator(mode="after")
    def _buffer_fills(self):
        if self.steps_before_train > self.buffer_size:
            raise ValueError(f"steps_before_train {self.steps_before_train} exceeds buffer_size {self.buffer_size}")
        return self
