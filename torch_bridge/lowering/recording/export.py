"""Export a torch module with example inputs to a functional graph of operators that have lowerings.

`torch.export` records the module with symbolic sizes; decomposition takes apart operators without a lowering and keeps
those with one whole; mutated buffers become outputs.
"""

import contextlib
import copy
import functools
import logging
import traceback
import weakref
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch._logging.structured import INTERN_TABLE
from torch.export.graph_signature import OutputKind
from torch.utils import _pytree as pytree

from jaxtrain.errors import UserError
from torch_bridge.lowering import foreseen, selections
from torch_bridge.lowering.dtypes import known_dtype
from torch_bridge.lowering.errors import (
    ADVICE_DATA,
    ADVICE_FAULT,
    ADVICE_HOOKS,
    ADVICE_LIBRARY,
    ADVICE_OPERATORS,
    ADVICE_READY,
    ADVICE_RECORD,
    ADVICE_WRITTEN,
    NoLoss,
    Obstacle,
    Unanswerable,
    UnsupportedModel,
    Untrained,
    WritesOutside,
    exception_line,
    merge,
    module_path,
    source_line,
    speaks_of_internals,
)
from torch_bridge.lowering.operators import TABLE
from torch_bridge.lowering.operators.views import in_order
from torch_bridge.lowering.python import assigned_buffers
from torch_bridge.lowering.python import state as python_state
from torch_bridge.lowering.python.effects import Changes, only_reading
from torch_bridge.lowering.recording import gradients, hooks, module_hooks
from torch_bridge.lowering.recording.elsewhere import WRITES as WRITES_ELSEWHERE
from torch_bridge.lowering.recording.elsewhere import Untouched
from torch_bridge.lowering.recording.export_patches import PlainFunctions, recordable
from torch_bridge.lowering.recording.ready import device_of, unready
from torch_bridge.lowering.recording.sizes import any_size, symbols_stood_in_the_way
from torch_bridge.lowering.recording.stand_ins import as_parameters
from torch_bridge.lowering.recording.tracking import untrack
from torch_bridge.lowering.recording.user_warnings import UserWarnings
from torch_bridge.lowering.recording_lock import RECORDING_LOCK, quiet, without_logging
from torch_bridge.random_state import undrawn

log = logging.getLogger(__name__)
_TOLD: weakref.WeakKeyDictionary[torch.nn.Module, set] = weakref.WeakKeyDictionary()

# Lowered for graphs that already hold them. As views, copies or torch's own kernels, they are decomposed if torch can.
_TAKEN_APART = {"aten.contiguous.default", "aten.t.default", "aten.transpose.int", "aten.reshape.default"} | {
    # Kept whole, they lose their axis in torch 2.13 with reduction="none" and symbolic sizes (its reference takes
    # the reduction by its name). Decomposed, they are log_softmax and nll_loss_forward.
    f"aten.{name}.default"
    for name in ("cross_entropy_loss", "nll_loss_nd", "nll_loss", "nll_loss2d")
}

_UNFOLD_WRITTEN = "aten.unfold_backward.default"  # torch.export writes 0 outside the windows

DATA_DEPENDENT = "a branch or shape depends on the values of a tensor"
NUMPY = "NumPy is to compute with a tensor of the program, whose values only JAX has: write the line with torch"
WRITTEN = "the forward pass writes the parameter"

HIGHER_ORDER = (
    "cond",
    "while_loop",
    "scan",
    "map_impl",
    "wrap_with_set_grad_enabled",
    "wrap_with_autocast",
    gradients.OWN_GRADIENT,
    gradients.GRADIENT,
    hooks.HOOK,
    module_hooks.ENTER,
    module_hooks.LEAVE,
)


