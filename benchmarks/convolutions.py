"""Compare convolutions of real networks with torch's, forward and both gradients, on one thread: about 200 shapes.

    taskset -c 1 python -m benchmarks.convolutions --json convolutions.json

Printed for each shape: milliseconds of processor time (of the clock with --wall) for XLA's convolution as it is, for
jaxtrain.nn.correlation and for torch, the ratio of the last two, and the spread of the ratio over --rounds; at the end
its geometric mean, its worst, and how many shapes lie above 2. --forms times each form of
jaxtrain.nn.correlation_forms by itself, which the rule there was read off. --step 64 16 times a training step of
resnet18 through jaxtrain.compile and in eager torch. Memory that is freed stays with the process, as in training
(jaxtrain.runtime.host_memory).
"""

import os

os.environ |= {"NPROC": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}  # before jax and torch start threads

import functools
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch

from benchmarks import parser, save
from jaxtrain.nn import correlation_forms as forms
from jaxtrain.nn.correlation import correlate
from jaxtrain.runtime import host_memory

MOST_FLOPS = 2e9  # of a forward pass: larger batches are cut


class Shape(NamedTuple):
    """One convolution: [batch, inputs, *size] by [outputs, inputs / groups, *kernel]; transposed: of ConvTranspose."""

    network: str
    batch: int
    inputs: int
    outputs: int
    size: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: int = 1
    padding: int = 0
    dilation: int = 1
    groups: int = 1
    transposed: bool = False

    def __str__(self) -> str:
        size, kernel = "x".join(map(str, self.size)), "x".join(map(str, self.kernel))
        further = f" dilation {self.dilation}" * (self.dilation > 1) + f" groups {self.groups}" * (self.groups > 1)
        return (
            f"{self.network} [{self.batch}, {self.inputs}, {size}] to {self.outputs} by {kernel}, stride {self.stride}"
            f"{further}{' transposed' * self.transposed}"
        )


