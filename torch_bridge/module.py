"""Wrap a flax model as a torch.nn.Module for torch's training loops, optimizers, metrics and servers.

    module = FlaxAsTorch(model)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    loss = torch.nn.functional.cross_entropy(module(images), labels)
    loss.backward()

JAX compiles forward and backward and runs them on the tensors' device; parameters and inputs are not copied.
"""

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx
from torch.autograd.function import once_differentiable

from jaxtrain.errors import UserError
from jaxtrain.runtime.prng import Rngs
from torch_bridge import layouts
from torch_bridge.datasets.convert import to_numpy, to_torch
from torch_bridge.exchange import any_wide, precision, pull_back, to_array, to_tensor, to_tensors
from torch_bridge.state_dict import state_dict


class FlaxAsTorch(torch.nn.Module):
    """A torch.nn.Module with the parameters and buffers of the flax `model`, under the same names, in the same order.

    Call it as the model is called, with tensors in place of arrays (also in nested tuples and dicts); other arguments
    are constants that it is compiled for. `train()` and `eval()` set the mode; random numbers follow torch.manual_seed.
    float64 tensors are computed in float64. Gradients of gradients are not supported.
    """

    def __init__(self, model: nnx.Module):
        super().__init__()
        self._bridge = _Bridge(model)
        arrays = state_dict(model)
        made: dict[str, torch.Tensor] = {}
        parameters = (nnx.Param, layouts.Frozen)
        for key, variable in layouts.named_variables(model):
            first = self._bridge.first[key]
            if first not in made:
                tensor = to_torch(arrays[key])
                trained = isinstance(variable, nnx.Param) and tensor.is_floating_point()
                made[first] = (
                    torch.nn.Parameter(tensor, requires_grad=trained) if isinstance(variable, parameters) else tensor
                )
            self._register(key, made[first])

    def _register(self, key: str, tensor: torch.Tensor) -> None:
        *path, name = key.split(".")
        part: torch.nn.Module = self
        for step in path:
            if step not in part._modules:
                part.add_module(step, torch.nn.Module())
            part = part.get_submodule(step)
        if isinstance(tensor, torch.nn.Parameter):
            part.register_parameter(name, tensor)
        else:
            part.register_buffer(name, tensor)

    def forward(self, *args, **kwargs):
        bridge = self._bridge
        leaves, spec = jax.tree.flatten((args, kwargs), is_leaf=lambda leaf: leaf is None)
        leaves = [torch.from_numpy(leaf) if isinstance(leaf, np.ndarray) else leaf for leaf in leaves]
        places = tuple(i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor))
        constants = tuple((i, leaf) for i, leaf in enumerate(leaves) if i not in places)
        inputs = [leaves[i] for i in places]
        own = dict(self.named_parameters(remove_duplicate=False)) | dict(self.named_buffers(remove_duplicate=False))
        state = [own[key] for key in bridge.seen]
        seed = int(torch.randint(1 << 31, ())) if self.training else 0
        tensors = [*state, *inputs]
        differentiated = tuple(
            i for i, t in enumerate(tensors) if torch.is_grad_enabled() and t.requires_grad and t.is_floating_point()
        )
        program = bridge.program(spec, places, constants, self.training, differentiated)
        wide = any_wide(tensors)
        if differentiated:
            outputs = _Call.apply(program, seed, wide, len(state), *tensors)
        else:
            outputs = _run(program, seed, wide, len(state), tensors)[0]
        program.take_over(state)
        return jax.tree.unflatten(program.structure, outputs)

    def flax_model(self) -> nnx.Module:
        """Return a copy of the flax model with the current weights."""
        own = dict(self.named_parameters(remove_duplicate=False)) | dict(self.named_buffers(remove_duplicate=False))
        arrays = {key: jnp.array(to_numpy(own[key])) for key in self._bridge.seen}
        return self._bridge.merge(arrays | self._bridge.hidden)


class _Bridge:
    """The flax model's structure, the state that torch does not see, and compiled programs."""

    def __init__(self, model: nnx.Module):
        self.graphdef, state = nnx.split(model)
        self.order = layouts.attribute_order(model)
        self.treedef = jax.tree.structure(state)
        self.keys = [layouts.key_of(path) for path, _ in nnx.to_flat_state(state)]
        self.first = layouts.first_names(model)
        self.parameters = {key for key, variable in layouts.named_variables(model) if isinstance(variable, nnx.Param)}
        self.seen = [key for key in self.keys if key in self.first]
        arrays = dict(zip(self.keys, jax.tree.leaves(state), strict=True))
        self.hidden = {key: array for key, array in arrays.items() if key not in self.first}
        self.takes_rngs = "rngs" in inspect.signature(type(model).__call__).parameters
        self.programs: dict[Any, _Program] = {}

    def __deepcopy__(self, memo) -> "_Bridge":
        copy = object.__new__(_Bridge)
        copy.__dict__.update(self.__dict__, hidden=dict(self.hidden), programs={})
        return copy

    def __getstate__(self):
        raise UserError(
            "a FlaxAsTorch is not pickled whole: save its state_dict(), and build it again from the flax model"
        )

    def merge(self, arrays: dict[str, jax.Array]) -> nnx.Module:
        model = nnx.merge(self.graphdef, jax.tree.unflatten(self.treedef, [arrays[key] for key in self.keys]))
        layouts.restore_order(model, self.order)
        return model

    def program(self, spec, places: tuple, constants: tuple, training: bool, differentiated: tuple) -> "_Program":
        key = (spec, places, constants, training, differentiated)
        try:
            known = self.programs.get(key)
        except TypeError:
            odd = next(type(value).__name__ for _, value in constants if type(value).__hash__ is None)
            raise UserError(f"an argument is {odd}, wanted a tensor, an array or a constant such as a number") from None
        if known is None:
            known = self.programs[key] = _Program(self, spec, places, constants, training, differentiated)
        return known


