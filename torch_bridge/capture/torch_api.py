"""The part of torch's private capture API that this package uses, all of it in this file.

`check` compares what is installed with what is used; tests/unit/capture/test_torch_api.py calls it.
"""

import collections
import contextlib
import dis
import functools
import inspect
import itertools
import linecache
import logging
import os
import pathlib
import re
import sys
import sysconfig
import types
import warnings
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.exc import TorchDynamoException
from torch._dynamo.source import TempLocalSource
from torch._dynamo.symbolic_convert import InstructionTranslator, InstructionTranslatorBase
from torch._dynamo.variables.lists import DequeVariable
from torch._dynamo.variables.misc import RandomVariable
from torch._dynamo.variables.user_defined import UserDefinedClassVariable
from torch._functorch._aot_autograd import functional_utils
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensorMode
from torch.fx.experimental.proxy_tensor import make_fx, maybe_enable_thunkify
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.multiprocessing.reductions import StorageWeakRef

from jaxtrain.errors import UserError
from torch_bridge.capture import polyfills
from torch_bridge.lowering import errors

FIRST_TORCH = "2.13"  # the oldest torch that the tests cover

CAPTURE_ERRORS = (TorchDynamoException,)  # those by which Dynamo steers its own capture

Compiler = Callable[[torch.fx.GraphModule, Sequence[Any]], Callable[[list], list]]


def functional_graph(
    function: Callable, inputs: Sequence[Any], decompositions: dict
) -> tuple[torch.fx.GraphModule, list[int]]:
    """Return `function(*inputs)` as a functional ATen graph, and the positions of the inputs that it writes.

    inputs: fake or real tensors, and numbers. The graph's first outputs are the new values of the written inputs, then
    follow the results of `function`, a flat list of tensors and numbers. Nothing is executed, and the function is
    called once. Raises whatever the function raises on fake tensors, RuntimeError if it changes the shape of an input
    or writes to memory that two inputs share.
    """
    mode = torch._guards.detect_fake_mode(inputs) or FakeTensorMode(shape_env=ShapeEnv())
    fakes = [mode.from_tensor(value) if isinstance(value, torch.Tensor) else value for value in inputs]
    written: list[int] = []

    def functional(*arguments: Any) -> list:
        without_cpp = torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.Functionalize))
        with maybe_enable_thunkify(), without_cpp:
            held = [functional_utils.to_fun(argument) for argument in arguments]
            results = function(*held)
        for place, (value, before) in enumerate(zip(held, arguments, strict=True)):
            if isinstance(value, torch.Tensor) and functional_utils.has_data_mutation(value):
                written.append(place)
            if functional_utils.has_metadata_mutation(value, before, check_only_storage_mutation=False):
                raise RuntimeError("it changes the shape or the memory of an input")
        return [functional_utils.from_fun(value) for value in (*(held[place] for place in written), *results)]

    with contextlib.ExitStack() as stack:
        for context in (
            torch.no_grad(),
            torch.autograd.set_multithreading_enabled(False),
            mode,
            enable_python_dispatcher(),
            FunctionalTensorMode(export=True, _allow_token_discovery=True),
        ):
            stack.enter_context(context)
        graph = make_fx(functional, decomposition_table=decompositions, record_module_stack=True)(*fakes)
    _check_shared(fakes, written)
    if not any(str(node.target) == "with_effects" for node in graph.graph.nodes):  # a check that raises, say
        graph.graph.eliminate_dead_code()
        graph.recompile()
    return graph, written


def slopes_of(ends: Sequence[torch.Tensor], slopes: Sequence[torch.Tensor], leaves: Sequence[torch.Tensor]) -> list:
    """Return the gradients of leaves without any yet, None where there is none. The modes that are on see what hooks
    compute, which they do not under `torch.autograd.grad`, as it is a function that modes see."""
    engine: Any = torch.autograd.Variable._execution_engine
    if ends and leaves:
        engine.run_backward(
            tuple(ends), tuple(slopes), False, False, tuple(leaves), allow_unreachable=True, accumulate_grad=True
        )
    return [leaf.grad for leaf in leaves]


