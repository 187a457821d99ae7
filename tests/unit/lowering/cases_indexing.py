"""Arguments for the operators of indexing.py."""

import dataclasses

import torch

from tests.unit.lowering.compare import Case, Draw, cases

CASES, case = cases()


@case("embedding.default")
def _embedding(draw):
    rows = draw.int(1, 5)
    indices = draw.ints(draw.shape(), 0, rows - 1)
    return Case((draw.floats((rows, draw.int(1, 3))), indices, draw.int(-1, rows - 1), draw.flag()))


@case("_embedding_bag.default")
def _embedding_bag(draw):
    rows, n, mode = draw.int(2, 5), draw.int(1, 7), draw.int(0, 2)
    offsets = torch.tensor([0, *sorted(draw.int(0, n) for _ in range(draw.int(0, 3)))])
    last = draw.flag()
    offsets = torch.cat([offsets, torch.tensor([n])]) if last else offsets
    weights = draw.floats((n,)) if mode == 0 and draw.flag() else None
    padding = draw.one(-1, 1)
    table = draw.floats((rows, 3))
    return Case((table, draw.ints((n,), 0, rows - 1), offsets, False, mode, False, weights, last, padding), outputs=1)


CASES["aten._embedding_bag_forward_only.default"] = lambda draw: dataclasses.replace(
    _embedding_bag(draw), gradient=False
)


@case("embedding_renorm.default")
def _embedding_renorm(draw):
    indices = draw.ints(draw.shape(1, 2), 0, 4)
    return Case((draw.floats((5, 3)), indices, 1.0, draw.one(1.0, 2.0)), gradient=False)


def _axis(draw: Draw, x):
    dim = draw.dim(x.dim())
    return dim, x.shape[dim]


@case("index_select.default")
def _index_select(draw):
    x = draw.any(draw.shape(1, smallest=1))
    dim, size = _axis(draw, x)
    return Case((x, dim, draw.ints((draw.int(0, 5),), 0, size - 1)))


def _partial(draw: Draw, x, dim: int):
    """An index for gather and scatter: smaller than x along the other axes, any length along its own."""
    dim %= x.dim()
    shape = [draw.int(0, 4) if axis == dim else draw.int(0, size) for axis, size in enumerate(x.shape)]
    return draw.ints(shape, 0, x.shape[dim] - 1)


@case("gather.default")
def _gather(draw):
    x = draw.any(draw.shape(1, smallest=1))
    dim = draw.dim(x.dim())
    return Case((x, dim, _partial(draw, x, dim)))


def _unique(draw: Draw, x, dim: int):
    """Positions that differ along `dim`, so that the order of writing does not matter."""
    dim %= x.dim()
    order = torch.from_numpy(draw.rng.random(x.shape)).argsort(dim)
    return order[tuple(slice(draw.int(1, size)) for size in x.shape)]


@case("scatter.src")
def _scatter(draw):
    x = draw.floats(draw.shape(1, smallest=1))
    dim = draw.dim(x.dim())
    index = _unique(draw, x, dim)
    return Case((x, dim, index, draw.floats(index.shape)))  # torch's own gradient wants a source of the index's shape


@case("scatter.value")
def _scatter_value(draw):
    x = draw.floats(draw.shape(1, smallest=1))
    dim = draw.dim(x.dim())
    return Case((x, dim, _partial(draw, x, dim), draw.one(0, 1.5)))


@case("scatter_add.default")
def _scatter_add(draw):
    x = draw.floats(draw.shape(1, smallest=1))
    dim = draw.dim(x.dim())
    index = draw.ints([draw.int(0, 3) if a == dim % x.dim() else draw.int(0, n) for a, n in enumerate(x.shape)], 0, 0)
    return Case((x, dim, index, draw.floats(index.shape)), scale=2)


@case("scatter_reduce.two")
def _scatter_reduce(draw):
    x = draw.floats(draw.shape(1, smallest=1), 0.5, 2)
    dim = draw.dim(x.dim())
    index = _partial(draw, x, dim)
    how = draw.one("sum", "mean", "amax", "amin", "prod")
    options = {"include_self": draw.flag()}
    return Case((x, dim, index, draw.floats(index.shape, 0.5, 2), how), options, gradient=how == "sum", scale=2)


@case("scatter.reduce")
def _scatter_old_reduce(draw):
    x = draw.floats(draw.shape(1, smallest=1))
    dim = draw.dim(x.dim())
    index = _partial(draw, x, dim)
    return Case(
        (x, dim, index, draw.floats(index.shape)), {"reduce": draw.one("add", "multiply")}, gradient=False, scale=2
    )


@case("scatter.value_reduce")
def _scatter_value_reduce(draw):
    x = draw.floats(draw.shape(1, smallest=1))
    dim = draw.dim(x.dim())
    return Case((x, dim, _partial(draw, x, dim), 1.5), {"reduce": draw.one("add", "multiply")}, gradient=False, scale=2)


def _indices(draw: Draw, x):
    """An index per leading axis, broadcasting together; negative ones count from the end; None skips an axis."""
    shape = draw.shape(1, 2, smallest=1, largest=3)
    some = [
        draw.ints(tuple(draw.one(n, 1) for n in shape), -size, size - 1) if draw.flag() else None for size in x.shape
    ]
    if all(index is None for index in some):
        some[0] = draw.ints(shape, 0, x.shape[0] - 1)
    return some


@case("index.Tensor", "_unsafe_index.Tensor")
def _index(draw):
    x = draw.any(draw.shape(1, smallest=1))
    return Case((x, _indices(draw, x)))


