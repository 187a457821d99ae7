"""Predict the time of a compiled program on a GPU, kernel by kernel, from its text; no GPU needed.

A kernel's time is the longer of its products at the rate that tensor cores reach and its bytes at the bandwidth that
memory reaches, at least 2 us; between kernels there are gaps. Totals are accurate to about a quarter either way: they
ignore what a GPU's own choice of kernels gains. One has been measured: 21.1 ms of the fMRI autoencoder's step on an
H200.
"""

import collections
import dataclasses
import math
import re
from collections.abc import Iterator

from jaxtrain.runtime.collectives import BYTES, KINDS
from jaxtrain.runtime.hlo import Computation, Instruction, Program

GAP_S, GAP_OUTSIDE_S = 0.8e-6, 3e-6  # between kernels in a CUDA graph, and around those that run outside of one
LEAST_S, SYNC_S = 2e-6, 12e-6  # shortest kernel; time of the host to read a loop's or branch's condition
# Fractions of the data sheet's peaks. memory: from a trace of the fMRI autoencoder's step on one H200, where reductions
# reach 0.94, products of few rows 0.8 to 0.9, and optimizer, casts and pads 0.88 to 0.90.
REACHED = {"half": 0.8, "single": 0.8, "memory": 0.93, "link": 0.8}
COPIED = 0.95  # fraction of the reached bandwidth, for kernels that are not one long copy
FUSED_ATTENTION = {"forward": 0.55, "backward": 0.45, "triton": 0.35}  # fractions of the reached rate
INTEGER_SHARE = 2.0  # 32-bit integer operations take this many times as long as float ones outside tensor cores
FREE = {
    "parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all", "opt-barrier", "partition-id",
    "replica-id", "add-dependency",
}  # fmt: skip
ENDS = ("-done", "-update")
FUNCTIONS = {
    "exponential": 8, "log": 10, "log-plus-one": 14, "exponential-minus-one": 14, "tanh": 12, "logistic": 12, "erf": 24,
    "power": 30, "rsqrt": 6, "sqrt": 8, "divide": 8, "cosine": 20, "sine": 20, "remainder": 12,
}  # fmt: skip
NO_WORK = {
    "shift-left", "or", "parameter", "constant", "bitcast", "tuple", "broadcast", "get-tuple-element", "iota",
    "reshape",
}  # fmt: skip
TILES = ((128, 256, 1.0), (256, 128, 1.0), (128, 128, 0.9), (64, 128, 0.75), (128, 64, 0.75), (64, 64, 0.55))