def _check_shared(fakes: Sequence[Any], written: Sequence[int]) -> None:
    memory = {
        i: StorageWeakRef(fake.untyped_storage()) for i, fake in enumerate(fakes) if isinstance(fake, torch.Tensor)
    }
    if any(list(memory.values()).count(memory[place]) > 1 for place in written):
        raise RuntimeError("it writes to memory that two of its inputs share")


def autograd_backend(forward: Compiler, backward: Compiler, inference: Compiler, decompositions: dict) -> Callable:
    """Return a backend of Dynamo: AOTAutograd's functional forward and backward graphs go to these compilers.

    Each compiler takes (graph, fake inputs) and returns a function of a list of tensors and numbers, which it empties,
    that returns the list of results. Graphs that need no gradient go to `inference`.
    """

    def reusable(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[[list], list]:
        context = TracingContext.try_get()
        if context is not None and context.fw_metadata is not None:
            context.fw_metadata.bw_donated_idxs = []  # what is saved for backward survives it: retain_graph works
        return _boxed(backward(graph, inputs))

    return aot_autograd(
        fw_compiler=lambda graph, inputs: _boxed(forward(graph, inputs)),
        bw_compiler=reusable,
        inference_compiler=lambda graph, inputs: _boxed(inference(graph, inputs)),
        decompositions=decompositions,
        partition_fn=min_cut_rematerialization_partition,
    )


def fixed_inputs() -> frozenset[int]:
    """Return the positions of a forward graph's inputs that are the same tensors at each call, parameters and buffers.
    Call it while the graph is compiled."""
    context = TracingContext.try_get()
    meta = None if context is None else context.fw_metadata
    return frozenset() if meta is None else frozenset(meta.static_input_indices)


def first_saved() -> int | None:
    """Return the position of the first of a forward graph's outputs that are kept for its backward graph; None if
    nothing is. Call it while the graph is compiled."""
    context = TracingContext.try_get()
    meta = None if context is None else context.fw_metadata
    return None if meta is None else meta.num_forward_returns + meta.num_outputs_rng_offset


def core_decompositions() -> dict:
    """Return torch's rules that take operators, those of backward passes too, apart into the core ATen operators."""
    return torch._decomp.core_aten_decompositions()


def reset() -> None:
    """Forget every graph that this process has captured."""
    torch._dynamo.reset()


@contextlib.contextmanager
def outside_capture() -> Iterator[None]:
    """Inside the context, tensors are real, and operators run, even while torch captures around it."""
    with torch._guards.tracing(None), torch.utils._python_dispatch._disable_current_modes():
        yield


class _QuietLoggers(set):
    """Methods of loggers that captured code may leave out: those of a level that the logger drops, and those that show
    a text once in a process (`warning_once` in transformers), which is shown while the code is captured.

    As the setting `ignore_logging_functions`, which Dynamo asks with `in`.
    """

    def __contains__(self, method: Any) -> bool:
        logger, function = getattr(method, "__self__", None), getattr(method, "__func__", None)
        if not isinstance(logger, logging.Logger):
            return False
        if isinstance(function, functools._lru_cache_wrapper):
            return _shown_once(method, sys._getframe(1).f_locals)
        level = logging.getLevelName(method.__name__.upper())
        if not isinstance(level, int) or logger.isEnabledFor(level):
            return False
        _silent_levels.append((logger, level))
        return True


def _shown_once(method: Callable, of_dynamo: dict[str, Any]) -> bool:
    """Call a logger's method with the arguments that Dynamo has for it; return False if they are no constants."""
    try:
        args = [value.as_python_constant() for value in of_dynamo["args"]]
        kwargs = {name: value.as_python_constant() for name, value in of_dynamo["kwargs"].items()}
    except (KeyError, NotImplementedError):
        return False
    method(*args, **kwargs)
    return True


_silent_levels: list[tuple[logging.Logger, int]] = []


def silent_levels() -> list[tuple[logging.Logger, int]]:
    """Return the loggers, with their levels, whose calls have been left out since the last call of this function."""
    levels = list(dict.fromkeys(_silent_levels))
    _silent_levels.clear()
    return levels


# What is asked of Dynamo wherever it captures. The four that are off leave out guards: hooks that are added later,
# parameters that become one object, tensors in a dict that looks the same, and exchanged __dunder__ methods would go
# unseen. An assert on a tensor's value would become an operator that nothing evaluates; numpy's draws would be torch's.
_GUARDED = {
    "skip_nnmodule_hook_guards": False,
    "skip_no_tensor_aliasing_guards_on_parameters": False,
    "skip_tensor_guards_with_matching_dict_tags": False,
    "assume_dunder_attributes_remain_unchanged": False,
    "rewrite_assert_with_torch_assert": False,
    "use_numpy_random_stream": True,
    "reorderable_logging_functions": set(),
    "ignore_logging_functions": _QuietLoggers(),
    "automatic_dynamic_local_pgo": False,  # nothing of an earlier process
    "allow_unspec_int_on_nn_module": True,
    "allow_rnn": True,
    "recompile_limit": 16,
}
# A compiled step is captured whole. Shapes that follow from values (x[mask]) are not captured: a record computes them
# without waiting for the device.
_WHOLE = {**_GUARDED, "capture_scalar_outputs": True, "trace_autograd_ops": True}
# What Dynamo fails to capture runs in torch, as code that it does not even try.
_IN_PIECES = {**_GUARDED, "trace_autograd_ops": True, "suppress_errors": True}
_number = itertools.count()


def whole(
    function: Callable,
    backend: Callable,
    failed: Callable[[str], None],
    guarded: Callable[[list[str]], None],
    **settings: Any,
) -> Callable:
    """Return a function that Dynamo captures whole, or not at all: it then raises before it has run anything.

    All three are methods, of which torch keeps weak references. backend: gets (graph, fake inputs) and returns what
    Dynamo calls for the graph. failed: gets the reason whenever the guards of a graph do not hold for a call. guarded:
    gets the guards of each graph, a line each, after its backend. Graphs are kept with a copy of the function's code.
    settings: of Dynamo, besides those of `_WHOLE`.
    """
    _prepare_dynamo()
    _shown.clear()
    backend, failed, guarded = map(_weakly, (backend, failed, guarded))
    optimize = torch._dynamo.optimize(
        backend,
        nopython=True,
        guard_fail_fn=lambda failure: failed(failure.reason),
        guard_export_fn=lambda guards: guarded([_line(guard) for guard in guards]),
    )
    captured = optimize(_copied(function))

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        with torch._dynamo.config.patch({**_WHOLE, **settings}):
            return captured(*args)

    return call


# A module's graph: every call computes the same, so what only prints may be left out, and `assert` is an operator.
OF_MODULES = {"rewrite_assert_with_torch_assert": True}


def printed_lines() -> list[str]:
    """Return the lines of the user's code being captured that print. Call it while the graph is compiled."""
    return [
        f"{code.co_filename}:{line}  {linecache.getline(code.co_filename, line).strip()}"
        for code in torch._guards.TracingContext.get_traced_code() or ()
        if "print" in code.co_names and _is_users_file(code.co_filename)
        for step in dis.get_instructions(code)
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME") and step.argval == "print"
        for line in [step.positions.lineno if step.positions else code.co_firstlineno]
        if line
    ]


def fixed_numbers() -> contextlib.AbstractContextManager:
    """Return a context in which a graph that is captured holds for the present numbers and sizes alone."""
    return torch._dynamo.config.patch(automatic_dynamic_shapes=False, specialize_int=True, specialize_float=True)


@contextlib.contextmanager
def free_sizes(values: Sequence[Any], axes: Sequence[Collection[int]] | None) -> Iterator[None]:
    """Inside the context, a graph that is captured holds for other sizes of these axes of the values, as far as the
    code allows; None: for the present sizes and numbers alone."""
    if axes is None:
        with fixed_numbers():
            yield
        return
    for value, free in zip(values, axes, strict=True):
        for axis in free:
            torch._dynamo.maybe_mark_dynamic(value, axis)
    with torch.fx.experimental._config.patch(use_duck_shape=False):  # equal sizes need not stay equal
        yield


def size_guards(environment: Any) -> tuple[dict[Any, tuple[Any, Any]], tuple[Any, ...]]:
    """Return what a graph assumes of the symbols in its sizes: ranges, and conditions. environment: where torch keeps
    its symbols; None if it has none. Which kernel torch would take for a convolution is no condition of the numbers."""
    if environment is None:
        return {}, ()
    ranges = {symbol: (bound.lower, bound.upper) for symbol, bound in environment.var_to_range.items()}
    conditions = []
    for guard in environment.guards:
        condition, place = environment.replace(guard.expr), guard.sloc.framework_loc
        if getattr(place, "name", "") == "conv" and getattr(place, "filename", "").endswith("fake_impls.py"):
            ranges |= {symbol: (2, ranges[symbol][1]) for symbol in condition.free_symbols if symbol in ranges}
        elif condition.free_symbols:
            conditions.append(condition)
    return ranges, tuple(conditions)


def in_pieces(module: torch.nn.Module, backend: Callable, failed: Callable[[str], None]) -> Callable:
    """Return a function that calls the module, with its hooks, and that Dynamo captures in as many graphs as it has to.

    What lies between the graphs, and what Dynamo cannot capture, runs in Python. backend, failed: as for `whole`.
    """
    _prepare_dynamo()
    backend, failed = map(_weakly, (backend, failed))
    optimize = torch._dynamo.optimize(backend, guard_fail_fn=lambda failure: failed(failure.reason))
    captured = optimize(_copied(_call))

    def call(*args: Any, **kwargs: Any) -> Any:
        with torch._dynamo.config.patch(_IN_PIECES):
            return captured(module, args, kwargs)

    return call


def _call(module: torch.nn.Module, args: tuple, kwargs: dict) -> Any:
    return module._call_impl(*args, **kwargs)


def _copied(function: types.FunctionType) -> Callable:
    """Return the function with code of its own, as Dynamo keeps graphs, and counts them, by the code."""
    code = function.__code__.replace(co_name=f"{function.__name__}_{next(_number)}")
    return types.FunctionType(code, function.__globals__, function.__name__, function.__defaults__)


def set_call(module: torch.nn.Module, call: Callable | None) -> None:
    """Let `module(...)` run this function, as `module.compile()` does; None restores torch's own call. Copies and
    pickles of the module do not have it."""
    module._compiled_call_impl = call


def call_of(module: torch.nn.Module) -> Callable | None:
    """Return what `set_call` or `module.compile()` has set; None for torch's own call."""
    return module._compiled_call_impl


def has_global_hooks() -> bool:
    """Return True while hooks for all modules are registered, which Dynamo does not guard."""
    return bool(torch.nn.modules.module._has_any_global_hook())


def run_in_python(reason: str) -> NoReturn:
    """Ask Dynamo, from its backend, to run the code that it has just captured in Python instead."""
    raise torch._dynamo.exc.SkipFrame(reason)


SILENT = "torch._dynamo.replayed"  # a name for code whose warnings `_prepare_dynamo` ignores, too


@functools.cache
def _prepare_dynamo() -> None:
    """Ignore what Dynamo advises about code that it does not capture: a compiled step tells it with the user's line.
    An error of its own, after which code runs in Python, becomes one line of the log. JAX is never captured: its C++
    methods would be called without their object."""
    for package in ("jax", "jaxlib"):
        torch._dynamo.trace_rules.add(package)
    polyfills.register()
    torch.compiler.substitute_in_graph(warnings.warn, skip_signature_check=True)(_warn)
    torch.compiler.substitute_in_graph(print, skip_signature_check=True)(_print)
    warnings.filterwarnings("ignore", category=UserWarning, module=r"torch\._dynamo\.")
    logging.getLogger("torch._dynamo.convert_frame").addFilter(_shorten)
    advice = logging.getLogger("torch._dynamo.variables.tensor")
    advice.addFilter(lambda record: "capture_scalar" not in str(record.msg))
    logging.getLogger("torch._subclasses.fake_tensor").addFilter(lambda record: record.exc_info is None)  # raised, too


def _print(*_: Any, **__: Any) -> None:
    """Stand for `print` in captured code: a module's graph leaves it out; else Python runs it."""
    if not torch._dynamo.config.rewrite_assert_with_torch_assert:  # not OF_MODULES
        torch._dynamo.graph_break("it prints (print after the step)")


def _warn(message: Any, category: Any = None, stacklevel: int = 1, source: Any = None, **_: Any) -> None:
    """Stand for `warnings.warn` in captured code: a step shows the warning while it captures; else Python runs it."""
    if not torch._dynamo.config.capture_scalar_outputs:  # not `whole`
        torch._dynamo.graph_break()
    _show_warning(message, category, stacklevel)


@torch.compiler.assume_constant_result
def _show_warning(message: Any, category: Any, stacklevel: int) -> None:
    """Show a warning of captured code once, with its line in the user's code. Dynamo calls this as it captures."""
    frames = [frame for frame in TracingContext.extract_stack() if not frame.filename.startswith(_OWN)]
    if not frames:
        return
    frame = frames[-min(max(stacklevel, 1), len(frames))]
    if (key := (str(message), category, frame.filename, frame.lineno or 1)) not in _shown:
        _shown.add(key)
        module = next((m for m in list(sys.modules.values()) if getattr(m, "__file__", None) == key[2]), None)
        registry = {} if module is None else vars(module).setdefault("__warningregistry__", {})
        name = "__main__" if module is None else module.__name__
        warnings.warn_explicit(message, category or UserWarning, key[2], key[3], name, registry)


_shown: set[tuple] = set()


def _shorten(record: logging.LogRecord) -> bool:
    if str(record.msg).startswith("torch._dynamo hit config.") and isinstance(record.args, tuple):
        guard, _, line = str(record.args[3]).partition(": ")[2].partition(" # ")
        logging.getLogger(__name__).warning(
            "%s forms of this code are compiled, and the next ones run in torch: %.80s changes (%.120s)",
            record.args[1],
            guard.strip(),
            line.partition(" # ")[0].strip(),
        )
        return False
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, Exception) and record.levelno == logging.WARNING and torch._dynamo.config.suppress_errors:
        why = str(cause_of(error)).strip().partition("\n")[0]
        named = (
            why if isinstance(error, torch._dynamo.exc.InternalTorchDynamoError) else f"{type(error).__name__}: {why}"
        )
        record.msg, record.args = "code runs in torch, as TorchDynamo fails on it: %s", (named,)
        if raised := _OF_TORCH.search(str(error)):  # a plain mistake, mostly: torch raises it itself
            record.msg, record.args = "code runs in torch, which may raise: %s: %s", raised.group("kind", "text")
        record.exc_info = record.exc_text = None
        text = record.getMessage()
        if text in _told:
            return False
        _told.add(text)
    return True


