"""Arguments for pooling.py, resizing.py, losses.py."""

import torch

from tests.unit.lowering.compare import Case, Draw, cases

CASES, case = cases()


def _image(draw: Draw, rank: int, low: int = 5, high: int = 7):
    batch = (2, 2) if draw.flag() else (1,)
    return draw.floats((*batch, *(draw.int(low, high) for _ in range(rank)))[-rank - 2 :])


def _window(draw: Draw, rank: int):
    kernel = [draw.int(2, 3) for _ in range(rank)]
    stride = draw.one([], [draw.int(1, 3) for _ in range(rank)])
    return kernel, stride, [draw.int(0, 1) for _ in range(rank)]


def _max_pool(rank):
    def build(draw):
        return Case((_image(draw, rank), *_window(draw, rank), [draw.int(1, 2)] * rank, draw.flag()))

    return build


def _avg_pool(rank):
    def build(draw):
        options = (draw.flag(), draw.flag(), *((draw.one(None, 3),) if rank > 1 else ()))
        return Case((_image(draw, rank), *_window(draw, rank), *options), scale=2)

    return build


def _adaptive(rank):
    def build(draw):
        return Case((_image(draw, rank), [draw.int(1, 8) for _ in range(rank)]), scale=2)

    return build


for _rank in (1, 2, 3):
    CASES[f"aten.max_pool{_rank}d.default"] = _max_pool(_rank)
    CASES[f"aten.avg_pool{_rank}d.default"] = _avg_pool(_rank)
    CASES[f"aten.adaptive_avg_pool{_rank}d.default"] = _adaptive(_rank)
    CASES[f"aten.adaptive_max_pool{_rank}d.default"] = _adaptive(_rank)
for _rank in (2, 3):
    CASES[f"aten._adaptive_avg_pool{_rank}d.default"] = _adaptive(_rank)
    CASES[f"aten.max_pool{_rank}d_with_indices.default"] = _max_pool(_rank)


@case("max_unpool2d.default")
def _unpool(draw):
    pooled, where = torch.nn.functional.max_pool2d(draw.floats((2, 2, 6, 4)), 2, return_indices=True)
    return Case((pooled, where, [6, 4]))