@case("index_put.default", "_unsafe_index_put.default")
def _index_put(draw):
    x = draw.floats(draw.shape(1, smallest=1))
    if draw.flag():  # x[..., mask] = number
        lead = draw.int(0, x.dim() - 1)
        mask = draw.bools(x.shape[lead : lead + draw.int(1, 2)])
        return Case((x, [None] * lead + [mask], draw.floats(())), gradient=False)
    indices = _indices(draw, x)
    target = torch.ops.aten.index.Tensor(x, indices)
    return Case((x, indices, draw.floats(target.shape), True), scale=2)


@case("index_add.default")
def _index_add(draw):
    x = draw.floats(draw.shape(1, smallest=1))
    dim, size = _axis(draw, x)
    index = draw.ints((draw.int(0, 4),), 0, size - 1)
    source = draw.floats([len(index) if a == dim % x.dim() else n for a, n in enumerate(x.shape)])
    return Case((x, dim, index, source), {"alpha": draw.one(1, 0.5)}, scale=2)


@case("index_copy.default")
def _index_copy(draw):
    x = draw.floats(draw.shape(1, smallest=1))
    dim, size = _axis(draw, x)
    index = torch.from_numpy(draw.rng.permutation(size))[: draw.int(0, size)]
    source = draw.floats([len(index) if a == dim % x.dim() else n for a, n in enumerate(x.shape)])
    return Case((x, dim, index, source))


@case("index_fill.int_Scalar")
def _index_fill(draw):
    x = draw.floats(draw.shape(1, smallest=1))
    dim, size = _axis(draw, x)
    return Case((x, dim, draw.ints((draw.int(0, 4),), 0, size - 1), 1.5))


@case("index_fill.int_Tensor")
def _index_fill_tensor(draw):
    x = draw.floats(draw.shape(1, smallest=1))
    dim, size = _axis(draw, x)
    return Case((x, dim, draw.ints((draw.int(0, 4),), 0, size - 1), draw.floats(())), gradient=False)


@case("masked_scatter.default")
def _masked_scatter(draw):
    x = draw.floats(draw.shape(1, smallest=1))
    return Case((x, draw.bools(x.shape), draw.floats((x.numel(),))), gradient=False)


@case("take.default")
def _take(draw):
    x = draw.any(draw.shape(1, smallest=1))
    return Case((x, draw.ints(draw.shape(), -x.numel(), x.numel() - 1)))


@case("one_hot.default")
def _one_hot(draw):
    return Case((draw.ints(draw.shape(1, smallest=1), 0, 3), draw.int(4, 6)))


@case("sort.default")
def _sort(draw):
    x = draw.floats(draw.shape())
    return Case((x, draw.dim(x.dim()), draw.flag()))


@case("sort.stable")
def _sort_stable(draw):
    x = draw.ints(draw.shape()).float()
    return Case((x,), {"stable": True, "dim": draw.dim(x.dim()), "descending": draw.flag()})


@case("argsort.default")
def _argsort(draw):
    x = draw.floats(draw.shape(1))
    return Case((x, draw.dim(x.dim()), draw.flag()))


@case("argsort.stable")
def _argsort_stable(draw):
    x = draw.ints(draw.shape(1))
    return Case((x,), {"stable": True, "dim": draw.dim(x.dim()), "descending": draw.flag()})


@case("topk.default")
def _topk(draw):
    x = draw.floats(draw.shape(1, smallest=1))
    dim, size = _axis(draw, x)
    return Case((x, draw.int(1, size), dim, draw.flag(), True))


@case("kthvalue.default")
def _kthvalue(draw):
    x = draw.floats(draw.shape(1, smallest=1))
    dim, size = _axis(draw, x)
    return Case((x, draw.int(1, size), dim, draw.flag()))


@case("searchsorted.Tensor")
def _searchsorted(draw):
    batch = draw.shape(0, 2, smallest=1)
    rows = draw.floats((*batch, draw.int(1, 5))).sort(-1).values
    return Case((rows, draw.floats((*batch, draw.int(0, 4)))), {"right": draw.flag()}, gradient=False)


@case("bucketize.Tensor")
def _bucketize(draw):
    edges = draw.ints((draw.int(1, 5),)).float().sort().values
    return Case((draw.ints(draw.shape()).float(), edges), {"right": draw.flag()}, gradient=False)


@case("index_reduce.default")
def _index_reduce(draw):
    x = draw.floats(draw.shape(1, smallest=1))
    dim, size = _axis(draw, x)
    index = draw.ints((draw.int(1, 4),), 0, size - 1)
    shape = list(x.shape)
    shape[dim] = len(index)
    how = draw.one("prod", "mean", "amax", "amin")
    return Case((x, dim, index, draw.floats(shape), how), {"include_self": draw.flag()}, gradient=False)


@case("put.default")
def _put(draw):
    x, index = draw.floats((3, 4)), torch.from_numpy(draw.rng.permutation(12)[:4])
    return Case((x, index, draw.floats((4,)), draw.flag()))


@case("repeat_interleave.Tensor")
def _repeat_interleave(draw):
    repeats = draw.ints((draw.int(1, 4),), 0, 3)
    return Case((repeats,), {"output_size": int(repeats.sum())})


@case("searchsorted.Scalar")
def _searchsorted_scalar(draw):
    return Case((draw.floats((5,)).sort()[0], draw.number()), {"right": draw.flag()})


@case("bucketize.Scalar")
def _bucketize_scalar(draw):
    return Case((draw.number(), draw.floats((5,)).sort()[0]), {"right": draw.flag()})