def export(
    module: torch.nn.Module,
    inputs: tuple,
    captured: dict[int, torch.Tensor] | None = None,
    read: dict[str, str] | None = None,
    left: Changes | None = None,
    *,
    graded: bool = True,
) -> torch.export.ExportedProgram:
    """Return the module in its present mode (train or eval) as a functional graph with symbolic sizes.

    inputs: its positional arguments, which may be containers of tensors. captured: receives tensors from outside the
    module that the graph holds as constants. read: receives the buffers whose numbers Python read, with the line; see
    `check_read`. left: receives the Python attributes that a call changes although no later call's result depends on
    it. graded: see `recordable`.

    Raises UnsupportedModel, which lists every operator and line that prevents the export.
    """
    with RECORDING_LOCK, assigned_buffers.kept(module), undrawn(), as_parameters(module):
        return _export(module, checked(module, inputs), captured, read, left, graded)


def checked(module: torch.nn.Module, inputs: tuple) -> tuple:
    """Return the inputs beside the module's tensors. Raises UnsupportedModel for what no graph can hold, seen without
    recording it."""
    if parts := list(unready(module)):
        raise UnsupportedModel(_name(module), parts, ADVICE_READY)
    inputs = _beside(module, inputs)
    is_packed = lambda value: isinstance(value, torch.nn.utils.rnn.PackedSequence)
    if any(map(is_packed, pytree.tree_leaves(inputs, is_leaf=is_packed))):
        packed = Obstacle("it is given a PackedSequence, whose sizes are values", "")
        raise UnsupportedModel(_name(module), [packed], "Give it the padded tensor and the lengths to pack.")
    if unhooked := list(hooks.unsupported(module)):
        raise UnsupportedModel(_name(module), merge(unhooked), ADVICE_HOOKS)
    if seen := _foreseen(module, inputs):
        raise UnsupportedModel(_name(module), [seen], ADVICE_OPERATORS if "lowering" in seen.what else ADVICE_LIBRARY)
    return inputs


def _beside(module: torch.nn.Module, inputs: tuple) -> tuple:
    """Move the inputs to the device of the module's first tensor, where a torch loop would have put them."""
    device = device_of(module)
    return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), inputs)


def _export(module: torch.nn.Module, inputs: tuple, captured, read, left, graded: bool) -> torch.export.ExportedProgram:
    program: Any = None
    error, obstacles, asking = None, [], ""
    watch = python_state.Watch(module)
    forms = (pytree.tree_map(any_size, inputs), None) if pytree.tree_leaves(inputs) else (None,)
    attempts = [(sizes, False) for sizes in forms]
    while attempts:
        sizes, compiling = attempts.pop(0)
        recording = recordable(module, graded, compiling)
        given = UserWarnings()
        with quiet(given.keep), recording as plain, hooks.recorded(module, plain.begin):
            try:
                with python_state.watched(module, watch, plain.known.begin, plain.known.end):
                    program = torch.export.export(module, inputs, dynamic_shapes=sizes, strict=False)
                plain.unanswered.check()
                frozen_state = list(python_state.obstacles(module, inputs, watch, plain.draws))
                hooks.check_frozen(program, plain.frozen.names(plain.parameters))
                untrack(program.graph_module)
                with plain.paused():
                    program = program.run_decompositions(decompositions())
                hooks.enclose_hooks(program.graph_module)
                module_hooks.enclose(program.graph_module)
                gradients.enclose(program.graph_module)
                error = None
                break
            except NoLoss:
                raise
            except Exception as caught:  # anything the module's own code may raise while it is recorded
                error = error or caught
                if sizes is None or not symbols_stood_in_the_way(caught):
                    obstacles = obstacles or _obstacles_of(module, inputs, error, plain)
                    if compiling or not plain.asks_for_compilers:
                        break
                    attempts, asking = [(sizes, True) for sizes in forms], plain.asks_for_compilers[0]
                watch.restore()
                inputs = pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, inputs)  # without Dim.AUTO's marks
    if error is not None:
        ours = isinstance(error, (UserError, Unanswerable))  # torch would not fail
        fault = None if ours else _own_fault(module, inputs)
        if fault is not None:
            what = f"{type(fault).__name__}: {_first_line(fault)}"
            raise UnsupportedModel(_name(module), [Obstacle(what, exception_line(fault))], ADVICE_FAULT) from fault
        raise UnsupportedModel(_name(module), obstacles, _advice(error, obstacles)) from error
    if captured is not None:
        captured.update(plain.known.captured)
    if read is not None:
        read.update(plain.known.read)
    if left is not None:
        left.update(watch.names())
        left.note(watch.values())
    if compiling:
        _warn_once(module, f"{asking} asks for a compiler and is told yes: the other branch is not one program")
    for line in plain.known.checks:
        _warn_once(module, f"the check at {line} is taken as passed: values are not looked at in JAX")
    given.show(_TOLD.setdefault(getattr(module, "wrapped_module", module), set()))
    if frozen_state:
        raise UnsupportedModel(_name(module), merge(frozen_state), python_state.ADVICE_STATE)
    obstacles = [*_obstacles(program), *_written_parameters(program)]
    if obstacles:
        data = any("depends on" in obstacle.what for obstacle in obstacles)
        missing = any("no lowering" in obstacle.what for obstacle in obstacles)
        written = any(WRITTEN in obstacle.what for obstacle in obstacles)
        advice = "\n".join([ADVICE_OPERATORS] * missing + [ADVICE_DATA] * data + [ADVICE_WRITTEN] * written)
        raise UnsupportedModel(_name(module), merge(obstacles), advice)
    return program


