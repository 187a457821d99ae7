"""Arguments for the operators of views.py."""

import torch

from tests.unit.lowering.compare import Case, Draw, cases

CASES, case = cases()


def _tensor(draw: Draw, least: int = 0, smallest: int = 0):
    return draw.any(draw.shape(least, smallest=smallest))


@case("view.default", "reshape.default", "_unsafe_view.default", "_reshape_copy.default")
def _view(draw):
    x = _tensor(draw)
    if draw.flag() and x.numel():
        return Case((x, [-1, *x.shape[1:]] if x.dim() else [-1]))
    return Case((x, [*x.shape[1:], *x.shape[:1], 1]))


@case("view.dtype")
def _view_dtype(draw):
    return Case((draw.floats(draw.shape(1)), torch.int32), gradient=False)


@case("expand.default")
def _expand(draw):
    shape = draw.shape()
    want = [draw.one(-1, size, draw.int(0, 3)) if size == 1 else draw.one(-1, size) for size in shape]
    return Case((draw.any(shape), [draw.int(0, 3)] * draw.int(0, 1) + want))


@case("permute.default")
def _permute(draw):
    x = _tensor(draw)
    order = [int(axis) for axis in draw.rng.permutation(x.dim())]
    return Case((x, [axis - x.dim() if draw.flag() else axis for axis in order]))


@case("transpose.int")
def _transpose(draw):
    x = _tensor(draw)
    return Case((x, draw.dim(x.dim()), draw.dim(x.dim())))


@case("t.default")
def _t(draw):
    return Case((draw.floats(draw.shape(0, 2)),))


@case("unsqueeze.default")
def _unsqueeze(draw):
    x = _tensor(draw)
    return Case((x, draw.dim(x.dim() + 1)))


@case("squeeze.default")
def _squeeze(draw):
    return Case((_tensor(draw),))


@case("squeeze.dim")
def _squeeze_dim(draw):
    x = _tensor(draw)
    return Case((x, draw.dim(x.dim())))


@case("squeeze.dims")
def _squeeze_dims(draw):
    x = _tensor(draw)
    return Case((x, draw.dims(x.dim())))


def _slice(draw, size):
    start = draw.one(None, 0, draw.int(-6, 6))
    return start, draw.one(None, draw.int(-6, 6), 2**63 - 1), draw.int(1, 3)


@case("slice.Tensor")
def _slices(draw):
    x = _tensor(draw, 1)
    dim = draw.dim(x.dim())
    return Case((x, dim, *_slice(draw, x.shape[dim])))


@case("slice_scatter.default")
def _slice_scatter(draw):
    x = draw.floats(draw.shape(1))
    dim = draw.dim(x.dim())
    options = (dim, *_slice(draw, x.shape[dim]))
    source = torch.ops.aten.slice.Tensor(x, *options)
    return Case((x, draw.floats(source.shape), *options))


@case("select.int")
def _select(draw):
    x = _tensor(draw, 1, 1)
    dim = draw.dim(x.dim())
    return Case((x, dim, draw.dim(x.shape[dim])))


@case("select_scatter.default")
def _select_scatter(draw):
    x = draw.floats(draw.shape(1, smallest=1))
    dim = draw.dim(x.dim())
    index = draw.dim(x.shape[dim])
    return Case((x, draw.floats(x.select(dim, index).shape), dim, index))


def _plane(draw, x):
    first, second = [int(axis) for axis in draw.rng.permutation(x.dim())[:2]]
    return draw.int(-2, 2), first, second - x.dim() if draw.flag() else second


@case("diagonal.default")
def _diagonal(draw):
    x = draw.any(draw.shape(2, 4, smallest=3))
    return Case((x, *_plane(draw, x)))


@case("diagonal_scatter.default")
def _diagonal_scatter(draw):
    x = draw.floats(draw.shape(2, 4, smallest=3))
    plane = _plane(draw, x)
    return Case((x, draw.floats(x.diagonal(*plane).shape), *plane))


@case("diag_embed.default")
def _diag_embed(draw):
    x = draw.floats(draw.shape(1, 3))
    return Case((x, draw.int(-2, 2), *draw.one((), (0, 1), (-1, 0))))


@case("split.Tensor")
def _split(draw):
    x = _tensor(draw, 1, 1)
    return Case((x, draw.int(1, 5), draw.dim(x.dim())))


@case("split_with_sizes.default")
def _split_sizes(draw):
    x = _tensor(draw, 1, 1)
    dim = draw.dim(x.dim())
    cut = draw.int(0, x.shape[dim])
    return Case((x, [cut, x.shape[dim] - cut], dim))


@case("unbind.int")
def _unbind(draw):
    x = _tensor(draw, 1, 1)
    return Case((x, draw.dim(x.dim())))