_told: set[str] = set()


_OF_TORCH = re.compile(r"with fake tensors: .*?: got (?P<kind>\w+)\((?P<quote>['\"])(?P<text>.*?)(?P=quote)", re.DOTALL)


def _weakly(method: Any) -> Callable:
    weak = weakref.WeakMethod(method)

    def call(*arguments: Any) -> Any:
        held: Any = weak()
        return None if held is None else held(*arguments)  # torch keeps guards longer than who asked for them

    return call


def _line(guard: Any) -> str:
    code = "; ".join(guard.code_list or ())
    return f"{guard.create_fn_name()} {guard.name}" + (f": {code}" if code else "")


def is_off() -> bool:
    """Return True if the process lets no function be captured: TORCHDYNAMO_DISABLE, torch.compiler.set_stance."""
    return torch._dynamo.config.disable or torch._dynamo.eval_frame._stance.stance != "default"


def real_inputs(graph: torch.fx.GraphModule) -> list[Any]:
    """Return the tensors and numbers that a graph of Dynamo's was captured with, while it is compiled."""
    nodes = [node for node in graph.graph.nodes if node.op == "placeholder"]
    return [getattr(node.meta.get("grapharg"), "example", None) for node in nodes]


def lost_writes() -> str:
    """Name an object that the code being captured changes, and whose changes Dynamo repeats wrongly; "" for none.
    Call it while the graph is compiled."""
    output = InstructionTranslator.current_tx().output
    for variable in _written(output):
        value = None if variable.source is None else _value_of(variable.source, output)
        if isinstance(variable, DequeVariable) and variable.source and getattr(value, "maxlen", 0) is not None:
            return "a deque with maxlen"  # taken for one without: an append to a full one drops nothing
        if isinstance(value, collections.OrderedDict):
            return "an OrderedDict"  # written as a dict, past its own order
        if isinstance(variable, RandomVariable):
            return "a random.Random"  # what it draws is a constant of the graph
    return ""