class _Program:
    """One call form of the model, compiled by jax.jit for each set of shapes."""

    def __init__(self, bridge: _Bridge, spec, places: tuple, constants: tuple, training: bool, differentiated: tuple):
        self.bridge, self.spec, self.places, self.constants = bridge, spec, places, dict(constants)
        self.training, self.differentiated = training, differentiated
        self.structure: Any = None  # of the outputs; known after tracing
        self.floating: list[bool] = []
        self.changed: dict[str, jax.Array] = {}
        self.forward = jax.jit(self._forward)
        self.forward_for_backward = jax.jit(self._forward_for_backward)

    def _outputs(self, arrays: list[jax.Array], hidden: dict[str, jax.Array], seed: jax.Array):
        """Return the leaves of the outputs, and all state that torch or the next call must take over."""
        bridge = self.bridge
        model = bridge.merge(dict(zip(bridge.seen, arrays, strict=False)) | hidden)
        inputs = arrays[len(bridge.seen) :]
        leaves: list[Any] = [self.constants.get(i) for i in range(len(inputs) + len(self.constants))]
        for i, array in zip(self.places, inputs, strict=True):
            leaves[i] = array
        args, kwargs = jax.tree.unflatten(self.spec, leaves)
        if bridge.takes_rngs:
            kwargs["rngs"] = Rngs(jax.random.key(seed)) if self.training else None
        elif self.training:
            model.train()
        else:
            model.eval()
        outputs, self.structure = jax.tree.flatten(model(*args, **kwargs))
        outputs = [jnp.asarray(leaf) for leaf in outputs]
        self.floating = [jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in outputs]
        after = dict(zip(bridge.keys, jax.tree.leaves(nnx.state(model)), strict=True))
        kept = {key: value for key, value in after.items() if key not in bridge.parameters} if self.training else {}
        return outputs, kept

    def _forward(self, arrays, hidden, seed):
        return self._outputs(arrays, hidden, seed)

    def _forward_for_backward(self, arrays, hidden, seed):
        def outputs_of(chosen):
            together = list(arrays)
            for i, array in zip(self.differentiated, chosen, strict=True):
                together[i] = array
            outputs, kept = self._outputs(together, hidden, seed)
            floats = [leaf for leaf, floating in zip(outputs, self.floating, strict=True) if floating]
            others = [leaf for leaf, floating in zip(outputs, self.floating, strict=True) if not floating]
            return floats, (others, kept)

        floats, pullback, (others, kept) = jax.vjp(outputs_of, [arrays[i] for i in self.differentiated], has_aux=True)
        floats, others = iter(floats), iter(others)
        return [next(floats) if floating else next(others) for floating in self.floating], kept, pullback

    def take_over(self, state: list[torch.Tensor]) -> None:
        """Copy changed buffers (running statistics) into torch's; keep the changed state that torch does not see."""
        bridge = self.bridge
        with torch.no_grad():
            for key, tensor in zip(bridge.seen, state, strict=True):
                if key in self.changed:
                    tensor.copy_(to_tensor(self.changed[key], tensor.dtype))
        bridge.hidden |= {key: value for key, value in self.changed.items() if key in bridge.hidden}
        self.changed = {}


class _Call(torch.autograd.Function):
    """A differentiable call of a program."""

    @staticmethod
    def forward(ctx, program: _Program, seed: int, wide: bool, count: int, *tensors: torch.Tensor):
        outputs, ctx.pullback = _run(program, seed, wide, count, tensors, differentiate=True)
        ctx.save_for_backward(*(t for i, t in enumerate(tensors) if i >= count or i in program.differentiated))
        ctx.program, ctx.wide, ctx.count = program, wide, len(tensors)
        ctx.floating = list(program.floating)
        ctx.mark_non_differentiable(*(t for t, floating in zip(outputs, ctx.floating, strict=True) if not floating))
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx, *cotangents: torch.Tensor):
        _ = ctx.saved_tensors  # torch raises here if one was changed in place since: JAX reads their memory
        with precision(ctx.wide):
            given = [to_array(t) for t, floating in zip(cotangents, ctx.floating, strict=True) if floating]
            gradients = jax.block_until_ready(pull_back()(ctx.pullback, given))
        found: list[torch.Tensor | None] = [None] * ctx.count
        for i, gradient in zip(ctx.program.differentiated, to_tensors(gradients), strict=True):
            found[i] = gradient
        return None, None, None, None, *found


def _run(program: _Program, seed: int, wide: bool, count: int, tensors, differentiate: bool = False):
    """Return the output tensors, and the pullback if `differentiate`. count: how many of the tensors are the model's
    own state."""
    with precision(wide):
        arrays = [to_array(_own_buffer(program, i, t, count)) for i, t in enumerate(tensors)]
        run = program.forward_for_backward if differentiate else program.forward
        outputs, program.changed, *pullback = run(arrays, program.bridge.hidden, np.uint32(seed))
        jax.block_until_ready(outputs)  # torch may write to the inputs from now on
        return to_tensors(outputs), pullback[0] if pullback else None


def _own_buffer(program: _Program, i: int, tensor: torch.Tensor, count: int) -> torch.Tensor:
    """Clone a buffer that is written after the call: the backward pass may need its old values."""
    written = program.training and i < count and not isinstance(tensor, torch.nn.Parameter)
    return tensor.clone() if written else tensor
