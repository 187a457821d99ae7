"""Arguments for the operators of reductions.py."""

import torch

from tests.unit.lowering.compare import FLOATS, Case, Draw, cases

CASES, case = cases()


def _float(draw: Draw, least: int = 0, smallest: int = 1):
    return draw.floats(draw.shape(least, smallest=smallest), -2, 2, draw.one(*FLOATS))


def _dtype(draw: Draw) -> dict:
    return draw.one({}, {}, {"dtype": torch.float32})


@case("sum.default")
def _sum(draw):
    return Case((draw.any(draw.shape()),), _dtype(draw), scale=2)


@case("sum.dim_IntList", "nansum.default")
def _sum_dims(draw):
    x = draw.any(draw.shape())
    return Case((x, draw.one(None, draw.dims(x.dim())), draw.flag()), _dtype(draw), scale=2)


@case("mean.default")
def _mean(draw):
    return Case((_float(draw),), _dtype(draw), scale=2)


@case("mean.dim")
def _mean_dims(draw):
    x = _float(draw)
    return Case((x, draw.one(None, draw.dims(x.dim())), draw.flag()), scale=2)


@case("prod.default")
def _prod(draw):
    return Case((draw.any(draw.shape(high=3, largest=3), 0.5, 1.5),), scale=4)


@case("prod.dim_int")
def _prod_dim(draw):
    x = draw.any(draw.shape(1, 3), 0.5, 1.5)
    return Case((x, draw.dim(x.dim()), draw.flag()), scale=4)


@case("amax.default", "amin.default")
def _extreme(draw):
    x = draw.ints(draw.shape(smallest=1)).float() if draw.flag() else _float(draw)  # whole numbers have equal ones
    return Case((x, draw.dims(x.dim()), draw.flag()))


@case("max.default", "min.default")
def _extreme_all(draw):
    return Case((draw.any(draw.shape(smallest=1)),))


@case("max.dim", "min.dim")
def _extreme_dim(draw):
    x = draw.any(draw.shape(smallest=1))
    return Case((x, draw.dim(x.dim()), draw.flag()))


@case("argmax.default", "argmin.default")
def _position(draw):
    x = _float(draw)
    return Case((x, draw.one(None, draw.dim(x.dim())), draw.flag()))


@case("median.default")
def _median(draw):
    return Case((draw.floats(draw.shape(smallest=1)),))


@case("median.dim")
def _median_dim(draw):
    x = draw.floats(draw.shape(1, smallest=1))
    return Case((x, draw.dim(x.dim()), draw.flag()))


@case("any.default", "all.default")
def _logic(draw):
    return Case((draw.any(draw.shape()),))


@case("any.dim", "all.dim")
def _logic_dim(draw):
    x = draw.any(draw.shape(1))
    return Case((x, draw.dim(x.dim()), draw.flag()))


@case("any.dims", "all.dims")
def _logic_dims(draw):
    x = draw.any(draw.shape(1))
    return Case((x, draw.dims(x.dim(), 1), draw.flag()))


@case("count_nonzero.default")
def _count(draw):
    x = draw.any(draw.shape(1))
    return Case((x, draw.one(None, draw.dim(x.dim()))))


@case("count_nonzero.dim_IntList")
def _count_dims(draw):
    x = draw.any(draw.shape(1))
    return Case((x, draw.dims(x.dim(), 1)))


def _spread(draw: Draw):
    return draw.floats(draw.shape(1, 3, smallest=3, largest=5))


@case("var.default", "std.default", "var_mean.default")
def _variance(draw):
    return Case((_spread(draw), draw.flag()) if draw.flag() else (_spread(draw),), scale=4)


@case("var.dim", "std.dim", "var_mean.dim")
def _variance_dims(draw):
    x = _spread(draw)
    return Case((x, draw.dims(x.dim(), 1), draw.flag(), draw.flag()), scale=4)


@case("var.correction", "std.correction", "var_mean.correction", "std_mean.correction")
def _variance_correction(draw):
    x = _spread(draw)
    return Case(
        (x, draw.one(None, draw.dims(x.dim(), 1))),
        {"correction": draw.one(None, 0, 1, 2), "keepdim": draw.flag()},
        scale=4,
    )