def stale() -> str:
    """Return what the code being captured does that Dynamo, and a record, compute with an old value of; "" for
    nothing. Call it while the graph is compiled."""
    output = InstructionTranslator.current_tx().output
    for variable in _written(output):
        if isinstance(variable, UserDefinedClassVariable):  # its objects would still show the old value
            return f"sets an attribute of the class {variable.value.__name__}"
    for guard in output.guards:
        if guard.name.endswith(".__wrapped__"):  # it would be called each time, with its effects
            function = _value_of(guard.originating_source, output)
            if isinstance(function, types.FunctionType) and "site-packages" not in function.__code__.co_filename:
                return f"calls {function.__name__}, whose results functools.cache keeps"
    return ""


def unguarded_line(symbolic: bool) -> str:
    """Return a line of the user's code being captured whose outcome Dynamo does not guard: an `except` clause, as a key
    may appear later, what reads the process's environment, a Function that asks for gradients that are None, and if
    sizes or integers may be `symbolic`, an `in`, which compares them wrongly. "" if there is none. Call it while the
    graph is compiled."""
    unguarded = {"CHECK_EXC_MATCH", "CONTAINS_OP"} if symbolic else {"CHECK_EXC_MATCH"}
    unguarded_names = {"environ", "environb", "getenv", "getenvb", "set_materialize_grads"}
    for code in torch._guards.TracingContext.get_traced_code() or ():
        if _is_users_file(code.co_filename):
            for step in dis.get_instructions(code):
                if step.opname in unguarded or (type(step.argval) is str and step.argval in unguarded_names):
                    line = step.positions.lineno if step.positions else code.co_firstlineno
                    return f"{code.co_filename}:{line}  {linecache.getline(code.co_filename, line or 1).strip()}"
    return ""


