"""Patches of torch while a module is recorded: parts that branch on values or hide their work use plain operators."""

import builtins
import contextlib
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from torch_bridge.lowering.equal_masks import EqualMasks
from torch_bridge.lowering.errors import source_line
from torch_bridge.lowering.operators import printing
from torch_bridge.lowering.python.effects import only_reading
from torch_bridge.lowering.python.seeded_draws import Draws, Unseeded
from torch_bridge.lowering.recording import (
    batch_statistics,
    compiler_flags,
    data_sizes,
    gradients,
    hooks,
    module_hooks,
    packed_sequence,
    padded_encoder,
    plain_formulas,
    sequence_losses,
    shown_types,
)
from torch_bridge.lowering.recording.known_values import KnownValues
from torch_bridge.lowering.recording.unanswered import ASKED, READS, Unanswered
from torch_bridge.lowering.recording_lock import RECORDING_LOCK


@contextlib.contextmanager
def recordable(
    module: torch.nn.Module | None = None, graded: bool = True, compiling: bool = False
) -> Iterator["PlainFunctions"]:
    """Apply every patch of this file while active. Yields the PlainFunctions that note where Python reads numbers.

    module: the recorded one. graded: False if torch would call it without gradients. compiling: tell user code that a
    compiler is at work.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(RECORDING_LOCK)
        before = torch.backends.mha.get_fastpath_enabled()
        validates = torch.distributions.Distribution._validate_args
        # TransformerEncoder's inference kernel is one opaque operator; its layers use known ones.
        torch.backends.mha.set_fastpath_enabled(False)
        stack.callback(torch.backends.mha.set_fastpath_enabled, before)
        torch.distributions.Distribution.set_default_validate_args(False)
        stack.callback(torch.distributions.Distribution.set_default_validate_args, validates)
        _swap(stack, torch.nn.modules.transformer, "_detect_is_causal_mask", _is_causal)
        _swap(stack, torch.nn.modules.batchnorm._BatchNorm, "forward", batch_statistics.recorded_forward())
        _swap(stack, torch.nn.AdaptiveLogSoftmaxWithLoss, "forward", data_sizes.adaptive_log_softmax)
        _swap(stack, torch.nn.TransformerEncoder, "forward", padded_encoder.encoder(before, graded))
        packed_sequence.swap(stack, _swap)
        _swap(stack, torch.nn.Module, "named_buffers", _buffers_by_module)
        _swap(stack, torch.autograd.function.FunctionMeta, "__getattribute__", gradients.attribute)
        _swap(stack, torch.nn.modules.module, "BackwardHook", module_hooks.ModuleHook)
        _swap(stack, torch.inference_mode, "__enter__", _here(_enter_inference, torch.inference_mode.__enter__))
        _swap(stack, torch.inference_mode, "__exit__", _here(_leave_inference, torch.inference_mode.__exit__))
        _swap(stack, torch.autograd.graph.saved_tensors_hooks, "__enter__", _keep_saved)
        _swap(stack, torch.random, "default_generator", Unseeded(torch.random.default_generator, _seeded_by_torch))
        _swap(stack, torch.autograd.graph, "register_multi_grad_hook", _refuse_multi_grad_hook)
        stack.enter_context(from_numpy_takes_tensors())
        stack.enter_context(shown_types.as_in_torch())
        plain = stack.enter_context(PlainFunctions(module))
        plain.asks_for_compilers = stack.enter_context(compiler_flags.unseen_by_users(not compiling))
        stack.enter_context(only_reading())
        _swap(stack, builtins, "print", _recorded_print(plain.prints))
        _swap(stack, builtins, "max", _greater_or_less(builtins.max, torch.sym_max, torch.gt))
        _swap(stack, builtins, "min", _greater_or_less(builtins.min, torch.sym_min, torch.lt))
        _swap(stack, torch.SymInt, "__repr__", _size_text(plain.prints, torch.SymInt.__repr__))
        _swap(stack, torch.SymInt, "__format__", _size_text(plain.prints, torch.SymInt.__format__))
        for kind, name, read in plain.unanswered.reads():
            _swap(stack, kind, name, read)
        yield plain


@contextlib.contextmanager
def from_numpy_takes_tensors() -> Iterator[None]:
    """While active, torch.from_numpy takes tensors too: code that converts arrays may get a batch of tensors."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(RECORDING_LOCK)
        plain = torch.from_numpy
        _swap(stack, torch, "from_numpy", lambda x: x if isinstance(x, torch.Tensor) else plain(x))
        yield


