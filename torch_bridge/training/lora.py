"""Low-rank adapters (LoRA) for any torch module, under PEFT's names. Source: Hu et al. 2021."""

import difflib
import fnmatch
import functools
import math
import pathlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from jaxtrain.config import LoraConfig
from jaxtrain.errors import UserError
from jaxtrain.nn.lora import PEFT_ADAPTER, merged_weight
from torch_bridge import files
from torch_bridge.atomic_file import write_text
from torch_bridge.datasets import to_numpy, to_torch
from torch_bridge.files import peft
from torch_bridge.lazy_array import LazyArray
from torch_bridge.lowering.interpreter import Graph

A, B, BASE = f".lora_A.{PEFT_ADAPTER}.weight", f".lora_B.{PEFT_ADAPTER}.weight", ".base_layer.weight"
NONE = "lora: the module has no adapters; train with lora.rank, as lora: {rank: 8}"


class LoraLayer(nn.Module):
    """Compute base_layer(x) + alpha / rank * B A dropout(x), with the attributes of PEFT's layer. B starts at 0."""

    base_layer: Any
    lora_A: Any
    lora_B: Any

    def __init__(self, base: Any, config: LoraConfig, generator: torch.Generator):
        super().__init__()
        into, out = _sizes(base)
        kind = {"dtype": base.weight.dtype, "device": base.weight.device}
        self.base_layer = base
        self.lora_dropout = nn.ModuleDict(
            {PEFT_ADAPTER: nn.Dropout(config.dropout) if config.dropout else nn.Identity()}
        )
        self.lora_A = nn.ModuleDict(
            {PEFT_ADAPTER: nn.utils.skip_init(nn.Linear, into, config.rank, bias=False, **kind)}
        )
        self.lora_B = nn.ModuleDict({PEFT_ADAPTER: nn.utils.skip_init(nn.Linear, config.rank, out, bias=False, **kind)})
        bound = 1 / math.sqrt(into)  # kaiming_uniform with a = sqrt(5)
        drawn = torch.empty(config.rank, into).uniform_(-bound, bound, generator=generator)
        with torch.no_grad():
            self.lora_A[PEFT_ADAPTER].weight.copy_(drawn)
            self.lora_B[PEFT_ADAPTER].weight.zero_()
        self.scale = config.alpha / config.rank

    @property
    def weight(self) -> torch.Tensor:
        """Return the base layer's weight, for code that reads its dtype or device."""
        return self.base_layer.weight

    @property
    def bias(self) -> torch.Tensor | None:
        return self.base_layer.bias

    def forward(self, x, *args, **kwargs):
        y = self.base_layer(x, *args, **kwargs)
        low = self.lora_A[PEFT_ADAPTER](self.lora_dropout[PEFT_ADAPTER](x.to(self.weight.dtype)))
        return y + (self.lora_B[PEFT_ADAPTER](low) * self.scale).to(y.dtype)


def adapt(module: nn.Module, config: LoraConfig, seed: int) -> None:
    """Add adapters to the module, in place, as peft.get_peft_model does; freeze all else except `modules_to_save`.

    A module that has such adapters already keeps them. Raises UserError for a pattern that matches no suitable layer,
    and for existing adapters of another rank or scale.
    """
    present = [layer for layer in module.modules() if isinstance(layer, LoraLayer)]
    if present:
        other = [x for x in present if _rank(x) != config.rank or not math.isclose(x.scale, config.alpha / config.rank)]
        if other:
            raise UserError(
                f"lora: the module has adapters of rank {_rank(other[0])} and scale {other[0].scale:g} already, "
                f"wanted {config.rank} and {config.alpha / config.rank:g}; torch_bridge.training.lora.merge(module) "
                "removes them"
            )
        return
    named = dict(module.named_modules(remove_duplicate=False))
    saved = _matching(
        named, config.modules_to_save, "lora.modules_to_save", lambda layer: any(True for _ in layer.parameters())
    )
    chosen = _chosen(named, config, saved)
    for parameter in module.parameters():
        parameter.requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    made: dict[int, LoraLayer] = {}
    for name in chosen:
        layer = named[name]
        if id(layer) not in made:
            made[id(layer)] = LoraLayer(layer, config, generator)
        parent, _, attribute = name.rpartition(".")
        setattr(module.get_submodule(parent), attribute, made[id(layer)])
    for name in saved:
        named[name].requires_grad_(True)