def keeps_padding(graph: torch.fx.Graph) -> str:
    """Name torch.nn.TransformerEncoder if the code being captured runs it in evaluation with a padding mask: torch then
    gives zeros at padding, but not while it captures. "" otherwise. Call it while the graph is compiled."""
    if torch.nn.TransformerEncoder.forward.__code__ in (torch._guards.TracingContext.get_traced_code() or ()):
        for node in graph.nodes:
            if node.target is torch._transformer_encoder_layer_fwd and node.args[-1] == _OF_KEYS:
                return "the zeros that torch.nn.TransformerEncoder gives at padding in evaluation"
    return ""


_OF_KEYS = 1  # the kind of a mask, as an argument of an encoder layer
_OWN = tuple(str(pathlib.Path(__file__).parents[2] / name) + os.sep for name in ("jaxtrain", "torch_bridge"))


def _is_users_file(file: str) -> bool:
    others = (sysconfig.get_path("stdlib"), "site-packages", "<frozen ", "<eval_with_key>", *_OWN)
    return not any(part in file for part in others)


def user_classes() -> set[type]:
    """Return the classes, and their bases, of the objects that the code being captured uses, except those of installed
    packages and of Python itself. Call it while its graph is compiled."""
    output = InstructionTranslator.current_tx().output
    guards = [guard for guard in output.guards if guard.create_fn_name() in ("TYPE_MATCH", "CLASS_MATCH", "ID_MATCH")]
    values = [_value_of(guard.originating_source, output) for guard in guards]
    kinds = {value if isinstance(value, type) else type(value) for value in values}
    return {base for kind in kinds for base in kind.__mro__ if _is_users(base)}


