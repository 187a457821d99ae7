"""The original's MemoryTransformer, MemoryAdapter and config classes, as torch modules with its arguments."""

import copy
import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from jaxtrain.errors import UserError
from jaxtrain.systems.memory_lm import torch_backbone, torch_twin
from jaxtrain.systems.memory_lm.config import Memory, Model
from jaxtrain.systems.memory_lm.original import legacy_config
from jaxtrain.systems.memory_lm.original.legacy_config import TrainingConfig
from jaxtrain.systems.memory_lm.original.torch_parts import (
    ChapterRouter,
    LoRALinear,
    MemoryCrossAttention,
    compute_router_auxiliary_loss,
    router_losses,
)
from jaxtrain.systems.memory_lm.torch_memory import (
    ChapteredMemoryBank,
    QuantizedMemoryBank,
    View,
)

IGNORE = torch_twin.IGNORE


def _dataclass(name: str, section: type, key: str) -> type:
    """Return a mutable dataclass with the fields and defaults of a section, in the original's order."""
    fields = []
    for field in legacy_config.original_order(key, section.model_fields):
        make = section.model_fields[field].get_default
        fields.append((field, Any, dataclasses.field(default_factory=lambda make=make: copy.deepcopy(make()))))
    return dataclasses.make_dataclass(name, fields, namespace={"__module__": __name__})


ModelConfig = _dataclass("ModelConfig", Model, "model")
MemoryConfig = _dataclass("MemoryConfig", Memory, "memory")


@dataclasses.dataclass
class Config:
    """Three sections of a config file. As in the original, the models and the Trainer modify it."""

    model: Any = dataclasses.field(default_factory=ModelConfig)
    memory: Any = dataclasses.field(default_factory=MemoryConfig)
    training: Any = dataclasses.field(default_factory=TrainingConfig)


# --- models ------------------------------------------------------------------------------------------------------


class _Model(torch_twin.MemoryModel):
    """Base of both models: the original's call, with losses and key-value cache."""

    make_router, make_attention, make_lora = ChapterRouter.of, MemoryCrossAttention.of, LoRALinear.from_linear
    follows_cache = False  # True: without position_ids, count positions from the cache; ignore position_offset

    def outputs(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None,
        labels: torch.Tensor | None,
        position_offset: int,
        position_ids: torch.Tensor | None,
        past_key_values: Sequence | None,
        use_cache: bool,
    ) -> dict[str, Any]:
        """Return a dict of logits, loss, past_key_values and router_losses.

        loss: with labels, cross-entropy in nats per label, in training plus the router losses; else None.
        past_key_values: with use_cache, (keys, values) [batch, time, head, width] by layer; else None. router_losses: a
        dict for each memory layer, empty in evaluation and without chapters. attention_mask: [batch, key], cached keys
        included. position_offset: position of the first token if there are no position_ids; an adapter counts from
        the cache's length instead. use_cache without past_key_values starts a new sequence. Raises UserError for
        use_cache with prefix routing.
        """
        if use_cache and self.memory.use_chapters and self.memory.routing_strategy_inference == "prefix":
            raise UserError("use_cache: prefix routing has no cache here; jaxtrain.generate decodes with it")
        if use_cache and not past_key_values:
            self._windows = {}
        present: list | None = [] if use_cache else None
        mask = None if attention_mask is None else attention_mask.bool()
        if position_ids is None and not self.follows_cache:
            places = torch.arange(input_ids.shape[1], device=input_ids.device) + position_offset
            position_ids = places[None].expand(len(input_ids), -1)
        view = View(input_ids, mask, position_ids, None, past_key_values, present, self._windows if use_cache else None)
        logits = self.head(self.hidden(input_ids, view))
        routed = view.routing if self.training else {}
        terms = [router_losses(routed[i][0], routed[i][2]) if i in routed else {} for i in self.reading]
        loss = None
        if labels is not None:
            flat = logits[:, :-1].float().flatten(0, 1)
            loss = functional.cross_entropy(flat, labels[:, 1:].flatten(), ignore_index=IGNORE)
            loss = loss + self._aggregate_router_losses(terms) if any(terms) else loss
        return {"logits": logits, "loss": loss, "past_key_values": present, "router_losses": terms}

    def _aggregate_router_losses(self, terms: Sequence[Mapping[str, torch.Tensor]]) -> torch.Tensor:
        memory = self.memory
        return compute_router_auxiliary_loss(
            terms,
            memory.load_balance_coefficient if memory.use_load_balance_loss else 0.0,
            memory.auxiliary_loss_coefficient if memory.use_auxiliary_loss else 0.0,
            memory.z_loss_coefficient if memory.use_z_loss else 0.0,
        )

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, **options: Any):
        """Load a state dict of tensors or arrays; otherwise like torch's."""
        return super().load_state_dict({key: as_tensor(value) for key, value in state_dict.items()}, strict, **options)

    def settle(self, config: Config) -> None:
        self.config, self.model_config, self.memory_config = config, config.model, config.memory
        self.memory_layer_indices, self.memory_bank_assignments = list(self.reading), dict(self.bank_of)
        self.token_routing_kernel_version = config.memory.token_routing_kernel_version
        self._windows: dict[int, torch.Tensor] = {}

    def get_memory_for_layer(self, layer_idx: int) -> torch.Tensor | None:
        """Return the vectors [token, width] of a layer's bank; None for a layer that reads no memory."""
        bank = self.memory_bank_assignments.get(layer_idx)
        return None if bank is None else self.memory_banks[bank].get_memory()

    def gradient_checkpointing_enable(self) -> None:
        """Recompute the layers in the backward pass; values do not change."""
        self._recompute_layers(True)

    def gradient_checkpointing_disable(self) -> None:
        """Recompute at most the memory attention in the backward pass, with memory.memory_gradient_checkpointing."""
        self._recompute_layers(False)

    def _recompute_layers(self, on: bool) -> None:
        self.recomputes_layers = on
        for module in self.modules():
            if isinstance(module, MemoryCrossAttention):  # not once more within a layer
                module.gradient_checkpointing = self.memory.memory_gradient_checkpointing and not on

    def _of_groups(self, *groups: str) -> list[nn.Parameter]:
        from jaxtrain.systems.memory_lm.param_groups import param_group

        settings = checked(self.config)
        return [p for name, p in self.named_parameters() if param_group(name, settings) in groups]

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def get_num_params(self, trainable_only: bool = False) -> int:
        """Return the number of parameters; tied ones count once."""
        return sum(p.numel() for p in self.parameters() if p.requires_grad or not trainable_only)