@dataclasses.dataclass(frozen=True)
class Card:
    """Peaks of one GPU. half, single: FLOP/s of its tensor cores. plain: FLOP/s of its other units. memory: B/s. link:
    B/s of NVLink or PCIe in one direction."""

    half: float
    single: float
    plain: float
    memory: float
    link: float
    cores: int

    def rate(self, dtype: str) -> float:
        if dtype in ("bf16", "f16"):
            return self.half * REACHED["half"]
        if dtype.startswith("f8"):
            return 2 * self.half * REACHED["half"]
        return self.single * REACHED["single"] if dtype == "f32" else self.plain


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A kernel, or a group of launches. kind: "product", "elementwise", ... count: executions per call. flops, size:
    per execution; size is bytes read and written. seconds: per launch, without gaps. gap: seconds after each launch.
    launches: kernels per execution."""

    kind: str
    dtype: str
    shape: str
    source: str
    count: int
    flops: float
    size: int
    seconds: float
    gap: float = GAP_S
    launches: int = 1

    @property
    def total(self) -> float:
        """Seconds per call of the program, gaps included."""
        return self.count * self.launches * (self.seconds + self.gap)


@dataclasses.dataclass(frozen=True)
class Prediction:
    """Prediction for one optimizer step on each device. compute_s: time of its kernels. sending_s: time of its
    collectives, which overlap with the kernels. step_s: the longer of the two. launches: number of kernels. dearest:
    see `dearest`."""

    compute_s: float
    sending_s: float
    launches: int
    dearest: list[dict]

    @property
    def step_s(self) -> float:
        return max(self.compute_s, self.sending_s)


def predict(text: str, card: Card, sent: int, steps: int = 1, count: int = 10) -> Prediction:
    """Predict the time of one step from the text of a program that makes `steps` of them. sent: bytes that a device
    sends in all steps. count: number of most expensive kernels to list."""
    found = kernels(Program(text), card)
    launches = sum(kernel.count * kernel.launches for kernel in found) // steps
    of_one = lambda row: row | {name: row[name] / steps for name in ("launches", "ms", "flops", "bytes")}
    rows = [of_one(row) for row in dearest(found, count)]
    return Prediction(seconds(found) / steps, sent / steps / (card.link * REACHED["link"]), launches, rows)


def kernels(program: Program, card: Card) -> list[Kernel]:
    """List the kernels that a call of the program launches; loops are counted by their length."""
    return list(_walk(program, card, program.entry, 1))


def seconds(found: list[Kernel]) -> float:
    """Return the seconds of a call, without collectives."""
    return sum(kernel.total for kernel in found)


def dearest(found: list[Kernel], count: int) -> list[dict]:
    """Merge kernels of the same kind, dtype, shape and source line; return the `count` most expensive, in order."""
    merged: dict[tuple, list] = collections.defaultdict(lambda: [0, 0.0, 0.0, 0])
    for kernel in found:
        entry = merged[kernel.kind, kernel.dtype, kernel.shape, kernel.source]
        entry[0] += kernel.count * kernel.launches
        entry[1] += kernel.total
        entry[2] += kernel.count * kernel.flops
        entry[3] += kernel.count * kernel.size
    rows = sorted(merged.items(), key=lambda item: -item[1][1])[:count]
    return [
        {"kind": f"{kind} {dtype}".strip(), "shape": shape, "source": source, "launches": number, "ms": total * 1e3,
         "flops": flops, "bytes": size}
        for (kind, dtype, shape, source), (number, total, flops, size) in rows
    ]  # fmt: skip


def _walk(program: Program, card: Card, computation: str, times: int) -> Iterator[Kernel]:
    instructions = program.computations[computation]
    for each in instructions.values():
        opcode = each.opcode
        if opcode in FREE or opcode.endswith(ENDS) or opcode.removesuffix("-start") in KINDS:
            continue
        if opcode == "while":
            known = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', each.text)
            turns = int(known.group(1)) if known else 1
            yield from _walk(program, card, each.attribute("body"), times * turns)
            control = 0.0 if known else SYNC_S
            yield Kernel("loop", "", "", program.source(each), times * (turns + 1), 0, 0, control)
        elif opcode == "conditional":
            yield Kernel("branch, arms not counted", "", "", program.source(each), times, 0, 0, SYNC_S)
        elif opcode in ("call", "async-start"):
            inner = each.attribute("to_apply") or each.attribute("calls")
            yield from _walk(program, card, inner, times)
        else:
            yield _kernel(program, card, each, instructions, times)


def _kernel(program: Program, card: Card, each: Instruction, near: Computation, times: int) -> Kernel:
    read = sum(near[name].size for name in each.operands if name in near)
    kind, dtype, flops, size, efficiency, extra = "other", "", 0.0, read + each.size, 1.0, 0.0
    launches, gap, shape = 1, GAP_S, _text(each)
    target = each.attribute("custom_call_target")
    if target.startswith("__cublas"):
        kind, (flops, dtype, dims, size) = "product", _product(each, near)
        efficiency, shape = max(0.05, 0.95 * _filled(*dims, card.cores)), "x".join(map(str, dims))
    elif "$conv" in target:
        kind, (flops, dtype), efficiency, gap = "convolution", _convolution(each, near), 0.5, GAP_OUTSIDE_S
    elif "fmha" in target:
        kind, (flops, dtype) = "fused attention", _fused_attention(each)
        efficiency = FUSED_ATTENTION["backward" if "Backward" in target else "forward"]
    elif target.endswith("triton") and "dropped_attention" in each.op_name:
        kind, (flops, dtype, scores) = "fused attention with dropout", _dropped_attention(each, near)
        efficiency, extra = FUSED_ATTENTION["triton"], scores * 10 * INTEGER_SHARE / (card.plain / 2)
    elif (sort := _sort_of(program, each)) is not None:
        kind, launches = "sort", _sort_passes(sort)
        size = 2 * launches * sort.size
    elif each.opcode == "fusion":
        body = program.called(each)
        kind, size, extra = _fusion_kind(body), _fusion_size(body), _work(body) / (card.plain / 2) / 0.7
        if kind == "product in a fusion":
            flops, dtype = _dots(body)
    elif each.opcode in ("copy", "transpose", "copy-start"):
        kind = "copy"
    fast, slow = flops / card.rate(dtype) / efficiency, size / (card.memory * REACHED["memory"] * COPIED)
    if kind == "fused attention with dropout":
        fast, extra = fast + extra, 0.0
    spent = max(fast, slow, extra, LEAST_S * launches)
    return Kernel(kind, dtype, shape, program.source(each), times, flops, size, spent / launches, gap, launches)


def _text(each: Instruction) -> str:
    return " ".join(f"{dtype}[{','.join(map(str, dims))}]" for dtype, dims in each.shapes[:2])


def _sort_of(program: Program, each: Instruction) -> Instruction | None:
    """Return the instruction if it is a sort, or the sort inside a fusion; else None."""
    if each.opcode == "sort":
        return each
    return _inner(program, each, "sort") if each.opcode == "fusion" else None


def _inner(program: Program, fusion: Instruction, opcode: str) -> Instruction | None:
    return next((each for each in program.called(fusion).values() if each.opcode == opcode), None)


# --- products ---------------------------------------------------------------------------------------------------------


def _product(each: Instruction, near: Computation):
    """Return FLOPs, dtype, (batch, m, n, k) and bytes of a cuBLAS call."""
    (dtype, left), (_, right) = (near[name].shapes[0] for name in each.operands[:2])
    numbers = {
        name: [int(n) for n in re.findall(r"\d+", value)]
        for name, value in re.findall(r'"(lhs_contracting_dimensions|lhs_batch_dimensions)":\s*\[([^\]]*)\]', each.text)
    }
    of = lambda name: math.prod(left[axis] for axis in numbers.get(name, []))
    k, batch = of("lhs_contracting_dimensions"), of("lhs_batch_dimensions")
    m, n = math.prod(left) // (k * batch), math.prod(right) // (k * batch)
    results = [shape for shape in each.shapes if shape[0] != "s8" or len(each.shapes) == 1]  # int8: workspace
    written = sum(BYTES[kind] * math.prod(dims) for kind, dims in results)
    size = written + sum(near[name].size for name in each.operands if name in near)
    return 2.0 * batch * m * n * k, dtype, (batch, m, n, k), size


def _filled(batch: int, m: int, n: int, k: int, cores: int) -> float:
    """Return the fraction of the cores' time that a product uses, for the best of a few tile sizes and splits of k."""
    best = 0.0
    for cuts, quality in ((1, 1.0), (2, 0.93), (3, 0.9), (4, 0.87), (8, 0.8)):
        if cuts > 1 and k // cuts < 1024:
            continue
        for rows, columns, tile_quality in TILES:
            tiles = batch * cuts * math.ceil(m / rows) * math.ceil(n / columns)
            inside = batch * cuts * m * n / (tiles * rows * columns)
            best = max(best, quality * tile_quality * inside * tiles / (math.ceil(tiles / cores) * cores))
    return best