@functools.cache
def _is_users(kind: type) -> bool:
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return kind.__module__ == "__main__" or (file is not None and _is_users_file(file))


def absent_names() -> list[tuple[types.ModuleType, frozenset[str]]]:
    """Return the Python modules that the code being captured reads, each with the names in the code that it
    lacks: Dynamo guards an attribute of a module, but not that there is none. Call it while the graph is compiled."""
    output = InstructionTranslator.current_tx().output
    guards = [guard for guard in output.guards if guard.create_fn_name() == "MODULE_MATCH"]
    values = [_value_of(guard.originating_source, output) for guard in guards]
    modules = {id(value): value for value in values if isinstance(value, types.ModuleType)}
    named: set[str] = set()
    for code in torch._guards.TracingContext.get_traced_code() or ():
        named.update(code.co_names, (text for text in code.co_consts if isinstance(text, str)))
    return [(module, frozenset(named - vars(module).keys())) for module in modules.values()]


def hooked() -> str:
    """Return what the code being captured does if it registers a hook on a tensor; "" else. Call it while the graph is
    compiled."""
    return "hooks on tensors" if InstructionTranslator.current_tx().output.side_effects.tensor_hooks else ""


def written_objects() -> list[tuple[str, Any]]:
    """Return the objects that the code being captured changes, with Dynamo's names for them; those that it makes itself
    are left out. Call it while the graph is compiled."""
    output = InstructionTranslator.current_tx().output
    sources = (variable.source for variable in _written(output) if variable.source is not None)
    return [(source.name, _value_of(source, output)) for source in sources if not isinstance(source, TempLocalSource)]