class MemoryTransformer(_Model, torch_twin.MemoryTransformer):
    """Model from scratch. As in the original, it writes the effective sequence length into the config."""

    def __init__(self, config: Config):
        section, memory = _sections(config)
        torch_twin.MemoryTransformer.__init__(self, section, memory)
        config.model.max_seq_len = config.model.max_position_embeddings = section.length
        self.settle(config)
        self.initializer_range, self.tie_embeddings = section.initializer_range, section.tie_embeddings
        self.self_attn_wo_init_std = section.self_attn_wo_init_std
        self.mlp_down_proj_init_std = section.mlp_down_proj_init_std
        self._initialise(section)

    def forward(  # type: ignore[override]
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        position_offset: int = 0,
        position_ids: torch.Tensor | None = None,
        past_key_values: Sequence | None = None,
        use_cache: bool = False,
        return_dict: bool = True,
    ) -> dict[str, Any]:
        """Return what `outputs` does. Raises UserError, a ValueError, for return_dict=False."""
        if not return_dict:
            raise UserError("return_dict=False: the result is a dict; take its entries by name")
        places = (position_offset, position_ids)
        return self.outputs(input_ids, attention_mask, labels, *places, past_key_values, use_cache)

    def get_num_parameters(self, trainable_only: bool = True) -> int:
        """Return the number of parameters; tied ones count once."""
        return self.get_num_params(trainable_only)

    def get_memory_parameters(self) -> list[nn.Parameter]:
        """Return the parameters of banks, routers and memory layers."""
        return self._of_groups("memory", "memory_bank")

    def freeze_non_memory(self) -> None:
        """Leave only the memory's parameters trainable."""
        self.requires_grad_(False)
        for parameter in self.get_memory_parameters():
            parameter.requires_grad_(True)

    def _initialise(self, section: Model) -> None:
        """Initialise Linears and Embeddings from a normal, biases 0; then apply overrides and zero memory outputs."""
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=section.initializer_range)
                if getattr(module, "bias", None) is not None:
                    nn.init.zeros_(module.bias)
        for block in self.layers:
            if section.self_attn_wo_init_std is not None:
                nn.init.normal_(block.self_attn.o_proj.weight, std=section.self_attn_wo_init_std)
            if section.mlp_down_proj_init_std is not None:
                for mlp in (block.mlp, getattr(block, "post_memory_mlp", None)):
                    if mlp is not None:
                        nn.init.normal_(mlp.down_proj.weight, std=section.mlp_down_proj_init_std)
            if block.variant is not None and self.memory.wo_init_zero:
                nn.init.zeros_(block.memory_attn.output.weight)