def _convolution(each: Instruction, near: Computation):
    _, kernel_axes, _ = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", each.text).groups()
    (dtype, left), (_, right) = (near[name].shapes[0] for name in each.operands[:2])
    result = each.shapes[0][1]
    target = each.attribute("custom_call_target")
    kernel, outputs = (right, result)
    if "BackwardFilter" in target:
        kernel, outputs = result, right
    elif "BackwardInput" in target:
        kernel, outputs = right, left
    return 2.0 * math.prod(outputs) * math.prod(kernel) / max(1, kernel[kernel_axes.index("o")]), dtype


def _fused_attention(each: Instruction):
    dims = re.search(r'"intermediate_tensor_shape".*?"dimensions":\s*\[([^\]]*)\]', each.text)
    scores = math.prod(int(n) for n in re.findall(r"\d+", dims.group(1)))
    dtype, shape = each.shapes[0]
    products = 5 if "Backward" in each.attribute("custom_call_target") else 2
    causal = 0.5 if re.search(r'"mask_type":\s*"(PADDING_)?CAUSAL"', each.text) else 1.0
    return 2.0 * products * scores * shape[-1] * causal, dtype


def _dropped_attention(each: Instruction, near: Computation):
    """Return FLOPs, dtype and number of scores of a kernel of jaxtrain.nn.dropped_attention."""
    (dtype, query), (_, key) = (near[name].shapes[0] for name in each.operands[5:7])
    batch, queries, heads, width = query
    scores = batch * heads * queries * key[1]
    products = 2 if "forward" in each.op_name else 2 + len(each.shapes)
    return 2.0 * products * scores * width, dtype, scores