def written_sources() -> set[str]:
    """Return the objects that the code being captured changes, as Dynamo's guards name them."""
    written = _written(InstructionTranslator.current_tx().output)
    sources = (variable.source for variable in written if variable.source is not None)
    return {source.name for source in sources if not isinstance(source, TempLocalSource)}  # made while it is captured


def _written(output: Any) -> list[Any]:
    effects = output.side_effects
    return [variable for variable in effects.id_to_variable.values() if effects.is_modified(variable)]


def _value_of(source: Any, output: Any) -> Any:
    try:
        return source.get_value({"G": output.global_scope, "L": output.local_scope}, {}, {})
    except Exception:  # an object that only Dynamo's own names lead to
        return None


def announce(capture: Callable[[], contextlib.AbstractContextManager]) -> None:
    """Enter this context whenever Dynamo begins to capture in this process, and leave it when that ends."""
    running = contextlib.ExitStack()
    torch._dynamo.callback.on_compile_start(lambda _: running.enter_context(capture()))
    torch._dynamo.callback.on_compile_end(lambda _: running.close())


def line_in(frame: types.FrameType | None) -> str:
    """Return the innermost line of user code that Dynamo has come to, in a thread with this frame; the innermost that
    runs, if Dynamo captures nothing there; "" for neither."""
    inner = frame
    while inner is not None:
        reader = inner.f_locals.get("self") if inner.f_code.co_filename == _READER else None
        # The thread that is watched may be making the reader: it has no code or line yet.
        code = getattr(reader, "f_code", None) if isinstance(reader, InstructionTranslatorBase) else None
        if code is not None and _is_users_file(code.co_filename):
            return errors.written_line(code, getattr(reader, "lineno", code.co_firstlineno))[:160].rstrip()
        inner = inner.f_back
    return errors.line_in(frame)


_READER = InstructionTranslator.__init__.__code__.co_filename


def user_stack(error: BaseException) -> str:
    """Return the user's frames that led to an error of Dynamo's, as a traceback prints them; "" if unknown."""
    stack = getattr(error, "real_stack", None)
    return "".join(stack.format()) if stack else ""


_OF_SYSTEM = re.compile(
    r"builtin `((?:posix|nt|_socket)\.\w+)|of class `(ContextVar)`|<built-in function (get_num_\w+)>"
)


