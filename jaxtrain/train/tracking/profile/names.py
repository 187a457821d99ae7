"""Find, for each instruction of a compiled step, its module, its kind, and if it belongs to the backward pass."""

import dataclasses
import re

from jaxtrain.nn import scopes
from jaxtrain.runtime.collectives import KINDS as COLLECTIVES
from jaxtrain.runtime.hlo import Instruction, Program

MATMUL, ATTENTION, ELEMENTWISE, COPIES, COLLECTIVE = "matmul", "attention", "elementwise", "copies", "collectives"
KINDS = (MATMUL, ATTENTION, ELEMENTWISE, COPIES, COLLECTIVE)
CONTAINERS = ("while", "conditional")  # their time is that of the instructions inside them
OUTSIDE = "(outside of modules)"
OF_LIBRARIES = "(kernels of libraries)"
_MOVES = {
    "copy", "copy-start", "copy-done", "transpose", "reshape", "broadcast", "slice", "dynamic-slice", "concatenate",
    "dynamic-update-slice", "pad", "reverse", "gather", "parameter", "constant", "bitcast", "tuple",
    "get-tuple-element", "iota", "convert", "async-start", "async-done",
}  # fmt: skip
_PRODUCTS = {"dot", "convolution", "ragged-dot"}
_PRODUCT_CALLS = re.compile(r"gemm|matmul|cublas|conv|dot|onednn", re.IGNORECASE)
_FUSED_ATTENTION = re.compile(r"fmha|flash|mha|dropped_attention", re.IGNORECASE)
_LIBRARY_KERNELS = {  # patterns of kernel names of cuBLAS, cuDNN, CUTLASS, NCCL and CUDA
    COLLECTIVE: re.compile(r"nccl", re.IGNORECASE),
    ATTENTION: re.compile(r"fmha|flash|mha|sdpa|dropped_attention", re.IGNORECASE),
    MATMUL: re.compile(r"nvjet|gemm|gemv|cutlass|cublas|xmma|splitk|conv|winograd|dgrad|wgrad", re.IGNORECASE),
    COPIES: re.compile(r"memcpy|memset", re.IGNORECASE),
}


@dataclasses.dataclass(frozen=True)
class Origin:
    """Origin of an instruction. module: its path, with layer numbers."""

    module: str
    kind: str
    backward: bool
    fused_attention: bool = False
    container: bool = False


def origins(text: str) -> tuple[str, dict[str, Origin]]:
    """Return the name of a compiled program, and the origin of each of its instructions, parsed from its text. Origins
    are also listed under kernel names, because a trace has only these for what runs in a CUDA graph."""
    program = Program(text)
    name = re.match(r"HloModule ([\w.\-]+)", text)
    found = {}
    for computation in program.computations.values():
        for instruction in computation.values():
            found[instruction.name] = _origin(program, instruction)
    kernels = {re.sub(r"[.\-]", "_", name): origin for name, origin in found.items()}
    return name.group(1) if name else "", kernels | found


def of_kernel(name: str) -> Origin:
    """Return the origin of a kernel that belongs to no known instruction, guessed from the kernel's name."""
    kinds = (kind for kind, pattern in _LIBRARY_KERNELS.items() if pattern.search(name))
    kind = next(kinds, ELEMENTWISE)
    return Origin(OF_LIBRARIES, kind, False, kind == ATTENTION)


def _origin(program: Program, instruction: Instruction) -> Origin:
    inner = list(program.called(instruction).values()) or list(program.called(instruction, "to_apply").values())
    names = [instruction.op_name, *(part.op_name for part in reversed(inner))]
    own = next((name for name in names if _deepest(name)), names[0])
    text, target = instruction.text, instruction.attribute("custom_call_target")
    fused = bool(_FUSED_ATTENTION.search(target))
    opcodes = {instruction.opcode, *(part.opcode for part in inner)} - {"fusion", "call"}
    base = instruction.opcode.removesuffix("-start").removesuffix("-done")
    if base in COLLECTIVES:
        kind = COLLECTIVE
    elif fused or scopes.ATTENTION in own:
        kind = ATTENTION
    elif opcodes & _PRODUCTS or _PRODUCT_CALLS.search(target) or "__triton_gemm" in text:
        kind = MATMUL
    else:
        kind = COPIES if opcodes <= _MOVES else ELEMENTWISE
    container = instruction.opcode in CONTAINERS
    return Origin(_deepest(own) or OUTSIDE, kind, "transpose(" in own, fused, container)


def _deepest(op_name: str) -> str:
    """Return the innermost module of an operation's name; "" if there is none. For example,
    "jit(step)/transpose(jvp(encoder.layer.0))/encoder.layer.0.norm/mul" -> "encoder.layer.0.norm"."""
    for part in reversed(op_name.split("/")):
        bare = part.rpartition("(")[2].rstrip(")")
        if bare in scopes.opened and bare != scopes.ATTENTION:
            return bare
    return ""