@case("cat.default")
def _cat(draw):
    shape = list(draw.shape(1))
    dim = draw.dim(len(shape))
    parts = [draw.any([*shape[: dim % len(shape)], draw.int(0, 3), *shape[dim % len(shape) :][1:]]) for _ in range(2)]
    if draw.flag():
        parts.append(torch.zeros(0))
    return Case((parts, dim))


@case("stack.default")
def _stack(draw):
    shape = draw.shape(0, 3)
    return Case(([draw.any(shape), draw.any(shape)], draw.dim(len(shape) + 1)))


@case("repeat.default")
def _repeat(draw):
    x = _tensor(draw)
    return Case((x, [draw.int(0, 2) for _ in range(x.dim() + draw.int(0, 1))]))


@case("repeat_interleave.self_int")
def _repeat_interleave(draw):
    x = _tensor(draw, 1)
    return Case((x, draw.int(0, 3), draw.one(None, draw.dim(x.dim()))))


@case("flip.default")
def _flip(draw):
    x = _tensor(draw)
    return Case((x, draw.dims(x.dim())))


@case("roll.default")
def _roll(draw):
    x = _tensor(draw, 1)
    if draw.flag():
        return Case((x, [draw.int(-5, 5)]))
    dims = draw.dims(x.dim(), 1)
    return Case((x, [draw.int(-5, 5) for _ in dims], dims))


@case("unfold.default")
def _unfold(draw):
    x = _tensor(draw, 1, 1)
    dim = draw.dim(x.dim())
    return Case((x, dim, draw.int(1, x.shape[dim]), draw.int(1, 3)))


@case("as_strided.default", "as_strided_copy.default")
def _as_strided(draw):
    return Case((draw.floats((24,)), [2, 3], [draw.int(0, 4), draw.int(1, 3)], draw.one(None, 0, 5)), gradient=False)


@case("constant_pad_nd.default")
def _constant_pad(draw):
    x = _tensor(draw, 1, 3)
    widths = [draw.int(-1, 3) for _ in range(2 * draw.int(1, x.dim()))]
    return Case((x.float(), widths, draw.one(0, 1.5)))


def _edge_pad(rank):
    def build(draw):
        x = draw.floats((*draw.shape(1, 2, smallest=1), *(draw.int(3, 5) for _ in range(rank)))[-rank - 2 :])
        return Case((x, [draw.int(0, 2) for _ in range(2 * rank)]))

    return build


for _rank in (1, 2, 3):
    CASES[f"aten.reflection_pad{_rank}d.default"] = CASES[f"aten.replication_pad{_rank}d.default"] = _edge_pad(_rank)


@case("tril.default", "triu.default")
def _triangle(draw):
    return Case((draw.any(draw.shape(2)), draw.int(-3, 3)))


@case("pixel_shuffle.default")
def _pixel_shuffle(draw):
    factor = draw.int(1, 3)
    return Case((draw.floats((*draw.shape(0, 2, smallest=1), draw.int(1, 2) * factor**2, 2, 3)), factor))


@case("pixel_unshuffle.default")
def _pixel_unshuffle(draw):
    factor = draw.int(1, 3)
    return Case((draw.floats((*draw.shape(0, 2, smallest=1), factor**2, 2 * factor, factor)), factor))


@case("channel_shuffle.default")
def _channel_shuffle(draw):
    groups = draw.int(1, 3)
    return Case((draw.floats((2, groups * draw.int(1, 2), *draw.shape(1, 2))), groups))


def _window(draw):
    return {"kernel": [draw.int(1, 3) for _ in range(2)], "rest": [[draw.int(1, 2)] * 2, [draw.int(0, 1)] * 2]}


@case("im2col.default")
def _im2col(draw):
    window = _window(draw)
    x = draw.floats((*draw.shape(0, 1, smallest=1), 2, draw.int(6, 7), draw.int(6, 7)))
    return Case((x, window["kernel"], *window["rest"], [draw.int(1, 2)] * 2))


@case("col2im.default")
def _col2im(draw):
    window, size, stride = _window(draw), [draw.int(6, 7), draw.int(6, 7)], [draw.int(1, 2)] * 2
    like = torch.nn.functional.unfold(torch.zeros(1, 2, *size), window["kernel"], *window["rest"], stride)
    x = draw.floats((*draw.shape(1, 1, smallest=1), *like.shape[1:]))
    return Case((x, size, window["kernel"], *window["rest"], stride))


@case("meshgrid.default")
def _meshgrid(draw):
    return Case(([draw.floats((draw.int(0, 3),)), draw.floats((draw.int(1, 3),))],))


@case("meshgrid.indexing")
def _meshgrid_indexing(draw):
    rows = [draw.floats((draw.int(0, 3),)), draw.floats((draw.int(1, 3),))]
    return Case((rows,), {"indexing": draw.one("ij", "xy")})