def _swap(stack: contextlib.ExitStack, owner: Any, name: str, value: Any) -> None:
    if name in vars(owner):
        stack.callback(setattr, owner, name, vars(owner)[name])
    else:  # inherited
        stack.callback(delattr, owner, name)
    setattr(owner, name, value)


def _is_causal(mask, is_causal=None, size=None) -> bool:
    """Return `is_causal`; torch would read the mask's values, to choose a faster kernel if the mask is causal."""
    return is_causal is True


def _here(ours: Callable, theirs: Callable) -> Callable:
    """Return a method that calls `ours` on the recording thread and `theirs` on any other thread."""
    thread = threading.get_ident()
    return lambda self, *rest: (ours if threading.get_ident() == thread else theirs)(self, *rest)


def _enter_inference(self):
    """Enter no_grad; the other savings of inference mode have no use in a record."""
    self._no_grad = torch.set_grad_enabled(False) if self.mode else contextlib.nullcontext()
    self._no_grad.__enter__()


def _leave_inference(self, *error):
    self._no_grad.__exit__(*error)


_enter_saved = torch.autograd.graph.saved_tensors_hooks.__enter__


def _keep_saved(self):
    if type(self) is torch.autograd.graph.saved_tensors_hooks and not _from_torch(sys._getframe(1)):
        raise NotImplementedError(
            "saved_tensors_hooks changes what torch keeps for backward; JAX keeps its own: remove the hooks"
        )
    return _enter_saved(self)


_multi_grad_hook = torch.autograd.graph.register_multi_grad_hook


def _refuse_multi_grad_hook(*arguments, **options):
    if torch.autograd.graph.register_multi_grad_hook is _multi_grad_hook:
        return _multi_grad_hook(*arguments, **options)  # a library imported during a record kept this function
    raise NotImplementedError(
        "register_multi_grad_hook runs Python once several gradients are there; a compiled step would not do it"
    )


def _recorded_print(prints: printing.Prints):
    """Return a print that records for the module on this thread, and prints as usual for torch and other threads."""
    thread = threading.get_ident()

    def record(*arguments, **options):
        if threading.get_ident() != thread or _from_torch(sys._getframe(1)):
            return printing.builtins_print(*arguments, **options)
        return prints.print(*arguments, **options)

    return record


def _greater_or_less(plain: Callable, symbolic: Callable, beats: Callable) -> Callable:
    """Return max or min that also avoid a branch on values: `max(x[mask].shape[0], 1)`, `min(1.0, step / 100)` of a
    tensor."""

    def choose(*values, **options):
        two = len(values) == 2 and not options
        if two and any(type(value) is torch.SymInt and free_unbacked_symbols(value) for value in values):
            return symbolic(*values)
        if two and any(isinstance(value, torch.Tensor) and value.ndim == 0 for value in values):
            first, second = map(torch.as_tensor, values)
            return torch.where(beats(second, first), second, first)  # the first of two equal ones, as in Python
        return plain(*values, **options)

    return choose


def _size_text(prints: printing.Prints, plain: Callable) -> Callable:
    """Return a SymInt's `__repr__` or `__format__`. For the module's code it gives the digits, which fixes the size as
    int(size) does; for a size that depends on values, a mark for the number that it will be."""

    def text(size, how: str = ""):
        asker = _caller(sys._getframe(1))
        if asker.partition(".")[0] in ("torch", "torch_bridge") and asker != printing.__name__:
            return plain(size, *([how] if plain.__name__ == "__format__" else []))
        if not free_unbacked_symbols(size):
            return format(int(size), how)  # the text may be a key
        return prints.mark(torch.scalar_tensor(size, dtype=torch.int64), how)

    return text


def _buffers_by_module(self, prefix="", recurse=True, remove_duplicate=True):
    """Replace named_buffers; list a module of two names once, as torch.export cannot write a buffer known by two."""
    seen = set()
    for path, inner in self.named_modules(prefix=prefix) if recurse else [(prefix, self)]:
        for name, buffer in inner._buffers.items():
            if buffer is not None and not (remove_duplicate and id(buffer) in seen):
                seen.add(id(buffer))
                yield f"{path}.{name}" if path else name, buffer