@case("logsumexp.default")
def _logsumexp(draw):
    x = draw.floats(draw.shape(1, smallest=1))
    return Case((x, draw.dims(x.dim(), 1), draw.flag()), scale=2)


@case("softmax.int", "log_softmax.int")
def _softmax(draw):
    x = _float(draw, smallest=0)
    return Case((x, draw.dim(x.dim())), _dtype(draw), scale=2)


@case("_softmax.default", "_log_softmax.default")
def _softmax_kernel(draw):
    x = draw.floats(draw.shape())
    return Case((x, draw.dim(x.dim()), False), scale=2)


@case("_safe_softmax.default")
def _safe_softmax(draw):
    x = draw.floats(draw.shape(1, smallest=1))
    return Case((x, draw.dim(x.dim())), gradient=False)


@case("cumsum.default", "cumprod.default")
def _cumulate(draw):
    x = draw.any(draw.shape(), 0.5, 1.5)
    return Case((x, draw.dim(x.dim())), _dtype(draw), scale=4)


@case("logcumsumexp.default")
def _logcumsumexp(draw):
    x = draw.floats(draw.shape(1, smallest=1))
    return Case((x, draw.dim(x.dim())), scale=4)


@case("cummax.default", "cummin.default")
def _cumulative_extreme(draw):
    x = draw.floats(draw.shape(1, smallest=1)) if draw.flag() else draw.ints(draw.shape(1, smallest=1))
    return Case((x, draw.dim(x.dim())))


@case("linalg_vector_norm.default")
def _vector_norm(draw):
    x = draw.floats(draw.shape(1, smallest=1)) * draw.one(1, 1, 0)  # zero vectors too
    order = draw.one(2, 1, 3, 0, torch.inf, -torch.inf) if x.any() else draw.one(2, 1)
    return Case((x, order, draw.one(None, draw.dims(x.dim(), 1)), draw.flag()), scale=2)


@case("norm.Scalar")
def _norm(draw):
    return Case((draw.floats(draw.shape(1, smallest=1)), draw.one(2, 1)), scale=2)


@case("norm.ScalarOpt_dim")
def _norm_dims(draw):
    x = draw.floats(draw.shape(1, smallest=1))
    return Case((x, draw.one(None, 2, 1), draw.dims(x.dim(), 1), draw.flag()), scale=2)


@case("dist.default")
def _dist(draw):
    first, second = draw.pair()
    return Case((draw.floats(first), draw.floats(second), draw.one(2, 1)), gradient=False)


@case("cdist.default", "_cdist_forward.default")
def _cdist(draw):
    batch, width = draw.shape(0, 1, smallest=1), draw.int(1, 4)
    x, y = draw.floats((*batch, draw.int(1, 4), width)), draw.floats((*batch, draw.int(1, 4), width))
    return Case((x, y, draw.one(2.0, 1.0), None), gradient=False, scale=4)


@case("nonzero_static.default")
def _nonzero_static(draw):
    return Case((draw.bools(draw.shape(1, 3, smallest=1)),), {"size": draw.int(0, 6)})


@case("equal.default")
def _equal(draw):
    x = draw.ints(draw.shape(), 0, 1)
    return Case((x, draw.one(x, x + 1)), gradient=False)


@case("isclose.default")
def _isclose(draw):
    x = draw.floats(draw.shape())
    return Case((x, x + draw.one(0, 1e-9, 1.0)), gradient=False)


@case("histc.default")
def _histc(draw):
    limits = draw.one((0, 0), (-1, 1.5))
    return Case((draw.floats(draw.shape(1, smallest=1)), draw.int(1, 6), *limits), gradient=False)


@case("mode.default")
def _mode(draw):
    shape, least = draw.shape(1, smallest=1), draw.one(0, 2**30)  # float32 holds no integer of the second kind
    x = draw.floats(shape).round() if draw.flag() else draw.ints(shape, least, least + 2)
    return Case((x, draw.dim(x.dim()), draw.flag()), outputs=1)
