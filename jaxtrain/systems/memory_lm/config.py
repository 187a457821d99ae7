"""Settings of the memory language models. `model` and `memory` keep the original's names and defaults."""

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from jaxtrain.config import MOST_LAYERS, DataConfig, OptimConfig, Section
from jaxtrain.errors import UserError

TRAIN_STRATEGIES = ("sequence", "sequence-rolling", "token", "prefix")
INFERENCE_STRATEGIES = (*TRAIN_STRATEGIES, "rolling", "hybrid")


class Model(Section):
    """The decoder. For the adapter task only `base_*`, `freeze_base_model`, `dropout` and `scan_layers` count."""

    hidden_dim: int = Field(default=768, ge=1)
    num_heads: int = Field(default=12, ge=1)
    num_kv_heads: int | None = Field(default=None, ge=1)  # key/value heads, dividing num_heads; num_heads if left out
    num_layers: int = Field(default=12, ge=1, le=MOST_LAYERS)
    intermediate_dim: int = Field(default=3072, ge=1)
    vocab_size: int = Field(default=32000, ge=1)  # at least the tokenizer's size
    max_seq_len: int = Field(default=8192, ge=1)  # tokens
    max_position_embeddings: int | None = Field(default=None, ge=1)  # wins over max_seq_len
    tokenizer_name: str | None = None  # used if data.tokenizer is not set
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    pad_token_id: int | None = None
    use_rope: bool = True
    rope_theta: float = Field(default=10000.0, gt=0)
    dropout: float = Field(default=0.0, ge=0, lt=1)
    attention_dropout: float = Field(default=0.0, ge=0, lt=1)
    hidden_activation: Literal["swiglu", "silu", "relu", "gelu", "sigmoid", "tanh"] = "swiglu"
    initializer_range: float = Field(default=0.02, gt=0)
    self_attn_wo_init_std: float | None = Field(default=None, gt=0)
    mlp_down_proj_init_std: float | None = Field(default=None, gt=0)
    norm_eps: float = Field(default=1e-6, gt=0)
    use_rms_norm: bool = True
    tie_embeddings: bool = True
    base_model_name: str | None = None  # adapter: a local folder of Hugging Face weights, or a hub id
    base_config: dict[str, Any] | None = None  # adapter: the base model's config.json inline, randomly initialised
    base_dtype: Literal["float32", "bfloat16"] = "float32"  # adapter: what a frozen base model is kept in
    freeze_base_model: bool = True
    use_flash_attention: bool = True  # accepted, without effect: XLA chooses the attention kernel
    scan_layers: bool = False  # one compiled body for runs of equal layers, recomputed in the backward pass

    @property
    def kv_heads(self) -> int:
        return self.num_kv_heads or self.num_heads

    @property
    def length(self) -> int:
        """Longest sequence in tokens."""
        return self.max_position_embeddings or self.max_seq_len

    @model_validator(mode="after")
    def _sizes_fit(self):
        if self.base_model_name is None and self.base_config is None:
            if self.hidden_dim % self.num_heads:
                raise ValueError(f"hidden_dim {self.hidden_dim} is not a multiple of num_heads {self.num_heads}")
            if self.num_heads % self.kv_heads:
                raise ValueError(f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.kv_heads}")
            if self.use_rope and (self.hidden_dim // self.num_heads) % 2:
                raise ValueError(f"rotary positions need an even head width, got {self.hidden_dim // self.num_heads}")
        return self


class Memory(Section):
    """The memory bank, its router and LoRA."""

    vanilla_mode: bool = False  # no memory at all: the control
    use_memory_adapter: bool = True  # adapter: false leaves LoRA alone
    num_memory_tokens: int = Field(default=1024, ge=1)
    memory_dim: int | None = Field(default=None, ge=1)  # hidden_dim if left out
    memory_num_heads: int | None = Field(default=None, ge=1)
    memory_num_kv_heads: int | None = Field(default=None, ge=1)
    memory_layer_placement: Literal["all", "first_k", "last_k", "every_n", "custom", "none"] = "all"
    memory_layer_k: int = 5
    memory_layer_n: int = 3
    memory_layer_indices: list[int] | None = None
    memory_sharing: Literal["shared", "per_layer", "every_k_layers"] = "shared"
    memory_sharing_k: int = 2
    memory_block_variant: Literal["A", "B"] = "A"  # B: the memory comes after the MLP and has an MLP of its own
    memory_dropout: float | None = Field(default=None, ge=0, lt=1)  # of attention weights; model.dropout if left out
    use_low_rank_memory: bool = False
    memory_rank: int = Field(default=64, ge=1)
    low_rank_mode: Literal["factorized", "reduced_dim"] = "factorized"
    use_low_rank_projections: bool = False
    projection_rank: int = Field(default=64, ge=1)
    use_chapters: bool = False
    num_chapters: int = Field(default=100, ge=1)
    top_k_chapters: int = Field(default=20, ge=1)
    num_shared_chapters: int = Field(default=0, ge=0)  # the first chapters, read by every token
    routed_scaling_factor: float = Field(default=1.0, ge=0)
    normalize_shared_routed_before_mixing: bool = False
    shared_routed_norm_type: Literal["rms", "layernorm"] = "rms"
    shared_routed_norm_eps: float = Field(default=1e-6, gt=0)
    routing_strategy_train: str = "sequence"  # sequence | sequence-rolling | token | prefix (causal)
    routing_strategy_inference: str = "sequence"  # also rolling | hybrid, which route a decode step on its window
    routing_window_size: int = Field(default=128, ge=1)  # tokens
    token_routing_kernel_version: str = "v2"  # accepted, without effect: one XLA implementation
    mask_aware_pooling: bool = False  # padding stays out of the pooled router input; the original counts it
    chapter_softmax: Literal["joint", "independent"] = "joint"  # sequence routing; independent mixes chapter outputs
    use_load_balance_loss: bool = True
    load_balance_coefficient: float = 0.01
    use_auxiliary_loss: bool = False
    auxiliary_loss_coefficient: float = 0.01
    use_z_loss: bool = False
    z_loss_coefficient: float = 0.001
    memory_gradient_checkpointing: bool = True  # recompute the memory reads in the backward pass
    quantize_memory: bool = False  # generate and evaluate with a quantised bank; training is not touched
    memory_quant_bits: Literal[4, 8] = 8
    wo_init_zero: bool = True  # a fresh model equals the vanilla one
    memory_init_std: float = Field(default=0.02, ge=0)
    use_lora: bool = False  # adapter only
    lora_rank: int = Field(default=16, ge=1)
    lora_alpha: float = 32
    lora_dropout: float = Field(default=0.05, ge=0, lt=1)
    lora_targets: list[str] = ["q_proj", "v_proj"]  # a Linear whose dotted name contains one of these
    use_both_memory_and_lora: bool = False
    freeze_memory_bank: bool = False  # no gradient and no optimizer state for the bank
    freeze_router: bool = False

    @property
    def lora(self) -> bool:
        return self.use_lora or self.use_both_memory_and_lora

    @field_validator("routing_strategy_train", "routing_strategy_inference")
    @classmethod
    def _known_strategy(cls, value: str, info) -> str:
        value = "sequence-rolling" if value == "sequence_rolling" else value
        known = TRAIN_STRATEGIES if info.field_name == "routing_strategy_train" else INFERENCE_STRATEGIES
        if value not in known:
            raise ValueError(f"unknown routing strategy, wanted one of {', '.join(known)}")
        return value

    @field_validator("token_routing_kernel_version")
    @classmethod
    def _known_kernel(cls, value: str) -> str:
        name = str(value).lower().removeprefix("kernel_").removeprefix("v")
        if name not in ("1", "2", "3", "4", "5"):
            raise ValueError("unknown kernel version, wanted v1 to v5")
        return f"v{name}"

    @model_validator(mode="after")
    def _chapters_fit(self):
        if not self.use_chapters or self.vanilla_mode:
            return self
        if self.num_memory_tokens % self.num_chapters:
            raise ValueError(
                f"num_memory_tokens {self.num_memory_tokens} is no multiple of {self.num_chapters} chapters"
            )
        if self.top_k_chapters > self.num_chapters:
            raise ValueError(f"top_k_chapters {self.top_k_chapters} is more than num_chapters {self.num_chapters}")
        if self.num_shared_chapters > self.num_chapters:
            raise ValueError(
                f"num_shared_chapters {self.num_shared_chapters} is more than {self.num_chapters} chapters"
            )
        return self


class OriginalSchedule(Section):
    """The original's schedule with its edges (original/schedules.py)."""

    scheduler: str = "cosine"  # cosine | linear | constant (no warm-up) | wsd
    warmup_steps: int = Field(default=100, ge=0)
    warmup_ratio: float | None = Field(default=None, ge=0, le=1)
    min_lr_ratio: float = Field(default=0.1, ge=0, le=1)
    decay_start_step: int | None = Field(default=None, ge=0)
    decay_start_ratio: float | None = Field(default=None, ge=0, le=1)
    wsd_stable_steps: int | None = Field(default=None, ge=0)
    wsd_stable_ratio: float = Field(default=0.0, ge=0, le=1)


class Optim(OptimConfig):
    original_schedule: OriginalSchedule | None = None  # wins over schedule


class LossSection(Section):
    """How the cross-entropy over the vocabulary is computed."""

    chunk_tokens: int = Field(default=0, ge=0)  # logits take the memory of this many tokens; 0 computes all at once


class Data(DataConfig):
    """Where text comes from and how it becomes rows of `max_length` tokens."""

    dataset_name: str = "python"  # python (this installation's own text) | a local file or folder | a hub id
    dataset_subset: str | None = None
    dataset_split: str = "train"
    eval_split: str | None = "test"
    eval_dataset_name: str | None = None  # the dataset of eval_split, if it is not dataset_name
    text_field: str | list[str] = "text"
    training_mode: Literal["pretraining", "instruction_finetuning"] = "pretraining"
    max_length: int = Field(default=8192, ge=2)  # tokens of one row
    num_samples: int | None = Field(default=None, ge=1)  # use the first n rows of the dataset
    eval_samples: int | None = Field(default=None, ge=1)
    streaming: bool = False  # read rows one by one: num_samples of them, or on and on, for train.steps
    tokenizer: str | None = None  # bytes | bpe:<size>, trained on the corpus | a tokenizer.json, a folder or a hub id
    packing: bool = True  # documents share rows, separated by attention masks; false: one padded row per document
    append_eos: bool = True  # end every document with the end-of-sequence token
    chat_template: Literal["auto", "transcript"] = "auto"  # auto: the tokenizer's own template if it has one
    corpus_bytes: int = Field(default=4_000_000, ge=1000)  # how much of the `python` corpus to read
    cache_dir: str | None = None  # tokenised rows; ~/.cache/jaxtrain/tokens if left out
    batch_tokens: int | None = Field(default=None, ge=1)  # sets batch_size to batch_tokens / max_length
    multiple_choice: list[str] = []  # JSONL files that `jaxtrain.evaluate` scores: question, choices, answer

    @model_validator(mode="before")
    @classmethod
    def _batch_of_tokens(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("batch_tokens"):
            tokens = int(values["batch_tokens"])
            length = int(values.get("max_length", cls.model_fields["max_length"].default))
            if tokens < length:
                raise ValueError(f"batch_tokens {tokens} is less than one row of max_length {length}")
            values = {**values, "batch_size": tokens // length}
        return values

    @model_validator(mode="after")
    def _streams_are_finite(self):
        if not self.streaming or self.num_samples is not None:
            return self
        if self.eval_split is not None and self.eval_samples is None:
            raise ValueError("streaming needs eval_samples, how many rows to evaluate on, or eval_split: null")
        if self.dataset_name == "python":
            raise ValueError("streaming needs a dataset_name of files or of the hub, or num_samples")
        if self.tokenizer is not None and self.tokenizer.startswith("bpe:"):
            raise ValueError("streaming needs a tokenizer that is trained already, or num_samples")
        if self.packing and self.training_mode != "pretraining":
            raise ValueError("streaming packs texts of pretraining; set packing: false, or num_samples")
        return self


def get_memory_layer_indices(memory, num_layers: int) -> list[int]:
    """Indices of the layers that read memory, ascending.

    memory: the `memory` section. Raises UserError for a placement that cannot be built.
    """
    if memory.vanilla_mode or not memory.use_memory_adapter:
        return []
    placement = memory.memory_layer_placement
    if placement == "all":
        return list(range(num_layers))
    if placement == "none":
        return []
    if placement == "first_k":
        return list(range(max(0, min(memory.memory_layer_k, num_layers))))
    if placement == "last_k":
        return list(range(num_layers - max(0, min(memory.memory_layer_k, num_layers)), num_layers))
    if placement == "every_n":
        if memory.memory_layer_n <= 0:
            raise UserError(f"memory.memory_layer_n: {memory.memory_layer_n}, wanted 1 or more for every_n")
        return list(range(0, num_layers, memory.memory_layer_n))
    if placement == "custom":
        if memory.memory_layer_indices is None:
            raise UserError("memory.memory_layer_indices: missing; placement custom needs it, as in [2, 6, 10, 14]")
        return sorted(i for i in memory.memory_layer_indices if 0 <= i < num_layers)
    raise UserError(f"memory.memory_layer_placement: {placement!r} is unknown")


def get_memory_bank_assignments(memory, layers: list[int]) -> dict[int, int]:
    """Memory layer -> number of its bank."""
    if memory.memory_sharing == "shared":
        return dict.fromkeys(layers, 0)
    if memory.memory_sharing == "per_layer":
        return {layer: i for i, layer in enumerate(layers)}
    if memory.memory_sharing == "every_k_layers":
        if memory.memory_sharing_k <= 0:
            raise UserError(f"memory.memory_sharing_k: {memory.memory_sharing_k}, wanted 1 or more")
        return {layer: i // memory.memory_sharing_k for i, layer in enumerate(layers)}
    raise UserError(f"memory.memory_sharing: {memory.memory_sharing!r} is unknown")


def check_heads(width: int, heads: int, kv_heads: int) -> None:
    """Raise UserError where the heads of a memory attention do not divide its width, memory_rank for reduced_dim."""
    if width % heads or heads % kv_heads:
        raise UserError(f"memory heads: {heads} heads and {kv_heads} key/value heads do not divide a width of {width}")