class PlainFunctions(TorchFunctionMode):
    """Mode that replaces torch functions while a module is recorded. `.data` is the tensor without gradient;
    gaussian_nll_loss does not look for negative variances; a list of numbers read out of a tensor, `lengths.tolist()`,
    becomes a tensor again; backward hooks are recorded; masks that are computed twice select alike.

    reads: lines at which Python asked for a number, in order. parameters: those of the recorded module, by name.
    frozen: tensors on which requires_grad_(False) was called.
    """

    def __init__(self, module: torch.nn.Module | None = None):
        super().__init__()
        self.reads: list[str] = []
        self._paused = False
        self.unanswered = Unanswered()
        self.asks_for_compilers: list[str] = []  # lines
        self.known = KnownValues(module)
        self.masks = EqualMasks()
        self._aliases: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by id: a result of `.data`, and its owner
        self.parameters: dict[str, torch.Tensor] = {}
        self.frozen = hooks.Frozen()
        self.prints, self.draws = printing.Prints(), Draws()

    def begin(self, parameters: dict[str, torch.Tensor]) -> None:
        """Begin a call of the recorded module."""
        self.parameters, self.frozen, self.masks = parameters, hooks.Frozen(), EqualMasks()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Inside the context, replace nothing: torch works on a graph, and none of the user's code runs."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if self._paused:
            return function(*args, **(kwargs or {}))
        try:
            return self._call(function, args, kwargs or {})
        except Exception as error:
            self.unanswered.note(function, error)
            raise

    def _call(self, function, args, kwargs):
        if function in _SHOWS and _shown_by_module(sys._getframe(1)):
            return self.prints.mark(args[0], args[1] if function is torch.Tensor.__format__ else printing.WHOLE)
        if function in ASKED:
            value = self.known.value(args[0])
            if value is not None:
                with _disable_current_modes(), torch._C.DisableTorchFunction():
                    return function(value, *args[1:], **kwargs)
        if function in _EQUAL:
            if args[0] is args[1]:
                return True
            values = [value for tensor in args if (value := self.known.value(tensor)) is not None]
            if len(values) == len(args):
                with _disable_current_modes(), torch._C.DisableTorchFunction():
                    return torch.equal(*values)
        if function is torch.Tensor.__bool__ or function in _EQUAL:
            passed = self.known.passed(_user_frame(sys._getframe(1)))
            if passed is not None:
                return passed
        if function in READS and getattr(args[0], "constant", None) is None:
            self.reads.append(source_line("".join(traceback.format_stack())))
        if function in (torch.as_tensor, torch.tensor) and _holds_sizes(args, kwargs):
            return _made_of(*args, **kwargs)
        if function == _get_data:
            shown = args[0].detach()
            self._aliases[id(shown)] = (shown, args[0])
            return shown
        if function == _set_data and self._aliases.get(id(args[1]), (None, None))[1] is args[0]:
            return None  # x.data = x.data
        if function == _set_data and isinstance(args[1], torch.Tensor) and args[1].shape == args[0].shape:
            args[0].detach().copy_(args[1])
            return None
        if function in _ASKS and _by_module(sys._getframe(1)):
            return self.frozen.ask(args[0], kwargs.get("requires_grad", args[1] if len(args) > 1 else True))
        if function is torch.Tensor.register_hook:
            return self._register_hook(*args, **kwargs)
        if function is torch.Tensor.backward or (function == _get_grad_fn and not _from_torch(sys._getframe(1))):
            raise NotImplementedError(_NO_BACKWARD if function is torch.Tensor.backward else _NO_GRAD_FN)
        if function == _get_version and any(args[0] is parameter for parameter in self.parameters.values()):
            raise NotImplementedError("a parameter's _version counts what torch has written to it")
        if function is torch.Tensor.detach_:
            return args[0].copy_(args[0].detach())
        if function == _get_requires_grad and args[0] in self.frozen:
            return False
        if kwargs.get("generator") is not None:
            frame = sys._getframe(1)
            self.draws.note(kwargs["generator"], _user_frame(frame), _from_torch(frame))
        args, kwargs = self.frozen.seen((args, kwargs))
        if function is torch.autograd.grad:
            return gradients.grad(*args, **kwargs)
        if function is F.gaussian_nll_loss:
            return plain_formulas.gaussian_nll_loss(*args, **kwargs)
        args, kwargs = plain_formulas.with_long_classes(function, args, kwargs)
        args = self.masks.joined(function, args)
        if function in _PLAIN:
            return _PLAIN[function](*args, **kwargs)
        self.known.check_written(function, args, kwargs)
        result = function(*args, **kwargs)
        self.masks.note(function, args, kwargs, result)
        self.known.note(function, args, kwargs, result)
        return result

    def _register_hook(self, x, hook):
        if any(x is parameter for parameter in self.parameters.values()):
            raise NotImplementedError(
                "a backward hook that forward registers on a parameter is one more at every call: register it once, "
                "in __init__"
            )
        return hooks.register(x, hook)