def _advice(error: Exception, obstacles: list[Obstacle]) -> str:
    """Return advice on a module that could not be recorded."""
    if any("depends on" in obstacle.what for obstacle in obstacles):
        return ADVICE_DATA
    written = isinstance(error, NotImplementedError) or any(obstacle.what == NUMPY for obstacle in obstacles)
    return "" if written else ADVICE_RECORD  # its message contains the advice


def check_read(module: torch.nn.Module, read: Mapping[str, str], written: Collection[str]) -> None:
    """Raise UnsupportedModel if Python reads a buffer that some graph of the module writes, because the record would
    keep the number it read for ever. written: names of buffers, with or without the wrapper's prefix."""
    named = {name.removeprefix("wrapped_module."): line for name, line in read.items()}
    found = [
        Obstacle(f"Python reads a number out of the buffer {name}, which the forward changes", line)
        for name, line in named.items()
        if name in {target.removeprefix("wrapped_module.") for target in written}
    ]
    if found:
        raise UnsupportedModel(_name(module), found, ADVICE_DATA)


def _name(module) -> str:
    return type(getattr(module, "wrapped_module", module)).__name__


def _warn_once(module: torch.nn.Module, text: str) -> None:
    """Log a warning about the user's module once, however often the module is recorded."""
    told = _TOLD.setdefault(getattr(module, "wrapped_module", module), set())
    if text not in told:
        told.add(text)
        log.warning("%s: %s", _name(module), text)


def decompositions() -> dict[Any, Callable]:
    """Return torch's decomposition rules, except those for operators that the table lowers whole."""
    keep = (TABLE.keys() - _TAKEN_APART) | {_UNFOLD_WRITTEN}
    return {operator: rule for operator, rule in _torchs_rules().items() if str(operator) not in keep}


@functools.cache
def _torchs_rules() -> dict[Any, Callable]:
    return dict(torch.export.default_decompositions().items())  # torch collects them anew at each call