def _resnet(name: str, pixels: int, batch: int, bottleneck: bool) -> Iterator[Shape]:
    make = lambda inputs, outputs, size, kernel, stride=1: Shape(
        name, batch, inputs, outputs, (size,) * 2, (kernel,) * 2, stride, kernel // 2
    )
    yield make(3, 64, pixels, 7, 2)
    size, inputs = pixels // 4, 64
    for stage, width in enumerate((64, 128, 256, 512)):
        stride, outputs = (1 if stage == 0 else 2), width * (4 if bottleneck else 1)
        if bottleneck:
            yield make(inputs, width, size, 1)
            yield make(width, width, size, 3, stride)
        else:
            yield make(inputs, width, size, 3, stride)
        if inputs != outputs:
            yield make(inputs, outputs, size, 1, stride)
        size = -(-size // stride)
        yield make(width, width, size, 3)
        if bottleneck:
            yield make(width, outputs, size, 1)
            yield make(outputs, width, size, 1)
        inputs = outputs


def _mobilenet(pixels: int, batch: int) -> Iterator[Shape]:
    name, size = f"mobilenet_v2 {pixels}", pixels // 2
    yield Shape(name, batch, 3, 32, (pixels,) * 2, (3, 3), 2, 1)
    for inputs, outputs, stride in ((16, 24, 2), (24, 32, 2), (32, 64, 2), (64, 96, 1), (96, 160, 2), (160, 320, 1)):
        wide = 6 * inputs
        yield Shape(name, batch, inputs, wide, (size,) * 2, (1, 1))
        yield Shape(name, batch, wide, wide, (size,) * 2, (3, 3), stride, 1, groups=wide)
        size = -(-size // stride)
        yield Shape(name, batch, wide, outputs, (size,) * 2, (1, 1))
    yield Shape(name, batch, 320, 1280, (size,) * 2, (1, 1))


def _convnext(pixels: int, batch: int) -> Iterator[Shape]:
    name, size = f"convnext_tiny {pixels}", pixels // 4
    yield Shape(name, batch, 3, 96, (pixels,) * 2, (4, 4), 4)
    for width in (96, 192, 384, 768):
        yield Shape(name, batch, width, width, (size,) * 2, (7, 7), 1, 3, groups=width)
        if width < 768:
            yield Shape(name, batch, width, 2 * width, (size,) * 2, (2, 2), 2)
        size //= 2


def _unet(pixels: int, batch: int, first: int) -> Iterator[Shape]:
    name, size, inputs = f"unet {pixels}", pixels, 3
    for outputs in (first, 2 * first, 4 * first, 8 * first):
        yield Shape(name, batch, inputs, outputs, (size,) * 2, (3, 3), 1, 1)
        yield Shape(name, batch, outputs, outputs, (size,) * 2, (3, 3), 1, 1)
        inputs, size = outputs, size // 2
    for outputs in (4 * first, 2 * first, first):
        size *= 2
        yield Shape(name, batch, inputs, outputs, (size,) * 2, (2, 2), 2, transposed=True)
        yield Shape(name, batch, 2 * outputs, outputs, (size * 2,) * 2, (3, 3), 1, 1)
        inputs = outputs


def _generator(batch: int) -> Iterator[Shape]:
    size = 4
    for inputs, outputs in ((512, 256), (256, 128), (128, 64), (64, 3)):
        yield Shape("dcgan", batch, inputs, outputs, (size,) * 2, (4, 4), 2, 1, transposed=True)
        yield Shape("dcgan", batch, outputs, inputs, (2 * size,) * 2, (4, 4), 2, 1)
        size *= 2


def _lines() -> Iterator[Shape]:
    for inputs, kernel, stride, size in ((1, 10, 5, 4000), (512, 3, 2, 799), (512, 3, 2, 399), (512, 2, 2, 99)):
        yield Shape("wav2vec2", 4, inputs, 512, (size,), (kernel,), stride)
    for dilation in (1, 2, 4, 8, 16, 32):
        yield Shape("wavenet", 8, 64, 128, (512,), (2,), 1, dilation, dilation)
    for width, size in ((32, 256), (64, 128), (128, 64), (256, 32)):
        yield Shape("temporal", 16, width, width, (size,), (3,), 1, 1)
        yield Shape("temporal", 16, width, 2 * width, (size,), (5,), 2, 2)
        yield Shape("temporal", 16, 2 * width, width, (size // 2,), (4,), 2, 1, transposed=True)
    yield Shape("whisper", 2, 80, 384, (1500,), (3,), 1, 1)
    yield Shape("whisper", 2, 384, 384, (1500,), (3,), 2, 1)


def _volumes() -> Iterator[Shape]:
    size = (8, 56, 56)
    for inputs, outputs in ((3, 64), (64, 64), (64, 128), (128, 256), (256, 512)):
        stride = 1 if inputs in (3, 64) and outputs == 64 else 2
        yield Shape("r3d_18", 2, inputs, outputs, size, (3, 3, 3), stride, 1)
        size = tuple(-(-n // stride) for n in size)
        yield Shape("r3d_18", 2, outputs, outputs, size, (3, 3, 3), 1, 1)
    for width, n in ((16, 32), (32, 16), (64, 8), (128, 4)):
        yield Shape("unet3d", 2, width, width, (n,) * 3, (3, 3, 3), 1, 1)
        yield Shape("unet3d", 2, 2 * width, width, (n // 2,) * 3, (2, 2, 2), 2, transposed=True)


def _others() -> Iterator[Shape]:
    for inputs, outputs, size in ((1, 32, 28), (32, 64, 26), (1, 6, 28), (6, 16, 12), (3, 32, 32), (32, 64, 16)):
        yield Shape("small nets", 32, inputs, outputs, (size,) * 2, (3, 3) if size != 12 else (5, 5), 1, 0)
    for width, size in ((16, 32), (32, 16), (64, 8)):
        yield Shape("resnet20 cifar", 32, width, width, (size,) * 2, (3, 3), 1, 1)
        yield Shape("resnet20 cifar", 32, width, 2 * width, (size,) * 2, (3, 3), 2, 1)
    for dilation in (2, 4, 6, 12):
        yield Shape("deeplab", 2, 256, 256, (28, 28), (3, 3), 1, dilation, dilation)
    for width, size in ((128, 56), (256, 28), (512, 14), (1024, 7)):
        yield Shape("resnext50", 4, width, width, (size,) * 2, (3, 3), 1, 1, groups=32)
    for width, size in ((64, 32), (128, 16), (256, 8)):
        yield Shape("vgg 32", 16, width, width, (size,) * 2, (3, 3), 1, 1)
        yield Shape("inception", 8, width, width, (size,) * 2, (1, 7), 1, 0)
        yield Shape("inception", 8, width, width, (size,) * 2, (7, 1), 1, 0)
    yield Shape("vit", 8, 3, 384, (224, 224), (16, 16), 16)
    yield Shape("sudoku", 64, 9, 64, (9, 9), (3, 3), 1, 1)
    yield Shape("atari", 32, 4, 32, (84, 84), (8, 8), 4)
    yield Shape("atari", 32, 32, 64, (20, 20), (4, 4), 2)
    yield Shape("atari", 32, 64, 64, (9, 9), (3, 3), 1)


def shapes() -> list[Shape]:
    """Return every different convolution once, with batches cut to MOST_FLOPS."""
    found: dict[tuple, Shape] = {}
    for pixels, batch in ((32, 16), (64, 16), (224, 4)):
        every = [
            *_resnet(f"resnet18 {pixels}", pixels, batch, False),
            *_resnet(f"resnet50 {pixels}", pixels, batch, True),
        ]
        for shape in (*every, *_mobilenet(pixels, batch), *_convnext(pixels, batch)):
            found.setdefault(shape[1:], shape)
    for shape in (*_unet(64, 8, 16), *_unet(128, 2, 64), *_generator(16), *_lines(), *_volumes(), *_others()):
        found.setdefault(shape[1:], shape)
    return [_cut(shape) for shape in found.values()]


def _cut(shape: Shape) -> Shape:
    places = math.prod(shape.size) // (1 if shape.transposed else shape.stride ** len(shape.size))
    flops = 2 * places * math.prod(shape.kernel) * shape.inputs * shape.outputs // shape.groups
    return shape._replace(batch=max(1, min(shape.batch, int(MOST_FLOPS // max(1, flops)))))


class Case:
    """The arrays of one shape and the calls on each side."""

    def __init__(self, shape: Shape):
        rank, groups = len(shape.size), shape.groups
        rng = np.random.default_rng(0)
        ends = (shape.inputs, shape.outputs // groups) if shape.transposed else (shape.outputs, shape.inputs // groups)
        x = rng.standard_normal((shape.batch, shape.inputs, *shape.size), np.float32)
        weight = rng.standard_normal((*ends, *shape.kernel), np.float32)
        weight /= np.float32(math.sqrt(shape.inputs / groups * math.prod(shape.kernel)))
        self.shape, self.rank = shape, rank
        options = [shape.stride] * rank, [shape.padding] * rank, [shape.dilation] * rank
        self.options = (*options, shape.transposed, [0] * rank, groups)
        self.x, self.weight = torch.from_numpy(x), torch.from_numpy(weight)
        self.y = torch.ops.aten.convolution(self.x, self.weight, None, *self.options)
        self.dy = torch.from_numpy(rng.standard_normal(tuple(self.y.shape), np.float32))
        self.arrays = [jnp.asarray(array) for array in (x, weight, self.dy.numpy())]

    def torch(self) -> list[torch.Tensor]:
        y = torch.ops.aten.convolution(self.x, self.weight, None, *self.options)
        wanted = [True, True, False]
        dx, dw, _ = torch.ops.aten.convolution_backward(self.dy, self.x, self.weight, None, *self.options, wanted)
        return [y, dx, dw]

    def compiled(self, convolve: Callable) -> Callable:
        """Compile the output and both gradients. convolve: (x, weight, stride, pads, gaps, dilation, groups) -> y."""

        @jax.jit
        def run(x, weight, dy):
            y, pull = jax.vjp(self._form(convolve), x, weight)
            return y, *pull(dy)

        return lambda: jax.block_until_ready(run(*self.arrays))

    def _form(self, convolve: Callable) -> Callable:
        shape, rank = self.shape, self.rank
        each = lambda n: (n,) * rank
        if not shape.transposed:
            pads = ((shape.padding,) * 2,) * rank
            return lambda x, w: convolve(x, w, each(shape.stride), pads, each(1), each(shape.dilation), shape.groups)
        pads = tuple((shape.dilation * (k - 1) - shape.padding,) * 2 for k in shape.kernel)
        turned = lambda w: jnp.flip(w.swapaxes(0, 1), tuple(range(2, 2 + rank)))
        return lambda x, w: convolve(x, turned(w), each(1), pads, each(shape.stride), each(shape.dilation), 1)

    def form_times(self, timed: Callable) -> dict[str, float]:
        """Return milliseconds of every form by itself. {} for groups and transposed convolutions."""
        shape, rank = self.shape, self.rank
        if shape.groups > 1 or shape.transposed:
            return {}
        window = forms.Window((shape.stride,) * rank, ((shape.padding,) * 2,) * rank, (shape.dilation,) * rank)
        x, weight, dy = self.arrays
        sides = {
            "output": (forms.OUTPUT_FORMS, forms.output, (x, weight), ()),
            "input": (forms.INPUT_FORMS, forms.input_gradient, (dy, weight), (shape.size,)),
            "kernel": (forms.KERNEL_FORMS, forms.kernel_gradient, (x, dy), (shape.kernel,)),
        }
        found = {}
        for side, (table, function, arrays, static) in sides.items():
            for name in table:
                if name in ("pointwise", "samples") and math.prod(shape.kernel) > 1:
                    continue
                run = jax.jit(lambda a, b, f=function, n=name, s=static: f(a, b, window, *s, form=n))
                found[f"{side} {name}"] = timed(lambda r=run, a=arrays: jax.block_until_ready(r(*a)))
        return found


def by_xla(x, weight, stride, pads, gaps, dilation, groups):
    return jax.lax.conv_general_dilated(x, weight, stride, pads, gaps, dilation, feature_group_count=groups)


def clock(wall: bool) -> Callable[[], float]:
    """Return the clock on the wall, or the process's own."""
    return time.perf_counter if wall else time.process_time


def milliseconds(function: Callable[[], Any], clock: Callable[[], float], budget_s: float) -> float:
    """Return the least time of a call, of those that the budget allows and three at least."""
    function()
    best, begun, calls = math.inf, clock(), 0
    while calls < 3 or (clock() - begun < budget_s and calls < 100):
        start = clock()
        function()
        best, calls = min(best, clock() - start), calls + 1
    return 1e3 * best


def measure(shape: Shape, arguments: Any) -> dict[str, Any]:
    case = Case(shape)
    timed = lambda function: milliseconds(function, clock(arguments.wall), arguments.budget)
    sides = {"xla": case.compiled(by_xla), "ours": case.compiled(correlate), "torch": case.torch}
    for ours, theirs in zip(sides["ours"](), case.torch(), strict=True):
        scale = float(theirs.abs().max()) + 1e-30
        error = float(np.abs(np.asarray(ours) - theirs.numpy()).max()) / scale
        assert error < 2e-5, f"{shape}: {error:.1e} of the largest value off torch's"
    rounds = [{name: timed(run) for name, run in sides.items()} for _ in range(arguments.rounds)]
    ratios = [times["ours"] / times["torch"] for times in rounds]
    found = {name: statistics.median(times[name] for times in rounds) for name in sides}
    found |= {"shape": str(shape), "ratio": statistics.median(ratios), "spread": [min(ratios), max(ratios)]}
    if arguments.forms:
        found["forms"] = case.form_times(timed)
    return found


class Block(torch.nn.Module):
    """Two convolutions by 3x3 and what they add to their input (He et al. 2016)."""

    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        convolution = functools.partial(torch.nn.Conv2d, bias=False)
        self.body = torch.nn.Sequential(
            convolution(inputs, outputs, 3, stride, 1),
            torch.nn.BatchNorm2d(outputs),
            torch.nn.ReLU(),
            convolution(outputs, outputs, 3, 1, 1),
            torch.nn.BatchNorm2d(outputs),
        )
        across = [convolution(inputs, outputs, 1, stride), torch.nn.BatchNorm2d(outputs)]
        self.across = torch.nn.Sequential(*(across if stride > 1 else []))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.body(x) + self.across(x))


def resnet18() -> torch.nn.Module:
    """Build torchvision's resnet18 for ten classes."""
    first = torch.nn.Conv2d(3, 64, 7, 2, 3, bias=False), torch.nn.BatchNorm2d(64), torch.nn.ReLU()
    widths = [64, 64, 128, 256, 512]
    blocks = []
    for stage, (inputs, outputs) in enumerate(itertools.pairwise(widths)):
        blocks += [Block(inputs, outputs, 1 + bool(stage)), Block(outputs, outputs, 1)]
    last = torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(512, 10)
    return torch.nn.Sequential(*first, torch.nn.MaxPool2d(3, 2, 1), *blocks, *last)


def measure_step(pixels: int, batch: int, arguments: Any) -> dict[str, Any]:
    """Return milliseconds of a step of resnet18 with SGD: forward, backward, update."""
    import jaxtrain

    images, labels = torch.randn(batch, 3, pixels, pixels), torch.randint(10, (batch,))
    loss = lambda module, rows: torch.nn.functional.cross_entropy(module(rows[0]), rows[1])

    def build() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        module = resnet18()
        return module, torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9)

    module, optimizer = build()

    def eager() -> float:
        optimizer.zero_grad()
        value = loss(module, (images, labels))
        value.backward()
        optimizer.step()
        return value.item()

    compiled_module, compiled_optimizer = build()
    step = jaxtrain.compile(compiled_module, loss, compiled_optimizer, wait=True)
    ours = lambda: float(step((images, labels)))
    apart = abs(ours() - eager())
    assert apart < 1e-4, f"the first losses are {apart:.1e} apart"
    ours()  # the second call may compile once more
    timed = lambda function: milliseconds(function, clock(arguments.wall), arguments.budget)
    rounds = [(timed(ours), timed(eager)) for _ in range(arguments.rounds)]
    ratios = [mine / theirs for mine, theirs in rounds]
    names = {"ours": statistics.median(mine for mine, _ in rounds), "torch": statistics.median(t for _, t in rounds)}
    return names | {"ratio": statistics.median(ratios), "spread": [min(ratios), max(ratios)]}


def main() -> None:
    p = parser(__doc__)
    p.add_argument("--step", nargs=2, type=int, metavar=("PIXELS", "BATCH"), help="a training step of resnet18")
    p.add_argument("--only", default="", help="shapes whose description contains this")
    p.add_argument("--every", type=int, default=1, metavar="N", help="every N-th shape")
    p.add_argument("--rounds", type=int, default=3, help="measurements of each side, in turns")
    p.add_argument("--budget", type=float, default=0.1, help="seconds for a side in a round")
    p.add_argument("--wall", action="store_true", help="time by the clock, on quiet cores")
    p.add_argument("--forms", action="store_true", help="time every form too")
    arguments = p.parse_args()
    torch.set_num_threads(1)
    host_memory.keep()
    if arguments.step:
        pixels, batch = arguments.step
        row = measure_step(pixels, batch, arguments)
        print(f"resnet18, {pixels} pixels, batch {batch}: ours {row['ours']:.1f}, torch {row['torch']:.1f} ms;", end="")
        print(f" ratio {row['ratio']:.2f} ({row['spread'][0]:.2f} to {row['spread'][1]:.2f})")
        save(row, arguments.json)
        return
    found = []
    for shape in [shape for shape in shapes() if arguments.only in str(shape)][:: arguments.every]:
        row = measure(shape, arguments)
        found.append(row)
        low, high = row["spread"]
        print(
            f"{row['shape']}: xla {row['xla']:.2f}, ours {row['ours']:.2f}, torch {row['torch']:.2f} ms; ratio "
            f"{row['ratio']:.2f} ({low:.2f} to {high:.2f})",
            *[f"\n    {name} {ms:.2f}" for name, ms in sorted(row.get("forms", {}).items(), key=lambda item: item[1])],
            flush=True,
        )
    ratios = [row["ratio"] for row in found]
    worst = max(found, key=lambda row: row["ratio"])
    mean = math.exp(statistics.mean(map(math.log, ratios)))
    asis = math.exp(statistics.mean(math.log(row["xla"] / row["torch"]) for row in found))
    print(f"{len(found)} shapes: geometric mean {mean:.2f} of torch (XLA as it is {asis:.2f}), worst", end=" ")
    print(f"{worst['ratio']:.2f} ({worst['shape']}), above 2: {sum(ratio > 2 for ratio in ratios)}")
    save(found, arguments.json)


if __name__ == "__main__":
    main()
