"""A module whose forward and backward passes are programs over several devices, for a loop of torch's.

The weights are a compiled step's, split over the devices. What the backward pass needs stays there, and so do the
gradients of parameters: both are DeviceTensors. The module's results are plain tensors.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from jaxtrain.runtime.prng import Rngs
from torch_bridge.capture import artefacts, decompositions, torch_api, unreached
from torch_bridge.capture.aten_program import Numbers
from torch_bridge.capture.attention import one_operator
from torch_bridge.capture.compiled_graph import CompiledGraph, Halves, symbols_of
from torch_bridge.capture.module_call import ModuleCall, parts_of
from torch_bridge.capture.observed import Observed, concrete
from torch_bridge.capture.reasons import stopped_by
from torch_bridge.capture.replay import check_backward, writes_in_checkpoint
from torch_bridge.datasets import to_torch
from torch_bridge.device_tensor import DeviceTensor, gathered, of_array
from torch_bridge.exchange import to_batch
from torch_bridge.lowering.errors import CannotRecord
from torch_bridge.lowering.table import Call

log = logging.getLogger(__name__)


class ShardedHalves(Halves):
    """State that the forward and backward graphs of one capture share. weights: of the compiled step, SharedWeights.
    first_saved: the first of the forward graph's outputs that are kept for the backward pass. names: of the forward
    graph's inputs, None for those that are no weights."""

    def __init__(self, weights: Any):
        super().__init__(wait=True)
        self.weights = weights
        self.first_saved: int | None = None
        self.names: list[str | None] = []

    def name(self, tensor: Any) -> str | None:
        """Return the weight that a tensor is, or shows as it is; AOTAutograd detaches those without a gradient."""
        if not isinstance(tensor, torch.Tensor) or isinstance(tensor, DeviceTensor):
            return None
        known = self.weights.names.get(id(tensor))
        if known is None and tensor.numel():
            known = self.weights.by_memory().get((tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype))
        return known


class ShardedGraph(CompiledGraph):
    """Call with a list of inputs; returns the list of outputs. Arguments and kinds are CompiledGraph's."""

    _halves: ShardedHalves

    def __init__(self, module: torch.fx.GraphModule, kind: str, halves: ShardedHalves):
        super().__init__(module, kind, frozenset(), halves)
        self._ready: dict[Any, _ShardedProgram] = {}

    def _computed(self, inputs: list) -> list:
        with self._halves.weights.exchange.plainly():
            return super()._computed(inputs)

    def _in_torch(self, inputs: list) -> list:
        self._halves.weights.sync()
        if self._kind == "forward":
            self._halves.names = [self._halves.name(value) for value in inputs]
        return super()._in_torch([gathered(value) for value in inputs])

    def _in_jax(self, inputs: list) -> list | None:
        halves, weights, program = self._halves, self._halves.weights, self._program
        numbers, every = program.numbers(inputs)
        for value in inputs if self._kind == "backward" else ():
            if isinstance(value, DeviceTensor) and value.saved_at not in (-1, weights.updates):
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace operation: "
                    "the optimizer has updated the weights between this forward pass and its backward pass"
                )
        if self._kind == "forward":
            halves.names = [halves.name(value) for value in inputs]
        names = tuple([halves.name(inputs[position]) for position in program.tensors])
        pairs = zip(names, program.tensors, strict=True)
        arrays = [weights.arrays[n] if n is not None else self._placed(inputs[position]) for n, position in pairs]
        key = names, tuple(halves.names), numbers.sizes, tuple([inputs[position].shape for position in self._shaped])
        ready = self._ready.get(key)
        if ready is None:
            ready = self._ready[key] = _ShardedProgram(self, halves, names, numbers.sizes, every)
        seed = np.uint32(int(torch.randint(1 << 31, (), device="cpu")) if self._draws else 0)
        outputs, holds = ready(arrays, numbers.free, seed)
        if not holds:
            return None
        for position, source in program.passed.items():
            outputs[position] = every[source]
        return outputs

    def _placed(self, tensor: torch.Tensor) -> Any:
        return tensor.array if isinstance(tensor, DeviceTensor) else self._halves.weights.placed_rows(to_batch(tensor))