_SHOWS = (torch.Tensor.__format__, torch.Tensor.__repr__)
_EQUAL = (torch.equal, torch.Tensor.equal)
_ASKS = (torch.Tensor.requires_grad_, torch.Tensor.requires_grad.__set__)
_NO_BACKWARD = (
    "backward() inside a forward pass fills .grad, which a compiled step does not have: use "
    "torch.autograd.grad(loss, inputs, create_graph=True)"
)
_NO_GRAD_FN = (
    "grad_fn is a node of torch's autograd, which JAX does not have: register a hook on the tensor itself "
    "(tensor.register_hook)"
)
_get_data, _set_data = torch.Tensor.data.__get__, torch.Tensor.data.__set__
_get_version = torch.Tensor._version.__get__
_get_requires_grad, _get_grad_fn = torch.Tensor.requires_grad.__get__, torch.Tensor.grad_fn.__get__


def _caller(frame) -> str:
    """Return the name of the Python module whose code made this call."""
    while frame.f_code.co_name == "__torch_function__":
        frame = frame.f_back
    return frame.f_globals.get("__name__", "")


def _user_frame(frame):
    """Return the frame whose code made this call, past this mode and torch's own Python."""
    while frame.f_code.co_name == "__torch_function__" or "/torch/" in frame.f_code.co_filename:
        frame = frame.f_back
    return frame


def _from_torch(frame) -> bool:
    """Return True if torch's own code made this call, rather than the module's."""
    return _caller(frame).partition(".")[0] == "torch"


_SEEDING = ("torch.random", "torch._compile", "torch._dynamo", "contextlib")


def _seeded_by_torch() -> bool:
    """Return True if torch's own code sets a seed or a state, past the functions of torch.random that do it."""
    frame = sys._getframe(2)
    while frame.f_globals.get("__name__", "").startswith(_SEEDING):
        frame = frame.f_back
    return _from_torch(frame)


def _holds_sizes(*given: Any) -> bool:
    """Return True if one of these nested values is a size that is a symbol."""
    return any(issubclass(type(x), torch.SymInt | torch.SymFloat) for x in pytree.tree_leaves(given))


def _made_of(data: Any, dtype: Any = None, device: Any = None, requires_grad: bool = False, **_: Any) -> torch.Tensor:
    """Make a tensor of nested numbers as torch.tensor does, some of which are such sizes."""
    real = any(isinstance(number, float | torch.SymFloat) for number in pytree.tree_leaves(data))
    made = _stacked(data, dtype or (torch.get_default_dtype() if real else torch.int64), device)
    return made.requires_grad_() if requires_grad else made


def _stacked(data: Any, dtype: torch.dtype, device: Any) -> torch.Tensor:
    if isinstance(data, list | tuple):
        return torch.stack([_stacked(item, dtype, device) for item in data])
    if isinstance(data, torch.SymInt | torch.SymFloat):
        return torch.scalar_tensor(cast(Any, data), dtype=dtype, device=device)
    return torch.full((), data, dtype=dtype, device=device)


def _shown_by_module(frame) -> bool:
    """Return True if the module's code asks for a tensor's text, rather than torch for a message."""
    while frame.f_code.co_name in ("__torch_function__", "handle_torch_function", "__format__", "__repr__"):
        frame = frame.f_back
    return not _from_torch(frame)


def _by_module(frame) -> bool:
    """Return True if the module's code made this call, directly or through torch.nn.Module.requires_grad_."""
    return not _from_torch(frame) or _caller(frame) == "torch.nn.modules.module"


_PLAIN = plain_formulas.REPLACED | {
    torch.logsumexp: data_sizes.logsumexp,
    torch.Tensor.logsumexp: data_sizes.logsumexp,
    torch.special.logsumexp: data_sizes.logsumexp,
    torch.combinations: data_sizes.combinations,
    torch.linalg.lstsq: data_sizes.lstsq,
    F.batch_norm: data_sizes.batch_norm,
    F.ctc_loss: sequence_losses.ctc_loss,
    torch.masked_select: sequence_losses.masked_select,
    torch.Tensor.masked_select: sequence_losses.masked_select,
}
