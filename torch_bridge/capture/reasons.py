"""Words for code that torch cannot capture: what the line does, and what to write instead."""

import re

from torch_bridge.capture import torch_api
from torch_bridge.lowering.errors import speaks_of_internals

_CALLED = (  # names, as torch writes them, and what a call of them does
    (r"print", "prints (print after the step)"),
    (r"str|repr|format|ascii", "makes a text of a tensor (do that after the step)"),
    (r"open|(io|posix)\.\w+", "reads or writes a file (do that outside of the loss)"),
    (r"input", "waits for the keyboard"),
    (r"(_?random\.|Random\.)\w+", "draws Python's random numbers (draw with torch.rand, or in the Dataset)"),
    (r"time\.\w+|perf_counter\w*|monotonic\w*|(datetime\.)?\w*now", "reads the clock (do that outside of the loss)"),
    (r"(pack|pad_packed|unpack|unpad)_\w*sequence", "packs sequences (give padded batches, and mask the loss)"),
    (r"saved_tensors_hooks|register_multi_grad_hook", "registers a hook of torch's autograd (do that between steps)"),
    (r"manual_seed|seed|set_rng_state", "sets the state of a random generator (do that outside of the loss)"),
)
_NAMES = (  # of a function, in torch's words
    r"builtin operator `(?P<name>[^`]+)`",
    r"trace the builtin `(?:<unknown module>\.)?(?P<name>[^`]+?)\.?`",
    r"marked that the function `(?P<name>[^`]+)`",
    r"trace method `(?P<name>[^`]+)` of class `(?P<kind>[^`]+)`",
)
_BRANCH = "a branch or shape depends on the values of a tensor (write torch.where, a mask or torch.cond)"
_HEADLINES = (  # the beginning of torch's words
    (r"[Dd]ata.dependent|Dynamic s(hape|licing)", _BRANCH),
    (r"tolist\(\)|\.item\(\)|nb_(int|float|index)|__trunc__|Concretization|concrete value|TracerBool", (
        "Python needs the value of a tensor (compute with the tensor, or do it after the step)"
    )),
    (r"numpy\.random|RandomState", "it draws numpy's random numbers (draw with torch.rand, or in the Dataset)"),
    (r"sparse", "it makes a sparse tensor, which JAX has not"),
    (r"NestedTensor|_nested_tensor", "it makes a nested tensor, which JAX has not"),
    (r"requires_grad=True", "it makes a tensor with requires_grad=True (call requires_grad_() on one of the batch)"),
    (r"requires_grad_\(\)", "it changes requires_grad of a tensor (do that between steps)"),
    (r"copy\.deepcopy", "it copies a tensor or a module by copy.deepcopy (take tensor.clone())"),
    (r"grad_fn", "it reads grad_fn, a node of torch's autograd (use torch.autograd.grad, or tensor.register_hook)"),
    (r"(Custom|backward).*hook|register_hook|hook removal|RemovableHandle", (
        "it registers or removes a hook (do that between steps)"
    )),
    (r"to proxy|torch\.Generator", "it draws with a torch.Generator (leave generator= out: a run has its own seed)"),
    (r"\.data\b|data attribute", "it replaces the data of a tensor (write tensor.copy_() under torch.no_grad())"),
    (r"generator", "it makes or resumes a generator (write a loop or a list)"),
    (r"recompile.limit", "it needs a graph for nearly every call, as what it reads in Python changes"),
)  # fmt: skip
_OPERATOR = re.compile(r"unsupported operator: (?:aten\.)?(?P<name>\w+)")
_RAISED = re.compile(r"raised exception (?P<kind>[\w.]+)\((?:(?P<quote>['\"])(?P<text>.*?)(?P=quote))?\)?")

# What user code raises while torch reads it.
_OF_USER = re.compile(r"(?!Assertion|Key|Attribute|Type)[A-Z]\w*(Error|Exception): ")


def reason_of(error: BaseException) -> str:
    """Return what stopped the capture of a line, where torch's or JAX's own words are about their capture; "" else."""
    text, stopped = str(error), isinstance(error, torch_api.CAPTURE_ERRORS)
    headline = text.strip().partition("\n")[0]
    if stopped and (raised := _RAISED.search(text)):
        said = (raised["text"] or "").encode().decode("unicode_escape")
        return f"it raises {raised['kind']}" + (f": {said}" if said else "")
    if stopped and re.search(r"(nll_loss|cross_entropy) .*torch\.uint8", text):
        return "it takes class ids of uint8, which TorchDynamo does not trace (write target.long())"
    if stopped and (ours := re.search(r"it prints \(print after the step\)", text)):
        return ours[0]
    for pattern in _NAMES if stopped else ():
        if called := re.search(pattern, text):
            return _of_call(called["name"], called.groupdict().get("kind"))
    for pattern, words in _HEADLINES:
        if re.search(pattern, headline):
            return words
    if stopped and (operator := _OPERATOR.search(text)):
        return _HEADLINES[4][1] if "nested" in operator["name"] else f"torch cannot capture {operator['name']}"
    internal = isinstance(error, AssertionError | KeyError | AttributeError) and "fake" in text.lower()
    if internal:
        return "TorchDynamo fails on it"
    if stopped and _OF_USER.match(headline) and not speaks_of_internals(headline):
        return headline
    return "TorchDynamo does not capture it" if stopped or "Tracer" in headline else ""


def stopped_by(error: BaseException) -> str:
    """Return what stopped a capture: `reason_of`, or the first line of the error's own words."""
    return reason_of(error) or str(error).strip().partition("\n")[0] or type(error).__name__


def _of_call(name: str, kind: str | None) -> str:
    for pattern, words in _CALLED:
        if re.fullmatch(pattern, name):
            return f"it {words}"
    shown = name if kind is None else kind if name == "__call__" else f"{kind}.{name}"
    return f"it calls {shown}, which TorchDynamo does not capture"
