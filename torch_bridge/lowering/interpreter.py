"""Runs an exported graph on JAX arrays, operator by operator; under jax.jit the operators become one XLA program."""

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind

from torch_bridge.datasets import to_numpy
from torch_bridge.lowering.operators import TABLE
from torch_bridge.lowering.sizes import Sizes
from torch_bridge.lowering.structure import Structure
from torch_bridge.lowering.table import Call

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Graph:
    """One exported graph. Shapes may vary within what `sizes` admits.

    state: names of the parameters and buffers that it reads, in the order of its first placeholders.
    constants: tensors that belong to no state dict, by placeholder.
    """

    module: torch.fx.GraphModule
    placeholders: tuple[tuple[str, str | None], ...]  # (placeholder, state name or None for inputs and constants)
    inputs: tuple[str, ...]
    constants: Mapping[str, Any]
    outputs: tuple[tuple[OutputKind, str | None], ...]
    structure: Structure
    sizes: Sizes

    @property
    def state(self) -> set[str]:
        return {name for _, name in self.placeholders if name is not None}

    @property
    def changed(self) -> set[str]:
        """Names of the buffers that it writes."""
        return {name for kind, name in self.outputs if kind == OutputKind.BUFFER_MUTATION and name is not None}

    def run(self, state: Mapping[str, jax.Array], inputs: Sequence[Any], call: Call) -> tuple[Any, dict[str, Any]]:
        """The module's output, and the new values of the buffers that it changes, by name."""
        values = {**self.constants, **dict(zip(self.inputs, inputs, strict=True))}
        arguments = [
            values.get(placeholder) if name is None else state[name] for placeholder, name in self.placeholders
        ]
        results = _run(self.module, [_array(value) for value in arguments], call)
        pairs = list(zip(self.outputs, results, strict=True))
        changed = {name: value for (kind, name), value in pairs if kind == OutputKind.BUFFER_MUTATION and name}
        leaves = [value for (kind, _), value in pairs if kind in (OutputKind.USER_OUTPUT, OutputKind.LOSS_OUTPUT)]
        return self.structure.build(leaves), changed


def graph_of(program: torch.export.ExportedProgram, prefix: str = "") -> Graph:
    """The runnable form of an exported program. Parameters and buffers whose names start with `prefix` are its state
    (without the prefix); others, a loss's class weights say, are constants."""
    signature = program.graph_signature
    changed = {spec.target for spec in signature.output_specs if spec.kind == OutputKind.BUFFER_MUTATION}
    own = lambda target: target is not None and target.startswith(prefix)
    placeholders, inputs, constants = [], [], {}
    for spec in signature.input_specs:
        name = spec.arg.name
        stateful = spec.kind == InputKind.PARAMETER or (
            spec.kind == InputKind.BUFFER and (spec.persistent or spec.target in changed)
        )
        stateful = stateful and own(spec.target)
        placeholders.append((name, spec.target.removeprefix(prefix) if stateful else None))
        if spec.kind == InputKind.USER_INPUT:
            inputs.append(name)
            if isinstance(spec.arg, ConstantArgument):
                constants[name] = spec.arg.value
        elif not stateful:
            constants[name] = np.array(to_numpy(_tensor_of(program, spec.target)))  # torch may write to it
    return Graph(
        module=program.graph_module,
        placeholders=tuple(placeholders),
        inputs=tuple(inputs),
        constants=constants,
        outputs=tuple(
            (spec.kind, spec.target.removeprefix(prefix) if own(spec.target) else None)
            for spec in signature.output_specs
        ),
        structure=Structure.of(program.call_spec.out_spec),
        sizes=Sizes.of(program, inputs),
    )


def _tensor_of(program, target: str) -> torch.Tensor:
    return program.constants[target] if target in program.constants else program.state_dict[target]


def _array(value: Any) -> Any:
    return value if isinstance(value, (bool, int, float, str, type(None))) else jnp.asarray(value)


def _run(graph_module: torch.fx.GraphModule, arguments: Sequence[Any], call: Call) -> list[Any]:
    """Evaluate the nodes in order, dropping each value after its last use."""
    values: dict[torch.fx.Node, Any] = {}
    remaining: dict[torch.fx.Node, int] = {}
    feed = iter(arguments)
    for node in graph_module.graph.nodes:
        if node.op == "placeholder":
            values[node] = next(feed)
        elif node.op == "get_attr":
            values[node] = _attribute(graph_module, node.target)
        elif node.op == "call_function":
            args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = _evaluate(node, args, kwargs, call)
        elif node.op == "output":
            return [values[item] if isinstance(item, torch.fx.Node) else item for item in node.args[0]]
        remaining[node] = len(node.users)
        for used in node.all_input_nodes:
            remaining[used] -= 1
            if not remaining[used]:
                del values[used]
        if not remaining[node] and node in values:
            del values[node]
    raise AssertionError("a graph ends with its output")


def _attribute(graph_module, target: str) -> Any:
    value = graph_module
    for part in target.split("."):
        value = getattr(value, part)
    return jnp.asarray(to_numpy(value)) if isinstance(value, torch.Tensor) else value


def _evaluate(node: torch.fx.Node, args: tuple, kwargs: Mapping[str, Any], call: Call) -> Any:
    target: Any = node.target
    if isinstance(target, torch._ops.OpOverload):
        lower = TABLE[str(target)]
        try:
            return lower(call, *args, **kwargs)
        except Exception as error:
            error.add_note(f"while running {node.name} = {target} at\n{node.stack_trace or 'an unknown line'}")
            raise
    if isinstance(target, torch._ops.HigherOrderOperator):
        return _HIGHER_ORDER[str(target)](call, *args, **kwargs)
    return target(*args, **kwargs)  # arithmetic on sizes, picking from a tuple


def _branch(graph_module: torch.fx.GraphModule, call: Call) -> Callable:
    return lambda *arguments: tuple(_run(graph_module, arguments, call))


def _cond(call, predicate, when_true, when_false, operands=()):
    if isinstance(predicate, bool):
        return _branch(when_true if predicate else when_false, call)(*operands)
    return jax.lax.cond(predicate.reshape(()), _branch(when_true, call), _branch(when_false, call), *operands)


def _while_loop(call, condition, body, carried, additional=()):
    test, step = _branch(condition, call), _branch(body, call)
    return jax.lax.while_loop(
        lambda state: test(*state, *additional)[0].reshape(()), lambda state: step(*state, *additional), tuple(carried)
    )


def _scan(call, combine, init, xs, additional=()):
    """Carries first, then the stacked outputs, as torch lists them."""
    step = _branch(combine, call)

    def body(carry, x):
        results = step(*carry, *x, *additional)
        return results[: len(init)], results[len(init) :]

    carry, stacked = jax.lax.scan(body, tuple(init), tuple(xs))
    return (*carry, *stacked)


def _map(call, body, xs, additional=()):
    step = _branch(body, call)
    return jax.lax.map(lambda row: step(*row, *additional), tuple(xs))


def _without_gradient(call, enabled, body, *arguments):
    results = _branch(body, call)(*arguments)
    return results if enabled else jax.lax.stop_gradient(results)


def _autocast(call, device, dtype, enabled, cache, body, *arguments):
    """The casts that autocast makes are operators of the body; precision follows the policy here."""
    return _branch(body, call)(*arguments)


_HIGHER_ORDER = {
    "cond": _cond,
    "while_loop": _while_loop,
    "scan": _scan,
    "map_impl": _map,
    "wrap_with_set_grad_enabled": _without_gradient,
    "wrap_with_autocast": _autocast,
}