class MemoryAdapter(_Model, torch_twin.MemoryAdapter):
    """Pretrained model with memory; the base weights are read from `model.base_model_name`.

    Base weights are frozen with `model.freeze_base_model`; those of a Linear with LoRA always are.
    """

    follows_cache = True

    def __init__(self, config: Config):
        from jaxtrain.systems.memory_lm import adapter, param_groups

        section, memory = _sections(config)
        backbone = adapter.backbone_config(section)
        dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16}
        dtype = dtypes.get(config.training.mixed_precision, torch.float32)
        torch_twin.MemoryAdapter.__init__(self, backbone, memory, dtype, section.dropout)
        settings = checked(config)
        state = adapter.initial_weights(settings) or {}
        self.load_state_dict(state, strict=False)
        for router in self.routers.values():
            nn.init.normal_(router.router.weight, std=0.02)
            nn.init.zeros_(router.router.bias)
        for part in self.memory_adapters.values():
            if memory.wo_init_zero:
                nn.init.zeros_(part.memory_attn.output.weight)
        for key, parameter in self.named_parameters():
            parameter.requires_grad_(param_groups.trainable(key, settings))
        config.model.num_layers = backbone.num_layers
        self.settle(config)

    def forward(  # type: ignore[override]
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool = False,
        past_key_values: Sequence | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Return what `outputs` does. kwargs: position_ids; position_offset and others are not used, as originally."""
        position_ids = kwargs.get("position_ids")
        return self.outputs(input_ids, attention_mask, labels, 0, position_ids, past_key_values, use_cache)

    @property
    def lora_modules(self) -> dict[str, LoRALinear]:
        """Return the Linears with LoRA by name."""
        return {name: inner for name, inner in self.named_modules() if isinstance(inner, LoRALinear)}

    def get_trainable_parameters(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.parameters() if parameter.requires_grad]

    def get_memory_parameters(self) -> list[nn.Parameter]:
        """Return the parameters of routers and memory layers, without the banks."""
        return self._of_groups("memory")

    def get_memory_bank_parameters(self) -> list[nn.Parameter]:
        return self._of_groups("memory_bank")

    def get_parameter_groups(self) -> dict[str, list[nn.Parameter]]:
        """Return the trainable parameters as memory, memory_bank, lora and base_model, without empty ones."""
        groups = {name: self._of_groups(name) for name in ("memory", "memory_bank", "lora", "base_model")}
        trained = {name: [p for p in group if p.requires_grad] for name, group in groups.items()}
        return {name: group for name, group in trained.items() if group}


def _sections(config: Config) -> tuple[Model, Memory]:
    """Return the validated sections model and memory. Raises UserError that lists every mistake."""
    settings = checked(config)
    return settings.model, settings.memory


def checked(config: Config, **changes: Any) -> Any:
    """Return this project's validated settings of an original config; `changes` override sections."""
    from jaxtrain import config_io

    return config_io.check(legacy_config.convert(dataclasses.asdict(config)) | changes, "the original's config")[1]


def as_tensor(value: Any) -> torch.Tensor:
    import numpy as np

    from torch_bridge.datasets import to_torch

    return value if isinstance(value, torch.Tensor) else to_torch(np.asarray(value))


# --- trained weights ---------------------------------------------------------------------------------------------


def merge_adapter_weights(
    adapter_model: _Model, output_path: str | pathlib.Path | None = None
) -> dict[str, torch.Tensor]:
    """Merge every LoRA into its weight, in place; return the state dict without the LoRA matrices.

    output_path: a file to write it to, too. The original keeps the matrices, so loading its result would apply the
    update twice.
    """
    model = adapter_model
    for module in model.modules():
        if isinstance(module, torch_backbone.LoRALinear):
            module.merge()
    state = {key: value for key, value in model.state_dict().items() if not key.endswith((".lora_A", ".lora_B"))}
    return _written(state, output_path)


def _written(state: dict[str, torch.Tensor], path: str | pathlib.Path | None) -> dict[str, torch.Tensor]:
    if path is not None:
        pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)
        torch.save(state, path)
    return state


def extract_memory_weights(model: _Model, output_path: str | pathlib.Path | None = None) -> dict[str, torch.Tensor]:
    """Return the weights of the memory, including its norms, which the original omits; write them to output_path."""
    from jaxtrain.systems.memory_lm.param_groups import param_group

    state = {k: v for k, v in model.state_dict().items() if param_group(k, None) in ("memory", "memory_bank")}
    return _written(state, output_path)


def quantize_memory_for_deployment(
    model: _Model, bits: int = 8, output_path: str | pathlib.Path | None = None
) -> _Model:
    """Replace every bank by its quantised form, in place; multiplies low-rank banks out first. Returns the model.

    output_path: a file for its state dict.
    """
    for i, bank in enumerate(model.memory_banks):
        if isinstance(bank, ChapteredMemoryBank):
            bank.base_bank = QuantizedMemoryBank.of(bank.base_bank.get_memory(), bits)
        else:
            model.memory_banks[i] = QuantizedMemoryBank.of(bank.get_memory(), bits)
    _written(model.state_dict(), output_path)
    return model