def of_python(error: BaseException) -> str:
    """Return why Dynamo has not captured a call that only Python can run: it asks the operating system or the thread,
    whose answer may be another at each call, or a backward pass changes something in Python. "" for another reason."""
    if not isinstance(error, torch._dynamo.exc.Unsupported):
        return ""
    if "Unsafe side effect" in str(error):
        return "changes something in Python inside a checkpoint or a torch.autograd.Function"
    match = _OF_SYSTEM.search(str(error))
    return f"asks for {next(filter(None, match.groups()))}, whose answer may change from call to call" if match else ""


def is_limit(error: BaseException) -> bool:
    """Return True if Dynamo has captured as many graphs of one function as the settings allow."""
    return isinstance(error, torch._dynamo.exc.FailOnRecompileLimitHit)


def is_unsupported(error: BaseException) -> bool:
    """Return True if Dynamo has stopped at code that it does not capture."""
    return isinstance(cause_of(error), torch._dynamo.exc.Unsupported)


def asks_for_gradients(error: BaseException) -> bool:
    """Return True if code calls requires_grad_() where Dynamo does not capture that: on an input, or on what leads to a
    result."""
    return is_unsupported(error) and "requires_grad_()" in str(error)


def needs_numbers(error: BaseException) -> bool:
    """Return True if sizes that are symbols have kept Dynamo from capturing code."""
    return any(word in str(error) for word in ("SymInt", "symbolic", "Sym(", "does not guard"))


def cause_of(error: BaseException) -> BaseException:
    """Return the error of a backend that Dynamo has wrapped, or the error itself."""
    return getattr(error, "inner_exception", None) or error


def check() -> None:
    """Raise UserError, a sentence, if the installed torch lacks something that this file uses."""
    missing = (
        [] if "export" in inspect.signature(FunctionalTensorMode).parameters else ["FunctionalTensorMode(export=)"]
    )
    wanted = {
        "torch._guards.TracingContext": ("try_get",),
        "torch._functorch._aot_autograd.schemas.ViewAndMutationMeta": (
            "static_input_indices",
            "bw_donated_idxs",
            "num_forward_returns",
            "num_outputs_rng_offset",
        ),
        "torch._functorch._aot_autograd.functional_utils": ("to_fun", "from_fun", "has_data_mutation"),
        "torch._decomp": ("core_aten_decompositions",),
        "torch._dynamo.config": (*_WHOLE, *_IN_PIECES),
        "torch._dynamo.exc": ("FailOnRecompileLimitHit", "SkipFrame", "Unsupported"),
        "torch._dynamo.callback": ("on_compile_start", "on_compile_end"),
        "torch._dynamo.eval_frame": ("_stance",),
        "torch._dynamo.side_effects.SideEffects": ("is_modified",),
        "torch._dynamo.trace_rules": ("add",),
        "torch._dynamo.symbolic_convert.InstructionTranslator": ("current_tx", "step"),
        "torch._dynamo.variables.builder.GraphArg": ("example",),
        "torch.nn.modules.module": ("_has_any_global_hook",),
        "torch.nn.Module": ("_call_impl", "_compiled_call_impl"),
        "torch.utils._python_dispatch": ("_disable_current_modes",),
    }
    for path, names in wanted.items():
        holder: Any = torch
        for part in path.split(".")[1:]:
            holder = getattr(holder, part, None)
        computed = getattr(getattr(holder, "__post_init__", None), "__code__", None)
        fields = {*getattr(holder, "__dataclass_fields__", ()), *(computed.co_names if computed else ())}
        missing += [f"{path}.{name}" for name in names if not hasattr(holder, name) and name not in fields]
    if missing:
        raise UserError(
            f"torch {torch.__version__} has no {', '.join(missing)}: its capture API has changed, and "
            f"torch_bridge/capture/torch_api.py is written for torch {FIRST_TORCH}. Install that, or adapt the file"
        )


def _boxed(function: Callable[[list], list]) -> Callable[[list], list]:
    """Mark a function as one that takes its arguments as a list and empties it, so that memory is freed early."""

    def run(arguments: list) -> list:
        return function(arguments)

    run._boxed_call = True
    return run