def _obstacles(program: torch.export.ExportedProgram):
    """Yield operators without a lowering, and values whose shape depends on the data."""
    for node, what in selections.obstacles(program.graph_module.graph):
        yield Obstacle(what, source_line(node.stack_trace), module_path(node))
    for graph_module in program.graph_module.modules():
        if not isinstance(graph_module, torch.fx.GraphModule):
            continue
        for node in graph_module.graph.nodes:
            if node.op != "call_function":
                continue
            name = str(node.target)
            if isinstance(node.target, torch._ops.OpOverload):
                given = set().union(*(_free_sizes(used.meta.get("val")) for used in node.all_input_nodes))
                strange = _strange_dtypes(node.meta.get("val"))
                inner = graph_module is not program.graph_module
                if strange:
                    what = f"{name} makes numbers of {strange}, which JAX does not have"
                elif inner and _free_sizes(node.meta.get("val")) - given:
                    what = f"the shape of {name}'s result depends on the values of a tensor"
                elif name == _UNFOLD_WRITTEN:
                    what = "a write through unfold() has no form in JAX: write to the tensor itself"
                elif name.startswith("aten.as_strided") and not in_order(node.args[0].meta["val"]):
                    what = f"{name} addresses the memory of a view: call .contiguous().clone() before it"
                elif name not in TABLE and name not in HIGHER_ORDER and not selections.makes(node):
                    what = f"{name} has no lowering"
                else:
                    continue
                yield Obstacle(what, source_line(node.stack_trace), module_path(node))
            elif isinstance(node.target, torch._ops.HigherOrderOperator) and name not in HIGHER_ORDER:
                yield Obstacle(f"{name} has no lowering", source_line(node.stack_trace), module_path(node))


def _written_parameters(program: torch.export.ExportedProgram):
    """Yield trained parameters that the forward pass writes: the optimizer holds them, so a functional step cannot
    write them. A parameter without gradient, such as a teacher's that follows the weights, counts as a buffer."""
    (output,) = (node for node in program.graph.nodes if node.op == "output")
    for spec, node in zip(program.graph_signature.output_specs, output.args[0], strict=True):
        if spec.kind == OutputKind.PARAMETER_MUTATION and program.state_dict[str(spec.target)].requires_grad:
            name = str(spec.target).removeprefix("wrapped_module.")
            yield Obstacle(f"{WRITTEN} {name}", source_line(node.stack_trace), module_path(node))


def _strange_dtypes(value: Any) -> str:
    values = value if isinstance(value, (tuple, list)) else [value]
    dtypes = (str(tensor.dtype) for tensor in values if isinstance(tensor, torch.Tensor))
    return next((name for name in dtypes if not known_dtype(name)), "")


def _free_sizes(value: Any) -> set:
    """Return the symbols in a value's shape that only the data determines."""
    if isinstance(value, (tuple, list)):
        return set().union(*map(_free_sizes, value))
    sizes = [size for size in getattr(value, "shape", ()) if isinstance(size, torch.SymInt)]
    return set().union(*map(torch.fx.experimental.symbolic_shapes.free_unbacked_symbols, sizes))


def _obstacles_of(module, inputs, error: Exception, plain: PlainFunctions) -> list[Obstacle]:
    """Return every reason that torch's draft export finds, or at least the one that stopped the export. plain: finds
    the lines at which Python asked for a number; torch's report misses some of them."""
    first = Obstacle(_reason(error, module), exception_line(error))
    reads = plain.reads
    reads.clear()
    try:
        watched = python_state.watched(module, python_state.Watch(module), plain.known.begin, plain.known.end)
        with watched, without_logging():
            draft = torch.export.draft_export(module, inputs, strict=False)
        report = draft._report
        found = []
        files = {number: name for name, number in INTERN_TABLE.items()} | report.str_to_filename
        for failure in report.failures:
            line = _failure_line(failure, files)
            if not line:
                known = {obstacle.where for obstacle in found}
                line = next((read for read in reads if read not in known), first.where)
            found.append(Obstacle(_failure(failure), line))
        known = {obstacle.where for obstacle in found}
        found += [Obstacle(DATA_DEPENDENT, read) for read in dict.fromkeys(reads) if read not in known]
        untrack(draft.graph_module)
        found += _obstacles(draft.run_decompositions(decompositions()))
    except Exception:
        return [first]
    return merge([obstacle for obstacle in found if obstacle.what]) or [first]