def check_used(module: nn.Module, graphs: Iterable[Graph]) -> None:
    """Raise UserError for an adapter that a recorded forward pass does not use."""
    wanted = {name for name, _ in module.named_parameters() if name.endswith(A)}
    for graph in graphs:
        idle = sorted(wanted - graph.differentiable())
        if idle:
            raise UserError(
                f"lora.match: {idle[0].removesuffix(A)} has an adapter that the forward pass does not call (it reads "
                "the layer's weight, or leaves the layer out), so it would train nothing; leave it out of lora.match"
            )


def merge(module: nn.Module) -> nn.Module:
    """Merge the adapters into the weights of the plain layers, in place, as PEFT's `merge_and_unload`."""
    state = merged_state(module, {key: to_numpy(value) for key, value in module.state_dict().items()})
    for name, layer in _layers(module).items():
        parent, _, attribute = name.rpartition(".")
        setattr(module.get_submodule(parent), attribute, layer.base_layer)
    module.load_state_dict({key: to_torch(np.array(value)) for key, value in state.items()})
    return module


def merged_state(module: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return an equivalent state dict without adapters, computed on use. module: one that `adapt` changed."""
    layers = _layers(module)
    plain = {}
    for key, value in state.items():
        if key.endswith((A, B)):
            continue
        stem = key.removesuffix(BASE)
        if stem != key and stem in layers:
            options = (layers[stem].scale, _is_conv1d(layers[stem].base_layer))
            compute = functools.partial(_merged, value, state[stem + A], state[stem + B], *options)
            value = LazyArray(value.shape, np.dtype(value.dtype), compute)
        plain[key.replace(".base_layer.", ".")] = value
    return plain


def merged_folder(
    module: nn.Module, state: Mapping[str, Any], folder: pathlib.Path, meta: Mapping[str, Any] | None = None
) -> pathlib.Path:
    """Write model.safetensors with merged adapters, and config.json if it is a transformers model."""
    if not _layers(module):
        raise UserError(NONE)
    files.save(merged_state(module, state), folder / "model.safetensors")
    described = getattr(module, "config", None)
    if hasattr(described, "to_json_string"):
        write_text(folder / "config.json", described.to_json_string())
    return folder


def save(module: nn.Module, folder: str | pathlib.Path, state: Mapping[str, Any] | None = None) -> pathlib.Path:
    """Write the adapters in PEFT's format, for `PeftModel.from_pretrained(base, folder)`.

    module: one that `adapt` changed. state: a state dict to write in place of the module's own. Raises UserError for a
    module without adapters.
    """
    layers = _layers(module)
    if not layers:
        raise UserError(NONE)
    state = {key: to_numpy(value) for key, value in module.state_dict().items()} if state is None else state
    saved = [name for name, layer in module.named_modules() if _trains_whole(layer, layers.values())]
    saved = [name for name in saved if not any(name.startswith(f"{other}.") for other in saved)]
    factors = {f"{name}.{part}.weight": state[f"{name}.{part}.{PEFT_ADAPTER}.weight"]
               for name in layers for part in ("lora_A", "lora_B")}  # fmt: skip
    factors |= {key: value for key, value in state.items() if any(key.startswith(f"{name}.") for name in saved)}
    first = next(iter(layers.values()))
    dropout = first.lora_dropout[PEFT_ADAPTER]
    return peft.save_folder(
        folder,
        factors,
        rank=_rank(first),
        alpha=first.scale * _rank(first),
        dropout=getattr(dropout, "p", 0.0),
        targets=list(layers),
        modules_to_save=saved,
        fan_in_fan_out=_is_conv1d(first.base_layer),
        base=getattr(getattr(module, "config", None), "name_or_path", None) or None,
    )


def _layers(module: nn.Module) -> dict[str, LoraLayer]:
    return {name: x for name, x in module.named_modules(remove_duplicate=False) if isinstance(x, LoraLayer)}


def _trains_whole(layer: nn.Module, adapted: Iterable[nn.Module]) -> bool:
    """Return True if every parameter of a module trains, as in modules_to_save, and none belongs to an adapter."""
    parameters = list(layer.parameters())
    factors = {id(p) for x in adapted for p in x.parameters()}
    return bool(parameters) and all(p.requires_grad and id(p) not in factors for p in parameters)


def _chosen(named: Mapping[str, nn.Module], config: LoraConfig, saved: Collection[str]) -> list[str]:
    free = {n: x for n, x in named.items() if not any(n == name or n.startswith(f"{name}.") for name in saved)}
    fused = _fused(named)
    if config.patterns:
        found = _matching(free, config.patterns, "lora.match", _takes_adapter)
        if passed_by := sorted(fused & set(found)):
            raise UserError(
                f"lora.match: {passed_by[0]} is a part of nn.TransformerEncoderLayer, which torch computes in one "
                "kernel in evaluation, past an adapter (in PEFT too); leave it out of lora.match"
            )
        return found
    # leaves out the projection of nn.MultiheadAttention: its forward reads the weight without calling the layer
    plain = lambda x: _takes_adapter(x) and not isinstance(x, nn.modules.linear.NonDynamicallyQuantizableLinear)
    found = [name for name, layer in free.items() if name and plain(layer) and name not in fused]
    if not found:
        raise UserError("lora: the module has no Linear layer that could take an adapter")
    return found


def _fused(named: Mapping[str, nn.Module]) -> set[str]:
    """Return the names of layers whose weights nn.TransformerEncoderLayer reads in evaluation without calling them."""
    layers = [f"{name}." if name else "" for name, x in named.items() if isinstance(x, nn.TransformerEncoderLayer)]
    return {f"{name}{part}" for name in layers for part in ("linear1", "linear2", "self_attn.out_proj")}


def _matching(named: Mapping[str, nn.Module], patterns: Sequence[str], key: str, fits: Any) -> list[str]:
    """Return the names of submodules that any pattern matches, in full or at the end, as PEFT's target_modules."""
    found: dict[str, None] = {}
    for pattern in patterns:
        hit = [n for n in named if n and (fnmatch.fnmatchcase(n, pattern) or fnmatch.fnmatchcase(n, f"*.{pattern}"))]
        taken = [name for name in hit if fits(named[name])]
        if hit and not taken:
            kind = type(named[hit[0]]).__name__
            raise UserError(f"{key}: {pattern!r} matches {hit[0]}, a {kind}, which takes none; Linear layers do")
        if not taken:
            ends = sorted({name.rpartition(".")[2] for name in named if name and fits(named[name])})
            near = difflib.get_close_matches(pattern, [*named, *ends], 1)
            hint = f", did you mean {near[0]!r}?" if near else ""
            raise UserError(f"{key}: {pattern!r} matches no layer{hint} There are {', '.join(ends[:12])}")
        found |= dict.fromkeys(taken)
    return list(found)


def _takes_adapter(layer: nn.Module) -> bool:
    return isinstance(layer, nn.Linear) or _is_conv1d(layer)


def _is_conv1d(layer: Any) -> bool:
    """Return True for a Conv1D of transformers (GPT-2): a Linear layer whose weight is [in, out]."""
    return type(layer).__name__ == "Conv1D" and hasattr(layer, "nf") and layer.weight.dim() == 2


def _sizes(layer: Any) -> tuple[int, int]:
    """Return the widths of the input and the output."""
    into, out = layer.weight.shape if _is_conv1d(layer) else reversed(layer.weight.shape)
    return into, out


def _rank(layer: LoraLayer) -> int:
    return layer.lora_A[PEFT_ADAPTER].weight.shape[0]


def _merged(weight: Any, down: Any, up: Any, scale: float, turned: bool) -> np.ndarray:
    """Return `merged_weight`. turned: the weight is [in, out]."""
    if turned:
        return merged_weight(np.asarray(weight).T, down, up, scale).T
    return merged_weight(weight, down, up, scale)