def _resize(rank: int, corners: bool, vector: bool, smooth: bool):
    def build(draw: Draw) -> Case:
        least = 2 if corners else 4  # antialiased, torch itself errs where one pixel is left along an axis
        x = draw.floats((2, 2, *(draw.int(least, 5) for _ in range(rank))))
        by_factor = vector and draw.flag()
        factors = [draw.one(0.5, 1.5, 2.0) for _ in range(rank)] if by_factor else None
        sizes = None if by_factor else [draw.int(least // 2, 8) for _ in range(rank)]
        first = (x, sizes) + ((draw.flag() if corners else False,) if smooth else ())
        return Case((*first, factors) if vector else first, scale=10)

    return build


def _register(name: str, rank: int, smooth: bool, corners: bool = True):
    for overload in ("vec", "default"):
        CASES[f"aten.{name}.{overload}"] = _resize(rank, corners, overload == "vec", smooth)


for _rank, _name in ((1, "linear1d"), (2, "bilinear2d"), (3, "trilinear3d")):
    _register(f"upsample_{_name}", _rank, smooth=True)
    _register(f"upsample_nearest{_rank}d", _rank, smooth=False)
    _register(f"_upsample_nearest_exact{_rank}d", _rank, smooth=False)
_register("upsample_bicubic2d", 2, smooth=True)
_register("_upsample_bilinear2d_aa", 2, smooth=True, corners=False)
_register("_upsample_bicubic2d_aa", 2, smooth=True, corners=False)


@case("mse_loss.default", "l1_loss.default")
def _distance(draw):
    shape = draw.shape(smallest=1)
    return Case((draw.floats(shape), draw.floats(shape), draw.int(0, 2)))


@case("smooth_l1_loss.default", "huber_loss.default")
def _smooth_distance(draw):
    shape = draw.shape(smallest=1)
    return Case((draw.floats(shape), draw.floats(shape), draw.int(0, 2), draw.one(1.0, 0.4)))


@case("soft_margin_loss.default")
def _soft_margin(draw):
    shape = draw.shape(smallest=1)
    target = draw.ints(shape, 0, 1).float() * 2 - 1
    return Case((draw.floats(shape), target, draw.int(0, 2)), fixed=(target,))


@case("binary_cross_entropy.default")
def _bce(draw):
    shape = draw.shape(smallest=1)
    weight = draw.one(None, draw.floats(shape, 0, 1))
    return Case(
        (draw.floats(shape, 0.05, 0.95), draw.floats(shape, 0, 1), weight, draw.int(0, 2)), scale=2, fixed=(weight,)
    )


@case("binary_cross_entropy_with_logits.default")
def _bce_logits(draw):
    shape = draw.shape(1, smallest=1)
    extra = draw.one((None, None), (draw.floats(shape, 0, 1), None), (None, draw.floats(shape[-1:], 0.5, 2)))
    return Case((draw.floats(shape, -4, 4), draw.floats(shape, 0, 1), *extra, draw.int(0, 2)), scale=2, fixed=extra)


@case("kl_div.default")
def _kl(draw):
    shape, logarithm = draw.shape(1, smallest=1), draw.flag()
    target = draw.floats(shape, -2, 0) if logarithm else draw.floats(shape, 0.1, 1)
    return Case((draw.floats(shape, -2, 0), target, draw.int(0, 2)), {"log_target": logarithm})


def _classes(draw: Draw, space: tuple[int, ...]):
    classes = draw.int(2, 4)
    logits = draw.floats((3, classes, *space))
    target = draw.ints((3, *space), 0, classes - 1)
    if draw.flag():
        target = torch.where(draw.floats(target.shape) > 1, -100, target)
        target.view(-1)[0] = 0
    return logits, target, draw.one(None, draw.floats((classes,), 0.5, 2))


@case("nll_loss.default", "nll_loss_nd.default")
def _nll(draw):
    logits, target, weight = _classes(draw, ())
    return Case((logits, target, weight, draw.int(0, 2), -100), fixed=(weight,))


@case("nll_loss2d.default")
def _nll2d(draw):
    logits, target, weight = _classes(draw, (2, 3))
    return Case((logits, target, weight, draw.int(0, 2), -100), fixed=(weight,))


@case("nll_loss_forward.default")
def _nll_forward(draw):
    logits, target, weight = _classes(draw, ())
    return Case((logits, target, weight, draw.int(1, 2), -100), gradient=False)


@case("nll_loss2d_forward.default")
def _nll2d_forward(draw):
    logits, target, weight = _classes(draw, (2, 3))
    return Case((logits, target, weight, draw.int(1, 2), -100), gradient=False)


@case("cross_entropy_loss.default")
def _cross_entropy(draw):
    logits, target, weight = _classes(draw, draw.one((), (3,), (2, 2)))
    if draw.int(0, 2) == 0:
        target = draw.floats(logits.shape, 0, 1).softmax(1)
    return Case((logits, target, weight, draw.int(0, 2), -100, draw.one(0.0, 0.2)), scale=2, fixed=(weight,))


@case("ctc_loss.IntList")
def _ctc(draw):
    steps, labels = draw.int(5, 7), draw.int(1, 3)
    log_p = draw.floats((steps, 2, 4)).log_softmax(-1)  # its gradient takes log_softmax in: test_ctc.py
    lengths = [steps, draw.int(5, steps)], [labels, draw.int(1, labels)]
    return Case((log_p, draw.ints((2, labels), 1, 3), *lengths, 0, draw.int(0, 2), False), scale=4, gradient=False)


@case("ctc_loss.Tensor")
def _ctc_tensor(draw):
    steps, labels = draw.int(5, 7), draw.int(1, 3)
    log_p = draw.floats((steps, 2, 4)).log_softmax(-1)
    sizes = [labels, draw.int(1, labels)]
    lengths = torch.tensor([steps, draw.int(5, steps)]), torch.tensor(sizes)
    targets = draw.ints((sum(sizes),), 1, 3) if draw.flag() else draw.ints((2, labels), 1, 3)
    return Case((log_p, targets, *lengths, 0, draw.int(0, 2), draw.flag()), scale=4, gradient=False)


def _grid_sampler(rank):
    def build(draw):
        x = draw.floats((2, 2, *(draw.int(1, 5) for _ in range(rank))))
        grid = draw.floats((2, *(draw.int(1, 3) for _ in range(rank)), rank), -1.4, 1.4)
        return Case((x, grid, draw.int(0, 2 if rank == 2 else 1), draw.int(0, 2), draw.flag()), scale=8)

    return build


CASES["aten.grid_sampler_2d.default"] = _grid_sampler(2)
CASES["aten.grid_sampler_3d.default"] = _grid_sampler(3)


@case("multilabel_margin_loss_forward.default")
def _multilabel_margin_loss(draw):
    classes, rows = draw.int(2, 5), draw.one((), (3,))
    order = torch.from_numpy(draw.rng.random((*rows, classes))).argsort(-1)
    target = torch.where(torch.arange(classes) < draw.int(0, classes), order, -1)
    return Case((draw.floats((*rows, classes)), target, draw.int(0, 2)))
