"""Call a JAX function from torch: tensors in, differentiable tensors out.

@as_torch
def loss(prediction, target, *, delta=1.0):
    return {"loss": jnp.square(prediction - target).mean()}

loss(prediction, target)["loss"].backward()      # tensors
loss(jax_prediction, jax_target)                 # arrays: the function itself
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from jaxtrain.errors import UserError
from jaxtrain.runtime import gpus
from torch_bridge.exchange import Shared, address, any_wide, inexact, precision, pull_back, take, to_input, to_tensors


def as_torch(function: Callable) -> Callable:
    """Return `function` for tensors too; a call without tensors calls the function itself.

    Arguments and results may be nested in dicts, lists and tuples. Tensors are differentiable if they require a
    gradient. Numpy arrays beside tensors are treated as tensors. Everything else is a constant that the call is
    compiled for, and must be hashable. Results are on the inputs' device in the dtype that JAX gives: float64 is
    computed in float64, integers become torch's int64. Gradients of gradients (create_graph=True) compute the function
    once more. Errors that the function raises about shapes and constants pass through.

    Args:
        function: of JAX arrays.

    Examples:
        >>> import torch, jax.numpy as jnp
        >>> from torch_bridge.function import as_torch
        >>> x = torch.tensor([3.0, 4.0], requires_grad=True)
        >>> as_torch(lambda x: jnp.sqrt((x**2).sum()))(x).backward()
        >>> [round(value, 4) for value in x.grad.tolist()]
        [0.6, 0.8]
    """
    gpus.share_memory()
    programs: dict[Any, _Program] = {}

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        leaves, spec = jax.tree.flatten((args, kwargs), is_leaf=lambda leaf: leaf is None)
        if not any(isinstance(leaf, torch.Tensor) for leaf in leaves):
            return function(*args, **kwargs)
        leaves = [torch.from_numpy(leaf) if isinstance(leaf, np.ndarray) else leaf for leaf in leaves]
        places = tuple(i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor))
        constants = tuple((i, leaf) for i, leaf in enumerate(leaves) if i not in places)
        tensors = [leaves[i] for i in places]
        wanted = tuple(i for i, t in enumerate(tensors) if torch.is_grad_enabled() and t.requires_grad and inexact(t))
        key = (spec, places, constants, tuple(type(leaf) for _, leaf in constants), wanted)
        try:
            program = programs.get(key)
            if program is None:
                program = programs[key] = _Program(function, spec, places, constants, wanted)
        except TypeError:
            odd = next(type(value).__name__ for _, value in constants if type(value).__hash__ is None)
            raise UserError(
                f"{function.__name__}: an argument is {odd}, wanted a tensor, an array or a hashable constant"
            ) from None
        outputs = _Call.apply(program, *tensors) if wanted else program.run(tensors)[0]
        return jax.tree.unflatten(program.structure, outputs)

    return call


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Given:
    """Marks an argument of the forward pass among the kept values; returning the argument itself would copy it."""

    place: int


class _Program:
    """One call form of the function, compiled by jax.jit for each set of shapes."""

    def __init__(self, function: Callable, spec: Any, places: tuple, constants: tuple, wanted: tuple):
        self.function, self.spec, self.places, self.constants = function, spec, places, dict(constants)
        self.wanted = wanted  # indices of the tensors that get a gradient
        self.structure: Any = None  # of the results; known after tracing
        self.floating: list[bool] = []
        self.forward = jax.jit(self._forward)
        self.shared = Shared()
        self._gradient: _Program | None = None

    def gradient(self) -> "_Program":
        """Return the gradient as a program: (tensors, one cotangent per floating-point result) -> gradients of the
        wanted tensors."""
        if self._gradient is None:
            count = len(self.places)

            def compute(*arrays: jax.Array) -> list[jax.Array]:
                given, cotangents = list(arrays[:count]), [jnp.conj(array) for array in arrays[count:]]

                def floats_of(chosen: list[jax.Array]) -> list[jax.Array]:
                    together = list(given)
                    for i, array in zip(self.wanted, chosen, strict=True):
                        together[i] = array
                    pairs = zip(self._outputs(together), self.floating, strict=True)
                    return [leaf for leaf, floating in pairs if floating]

                slopes = jax.vjp(floats_of, [given[i] for i in self.wanted])[1](cotangents)[0]
                return [jnp.conj(slope) for slope in slopes]

            total = count + sum(self.floating)
            _, spec = jax.tree.flatten((tuple(range(total)), {}))
            wanted = (*self.wanted, *range(count, total))
            self._gradient = _Program(compute, spec, tuple(range(total)), (), wanted)
        return self._gradient

    def run(self, tensors: list[torch.Tensor]) -> tuple[list[torch.Tensor], Any]:
        """Return the leaves of the results, and the pullback if a gradient is wanted."""
        with precision(any_wide(tensors)):
            lasting = [tensor.is_leaf and tensor.requires_grad for tensor in tensors]  # parameters
            pairs = enumerate(zip(tensors, lasting, strict=True))
            arrays = [self.shared.array(place, t) if lasts else to_input(t) for place, (t, lasts) in pairs]
            outputs, pullback = self.forward(arrays)
            jax.block_until_ready(outputs)  # torch may write to the inputs from now on
            given = lambda place: arrays[place] if lasting[place] else arrays[place].copy()
            fill = lambda leaf: given(leaf.place) if isinstance(leaf, _Given) else leaf
            pullback = jax.tree.map(fill, pullback, is_leaf=lambda leaf: isinstance(leaf, _Given))
            return to_tensors(outputs), pullback

    def _outputs(self, arrays: list[jax.Array]) -> list[jax.Array]:
        leaves = [self.constants.get(i) for i in range(len(arrays) + len(self.constants))]
        for i, array in zip(self.places, arrays, strict=True):
            leaves[i] = array
        args, kwargs = jax.tree.unflatten(self.spec, leaves)
        outputs, self.structure = jax.tree.flatten(self.function(*args, **kwargs))
        outputs = [jnp.asarray(leaf) for leaf in outputs]
        self.floating = [jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in outputs]
        return outputs

    def _forward(self, arrays: list[jax.Array]):
        if not self.wanted:
            return self._outputs(arrays), None

        def outputs_of(chosen: list[jax.Array]):
            together = list(arrays)
            for i, array in zip(self.wanted, chosen, strict=True):
                together[i] = array
            outputs = self._outputs(together)
            pairs = list(zip(outputs, self.floating, strict=True))
            return [leaf for leaf, floating in pairs if floating], [leaf for leaf, floating in pairs if not floating]

        floats, pullback, others = jax.vjp(outputs_of, [arrays[i] for i in self.wanted], has_aux=True)
        kept = {True: iter(floats), False: iter(others)}
        places = {id(array): place for place, array in enumerate(arrays)}
        as_given = lambda leaf: _Given(places[id(leaf)]) if id(leaf) in places else leaf
        return [next(kept[floating]) for floating in self.floating], jax.tree.map(as_given, pullback)


class _Call(torch.autograd.Function):
    """A differentiable call of a program."""

    @staticmethod
    def forward(ctx, program: _Program, *tensors: torch.Tensor):
        outputs, ctx.pullback = program.run(list(tensors))
        held = set(map(address, jax.tree.leaves(ctx.pullback)))
        ctx.save_for_backward(*(t for t in tensors if t.data_ptr() in held))  # the backward pass reads their memory
        ctx.tensors, ctx.versions = tensors, [tensor._version for tensor in tensors]
        ctx.program, ctx.wide, ctx.count = program, any_wide(tensors), len(tensors)
        ctx.floating = list(program.floating)
        ctx.mark_non_differentiable(*(t for t, floating in zip(outputs, ctx.floating, strict=True) if not floating))
        ctx.set_materialize_grads(False)
        ctx.forms = [(t.shape, t.dtype, t.device) for t in outputs]
        return tuple(outputs)

    @staticmethod
    def backward(ctx, *cotangents: torch.Tensor | None):
        _ = ctx.saved_tensors  # torch raises here if one was changed in place since
        if any(t is not None and torch._C._functorch.is_legacy_batchedtensor(t) for t in cotangents):
            raise UserError(
                "is_grads_batched=True (vectorize=True) asks several gradients of a compiled call at once, which "
                "torch's vmap does with operators of torch alone: ask for them one by one, in a loop over the rows"
            )
        zeros = lambda form: torch.zeros(form[0], dtype=form[1], device=form[2])
        given = [
            zeros(form) if t is None else t
            for t, form, floating in zip(cotangents, ctx.forms, ctx.floating, strict=True)
            if floating
        ]
        if torch.is_grad_enabled():  # create_graph=True
            tensors = ctx.tensors
            if any(tensor._version != before for tensor, before in zip(tensors, ctx.versions, strict=True)):
                raise RuntimeError("create_graph=True needs the inputs of the call, and one was changed in place since")
            slopes = _Call.apply(ctx.program.gradient(), *tensors, *given)
            _drop_used(ctx)
            by_place = dict(zip(ctx.program.wanted, slopes, strict=True))
            return None, *(by_place.get(i) for i in range(ctx.count))
        with precision(ctx.wide):
            arrays = [to_input(t.conj()) for t in given]
            gradients = jax.block_until_ready(pull_back()(ctx.pullback, arrays))
        found: list[torch.Tensor | None] = [None] * ctx.count
        tensors = take(gradients, (*arrays, *jax.tree.leaves(ctx.pullback)))
        _drop_used(ctx)
        for i, gradient in zip(ctx.program.wanted, tensors, strict=True):
            found[i] = gradient.conj().resolve_conj()  # torch's gradient is the conjugate of JAX's
        return None, *found


def _drop_used(ctx: Any) -> None:
    """Drop what the backward pass has used, as torch does without retain_graph=True: a loss that the user keeps would
    keep all activations. A second backward pass then ends at `saved_tensors`, in torch's own error."""
    if not torch._C._autograd._get_current_graph_task_keep_graph():
        ctx.pullback = ctx.tensors = None