def _foreseen(module: torch.nn.Module, inputs: tuple) -> Obstacle | None:
    """Return what a large module does in torch that no graph can hold; None if it does nothing such."""
    inner = list(module.modules())
    functions = [value for value in vars(module).values() if callable(value)]
    if len(inner) < foreseen.MANY or not foreseen.reached(functions, inner):
        return None
    look = foreseen.Look()
    _own_fault(module, inputs, look.watching)
    return Obstacle(look.refusal, look.line) if look.refusal else None


def _own_fault(
    module: torch.nn.Module, inputs: tuple, watching: Callable[[list], Any] = lambda _: contextlib.nullcontext()
) -> Exception | None:
    """Return the error that a copy of the module raises when torch calls it; None if it runs. watching: returns a
    context for the call, of the copy's tensors and the inputs."""
    try:
        copied = copy.deepcopy(module)
    except Exception:  # what cannot be copied is not called: a call may change it
        return None
    inputs = pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, inputs)
    given = [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, torch.Tensor)]
    try:
        tensors = [*copied.parameters(), *copied.buffers(), *given]
        with quiet(), only_reading(), Untouched(tensors), watching(tensors):
            copied(*inputs)
    except WritesOutside:
        return None
    except Exception as error:
        return None if str(error) == WRITES_ELSEWHERE else error
    return None


def _first_line(error: Exception) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), "")[:300]


def _two_owners(module: torch.nn.Module) -> list[str]:
    """Return two names of one buffer that different modules have registered; an empty list if there are none."""
    names: dict[int, str] = {}
    for name, buffer in module.named_buffers(remove_duplicate=False):
        name = name.removeprefix("wrapped_module.")
        if names.setdefault(id(buffer), name) != name:
            return [names[id(buffer)], name]
    return []


def _reason(error: Exception, module: torch.nn.Module) -> str:
    twice = _two_owners(module)
    if isinstance(error, AssertionError) and twice:
        return (
            f"torch.export cannot record a forward pass that writes one buffer that is registered as {twice[0]} and as "
            f"{twice[1]}: register it once, and read it from there"
        )
    files = {frame.filename.replace("\\", "/") for frame in traceback.extract_tb(error.__traceback__)}
    if any(file.endswith(f"torch/_functorch/{name}.py") for file in files for name in ("apis", "eager_transforms")):
        return (
            "torch.export cannot record transforms of torch.func (vmap, grad, jacrev, ...) of a module: write "
            "torch.autograd.grad(..., create_graph=True) for gradients, and batched operators for vmap"
        )
    if isinstance(error, Untrained):
        return str(error)
    if isinstance(error, (UserError, Unanswerable)):
        return f"it cannot be recorded: {_first_line(error)}"
    text = f"{type(error).__name__}: {_first_line(error)}"
    if ".numpy() is not supported" in text:
        return NUMPY
    if "ata-dependent" in str(error) or "DataDependent" in text or "GuardOn" in text:
        return DATA_DEPENDENT
    return "it cannot be recorded" + ("" if speaks_of_internals(text) else f": {text}")


def _failure(failure) -> str:
    if failure.failure_type.name == "DATA_DEPENDENT_ERROR":
        return DATA_DEPENDENT
    if failure.failure_type.name == "MISSING_FAKE_KERNEL":
        return f"{failure.data.get('op')} does not say the shape of its result (torch's register_fake would)"
    return ""


def _failure_line(failure, files: dict[int, str]) -> str:
    """Return the line of user code; "" if the report has none. The report stores file names as numbers."""
    frames = [
        f'File "{files[frame["filename"]]}", line {frame["line"]}, in {frame["name"]}\n    {frame.get("loc") or ""}'
        for frame in failure.data.get("user_stack") or failure.data.get("stack") or ()
        if frame["filename"] in files
    ]
    return source_line("\n".join(frames), own=True)