def _dots(body: Computation):
    flops, dtype = 0.0, ""
    for each in body.values():
        if each.opcode == "dot":
            dtype, left = body[each.operands[0]].shapes[0]
            contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", each.text).group(1)
            flops += 2.0 * each.elements * math.prod(left[int(axis)] for axis in contracted.split(",") if axis)
    return flops, dtype


# --- everything else --------------------------------------------------------------------------------------------------


def _sort_passes(sort: Instruction) -> int:
    """Return the number of launches of XLA's bitonic sort: one kernel sorts up to 2^12 elements."""
    along = int(re.search(r"dimensions=\{(\d+)\}", sort.text).group(1))
    beyond = max(0, math.ceil(math.log2(max(2, sort.shapes[0][1][along]))) - 12)
    return beyond * (beyond + 1) // 2 + beyond or 1


def _fusion_kind(body: Computation) -> str:
    opcodes = {each.opcode for each in body.values()}
    plain = opcodes - {"parameter", "constant", "bitcast", "tuple", "broadcast"}
    if "dot" in opcodes:
        return "product in a fusion"
    if "scatter" in opcodes:
        return "scatter"
    if plain <= {"copy", "transpose", "reshape"}:
        return "copy"
    if plain <= {"convert", "copy", "transpose", "reshape", "slice"}:
        return "cast"
    if plain <= {
        "slice",
        "concatenate",
        "pad",
        "dynamic-slice",
        "dynamic-update-slice",
        "convert",
        "copy",
        "transpose",
    }:
        return "cut or join"
    return "reduction" if "reduce" in opcodes else "elementwise"


def _fusion_size(body: Computation) -> int:
    """Return bytes read and written; slices, gathers and in-place updates count only the elements they touch."""
    users: dict[str, list[tuple[Instruction, int]]] = collections.defaultdict(list)
    for each in body.values():
        for place, operand in enumerate(each.operands):
            users[operand].append((each, place))

    def touched(name: str, whole: int, depth: int = 0) -> int:
        total = 0
        for user, place in users[name]:
            if user.opcode in ("slice", "dynamic-slice", "gather") and place == 0:
                total += user.size
            elif user.opcode in ("dynamic-update-slice", "scatter") and place == 0:
                continue
            elif user.opcode in ("bitcast", "copy", "convert", "reshape") and depth < 4:
                total += touched(user.name, whole, depth + 1)
            else:
                return whole
        return min(whole, total)

    read = sum(touched(each.name, each.size) for each in body.values() if each.opcode == "parameter")
    root = next((each for each in body.values() if each.is_root), None)
    results = [] if root is None else [body[name] for name in root.operands] if root.opcode == "tuple" else [root]
    return read + sum(_written(each, body) for each in results)


def _written(result: Instruction, body: Computation) -> int:
    source = result
    while source.opcode in ("bitcast", "convert", "copy") and source.operands and source.operands[0] in body:
        source = body[source.operands[0]]
    if source.opcode == "dynamic-update-slice":
        return body[source.operands[1]].size
    if source.opcode == "scatter":
        updates = source.operands[len(source.operands) // 2 + 1 :] or source.operands[-1:]
        return 2 * sum(body[name].size for name in updates)
    return result.size


def _work(body: Computation) -> float:
    """Return the operations outside tensor cores: one per element and instruction, more for functions and integers."""
    total = 0.0
    for each in body.values():
        if each.opcode in NO_WORK or not each.shapes:
            continue
        source = body.get(each.operands[0], each) if each.opcode == "reduce" and each.operands else each
        integer = source.shapes and source.shapes[0][0] in ("u32", "s32")
        slow = INTEGER_SHARE if integer and each.opcode not in ("compare", "select", "convert") else 1.0
        total += source.elements * FUNCTIONS.get(each.opcode, 1) * slow
    return total