class _ShardedProgram:
    """The XLA program for one set of weights and sizes."""

    def __init__(self, graph: ShardedGraph, halves: ShardedHalves, names: tuple, sizes: tuple, every: Sequence[Any]):
        self._kind, self._program, self._raises = graph._kind, graph._program, graph._raises
        self._halves, self._names, self._sizes = halves, names, sizes
        self._symbols = symbols_of(self._program.inputs, every)
        self._gradients = list(halves.names) if self._kind == "backward" else []
        self._constants: dict[int, Any] = {}
        self._run = jax.jit(self._traced)
        self._waits, self._known = graph._waits, False

    def __call__(self, arrays: list, free: tuple, seed: np.uint32) -> tuple[list, bool]:
        shapes = ", ".join(str(tuple(array.shape)) for array in arrays[:4])
        if self._known:
            computed, holds = self._run(arrays, free, seed)
        else:
            with self._waits.during("is compiled", f"inputs of shapes {shapes}"):
                computed, holds = self._run(arrays, free, seed)
        self._known = True
        outputs: list[Any] = [self._constants.get(position) for position in range(len(self._program.outputs))]
        for position, array in computed.items():
            outputs[position] = self._shown(position, array)
        return outputs, holds is None or bool(holds)

    def _shown(self, position: int, array: jax.Array) -> Any:
        value = self._program.outputs[position].meta["val"]
        if not isinstance(value, torch.Tensor):
            return array.item()
        strides: list[Any] = [concrete(stride, self._symbols) for stride in value.stride()]
        if self._stays(position):
            saved_at = self._halves.weights.updates if self._kind == "forward" else -1
            return of_array(array, value.dtype, None if None in strides else tuple(strides), saved_at)
        tensor = to_torch(np.array(array)).to(value.dtype)
        if None in strides or tensor.stride() == tuple(strides):
            return tensor
        return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype).copy_(tensor)

    def _stays(self, position: int) -> bool:
        """Return True for an output that stays on the devices."""
        if self._kind == "backward":
            return position < len(self._gradients) and self._gradients[position] is not None
        return self._halves.first_saved is not None and position >= self._halves.first_saved

    def _traced(self, arrays: list, free: tuple, seed: jax.Array) -> tuple[dict, Any]:
        observed = Observed(self._program.module, self._symbols, indices=self._kind != "backward")
        call = Call(Rngs(jax.random.key(seed)), observe=observed)
        layout = self._halves.weights.layout
        named = layout.gather({n: a for n, a in zip(self._names, arrays, strict=True) if n is not None})
        arrays = [a if n is None else named[n] for n, a in zip(self._names, arrays, strict=True)]
        for node, array in zip(self._program.read(), arrays, strict=True):
            observed.see(node, array)
        results = self._program.run(arrays, Numbers(self._sizes, free), call)
        computed = {}
        for position, result in enumerate(results):
            if result is None or isinstance(result, bool | int | float):
                self._constants[position] = result
            elif not hasattr(result, "dtype"):
                raise CannotRecord("it returns a tensor whose shape depends on the values of another")
            elif self._kind == "backward" and self._stays(position):
                name = self._gradients[position]
                computed[position] = self._halves.weights.scattered({name: result})[name]
            else:
                computed[position] = result
        holds = observed.holds()
        if self._raises:
            finite = [jnp.isfinite(x).all() for x in computed.values() if jnp.issubdtype(x.dtype, jnp.inexact)]
            holds = jnp.stack([*finite, *([] if holds is None else [holds])]).all()
        return computed, holds


class ShardedCall(ModuleCall):
    """Call that `module(...)` runs: captured whole, computed over all devices. If Dynamo does not capture it whole, the
    call runs as ModuleCall's, on one device, and a line says why."""

    def __init__(self, module: torch.nn.Module, weights: Any):
        self._weights, self._alone = weights, False
        super().__init__(module, wait=True)

    def _capture_anew(self) -> None:
        super()._capture_anew()
        self._pieces = self._captured
        self._whole = torch_api.whole(_call, self._sharded, self._note, self._guarded)
        self._captured = self._in_pieces if self._alone else self._on_devices

    def _on_devices(self, *args: Any, **kwargs: Any) -> Any:
        weights = self._weights
        with weights.exchange.plainly():
            weights.refresh()
            before = weights.versions()
        self._began = False
        try:
            with weights.shown():
                results = self._whole(self._module, args, kwargs)
        except Exception as error:
            if self._began:
                raise
            log.warning(
                "%s is not captured whole (%s): its forward and backward pass run on one device",
                type(self._module).__name__,
                stopped_by(torch_api.cause_of(error)),
            )
            self._alone, self._captured = True, self._in_pieces
            return self._in_pieces(*args, **kwargs)
        with weights.exchange.plainly():
            weights.read([name for name, version in weights.versions().items() if before[name] != version])
        return results

    def _in_pieces(self, *args: Any, **kwargs: Any) -> Any:
        self._weights.sync()
        return self._pieces(*args, **kwargs)

    def _guarded(self, guards: list[str]) -> None:
        pass

    def _sharded(self, gm: torch.fx.GraphModule, fakes: Sequence[Any]) -> Callable:
        """Return the programs of a graph: a backend of Dynamo's. Raises UserError to refuse it."""
        wrong = torch_api.stale() or torch_api.lost_writes() or torch_api.keeps_padding(gm.graph)
        if wrong := wrong or torch_api.unguarded_line(self._recaptures):
            raise CannotRecord(f"Dynamo does not follow {wrong}")
        if writes_in_checkpoint(gm):
            raise CannotRecord("Dynamo does not follow what a checkpointed part writes")
        check_backward(gm)
        self._unguarded.note()
        artefacts.show_graph("captured", gm)
        halves = ShardedHalves(self._weights)

        def compiler(kind: str) -> Callable:
            def compile(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> CompiledGraph:
                if kind == "forward":
                    halves.first_saved = torch_api.first_saved()
                with torch_api.outside_capture():
                    return ShardedGraph(graph, kind, halves)

            return compile

        backend = torch_api.autograd_backend(
            compiler("forward"), compiler("backward"), compiler("inference"), decompositions.rules_with_factors()
        )
        with one_operator():
            run = backend(gm, fakes)

        def call(*arguments: Any) -> Any:
            self._began = True
            results = run(*arguments)
            unreached.watch(results)
            return results

        return call


def _call(module: torch.nn.Module, args: tuple, kwargs: dict) -> Any:
    return module._call_impl(*args, **kwargs)


def compile_sharded(modules: Iterable[torch.nn.Module], weights: Any) -> None:
    """Let these modules compute over the devices that hold `weights` (SharedWeights), called as a whole or by parts."""
    for module in modules:
        for inner in (module, *parts_of(module)):
            torch_api.set_call(inner, ShardedCall(inner, weights))
