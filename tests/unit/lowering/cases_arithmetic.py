"""Arguments for element-wise operators of two or more tensors."""

import torch

from tests.unit.lowering.compare import FLOATS, Case, cases

COMPARISONS = "eq ne lt le gt ge".split()

CASES, case = cases()


def _integers(draw, shape):
    return draw.bools(shape) if draw.flag() else draw.ints(shape)


@case("bitwise_and.Tensor", "bitwise_or.Tensor", "bitwise_xor.Tensor")
def _bit_pairs(draw):
    first, second = draw.pair()
    return Case((_integers(draw, first), _integers(draw, second)))


@case("bitwise_and.Scalar", "bitwise_or.Scalar", "bitwise_xor.Scalar")
def _bit_scalar(draw):
    return Case((_integers(draw, draw.shape()), draw.int(0, 7)))


@case("bitwise_and.Scalar_Tensor", "bitwise_or.Scalar_Tensor", "bitwise_xor.Scalar_Tensor")
def _scalar_bit(draw):
    return Case((draw.int(0, 7), draw.ints(draw.shape())))


@case("bitwise_left_shift.Tensor", "bitwise_right_shift.Tensor")
def _shift(draw):
    first, second = draw.pair()
    return Case((draw.ints(first), draw.ints(second, 0, 4)))


@case("bitwise_left_shift.Tensor_Scalar", "bitwise_right_shift.Tensor_Scalar")
def _shift_scalar(draw):
    return Case((draw.ints(draw.shape()), draw.int(0, 4)))


@case(*(f"{name}.Tensor" for name in COMPARISONS), "maximum.default", "minimum.default", "fmax.default", "fmin.default")
def _compare(draw):
    first, second = draw.pair()
    return Case((draw.any(first), draw.any(second)))


@case(*(f"{name}.Scalar" for name in COMPARISONS))
def _compare_scalar(draw):
    return Case((draw.any(draw.shape()), draw.one(draw.number(), draw.int(0, 2))))


@case("logical_and.default", "logical_or.default", "logical_xor.default")
def _logic(draw):
    first, second = draw.pair()
    return Case((draw.any(first), draw.any(second)))


def _numbers(draw, shape):
    """Any dtype but bool, which torch does not subtract."""
    x = draw.any(shape)
    return x.float() if x.dtype == torch.bool else x


@case("add.Tensor", "sub.Tensor", "rsub.Tensor")
def _sums(draw):
    first, second = draw.pair()
    x, y = _numbers(draw, first), _numbers(draw, second)
    if not draw.flag():
        return Case((x, y), scale=2)
    whole = not (x.is_floating_point() or y.is_floating_point())
    return Case((x, y), {"alpha": draw.int(1, 3) if whole else draw.number()}, scale=2)


@case("add.Scalar", "sub.Scalar", "rsub.Scalar")
def _sum_scalar(draw):
    return Case((_numbers(draw, draw.shape()), draw.one(draw.number(), draw.int(1, 4))), scale=2)


@case("mul.Tensor")
def _product(draw):
    first, second = draw.pair()
    return Case((draw.any(first), draw.any(second)), scale=2)


@case("mul.Scalar")
def _product_scalar(draw):
    return Case((draw.any(draw.shape()), draw.one(draw.number(), draw.int(0, 3), True)), scale=2)


def _divisor(draw, shape):
    return draw.floats(shape, 0.4, 2) if draw.flag() else draw.ints(shape, 1, 5)


@case("div.Tensor")
def _quotient(draw):
    first, second = draw.pair()
    return Case((draw.any(first), _divisor(draw, second)), scale=2)


@case("div.Scalar")
def _quotient_scalar(draw):
    return Case((draw.any(draw.shape()), draw.one(draw.number(0.5, 2), 3)), scale=2)


@case("div.Tensor_mode")
def _quotient_mode(draw):
    first, second = draw.pair()
    x = _numbers(draw, first)
    y = _divisor(draw, second)
    return Case((x, y), {"rounding_mode": draw.one("floor", "trunc", None)}, gradient=False, scale=2)


@case("div.Scalar_mode")
def _quotient_scalar_mode(draw):
    x = draw.ints(draw.shape()) if draw.flag() else draw.floats(draw.shape())
    return Case((x, draw.int(1, 4)), {"rounding_mode": draw.one("floor", "trunc")}, gradient=False)


@case("floor_divide.default")
def _floor_divide(draw):
    first, second = draw.pair()
    return Case((_numbers(draw, first), _divisor(draw, second)), gradient=False)


@case("floor_divide.Scalar")
def _floor_divide_scalar(draw):
    return Case((draw.ints(draw.shape()), draw.int(1, 4)), gradient=False)


@case("remainder.Tensor", "fmod.Tensor")
def _modulo(draw):
    first, second = draw.pair()
    if draw.flag():
        return Case((draw.ints(first), draw.ints(second, 1, 5)))
    return Case((draw.floats(first, -4, 4), draw.floats(second, 0.7, 2)), gradient=False)


@case("remainder.Scalar", "fmod.Scalar")
def _modulo_scalar(draw):
    shape = draw.shape()
    return Case((draw.ints(shape) if draw.flag() else draw.floats(shape, -4, 4), draw.int(1, 4)))


@case("remainder.Scalar_Tensor")
def _scalar_modulo(draw):
    return Case((draw.int(-7, 7), draw.ints(draw.shape(), 1, 5)))


@case("pow.Tensor_Tensor")
def _power(draw):
    first, second = draw.pair()
    if draw.flag():
        return Case((draw.ints(first, 0, 3), draw.ints(second, 0, 3)))
    return Case((draw.floats(first, 0.3, 2), draw.floats(second)), scale=4)


@case("pow.Tensor_Scalar")
def _power_scalar(draw):
    if draw.flag():
        return Case((draw.ints(draw.shape()), draw.int(0, 4)))
    return Case((draw.floats(draw.shape(), 0.3, 2, draw.one(*FLOATS)), draw.one(2, 3, -1, 0.5, 2.0, 1.7, 0)), scale=4)


@case("pow.Scalar")
def _scalar_power(draw):
    return Case((draw.one(2, 2.5), draw.floats(draw.shape())), scale=4)


@case("atan2.default", "hypot.default", "logaddexp.default", "copysign.Tensor")
def _two_floats(draw):
    first, second = draw.pair()
    return Case((draw.floats(first, 0.2, 2), draw.floats(second, 0.2, 2)))


@case("copysign.Scalar")
def _sign_scalar(draw):
    return Case((draw.floats(draw.shape()), draw.one(1.0, -2.0)))


@case("xlogy.Tensor")
def _xlogy(draw):
    first, second = draw.pair()
    return Case((draw.floats(first), draw.floats(second, 0.2, 2)))


@case("xlogy.Scalar_Other")
def _xlogy_other(draw):
    return Case((draw.floats(draw.shape()), 1.7))


@case("xlogy.Scalar_Self")
def _xlogy_self(draw):
    return Case((1.7, draw.floats(draw.shape(), 0.2, 2)))


@case("lerp.Scalar")
def _lerp(draw):
    shape = draw.shape()
    return Case((draw.floats(shape), draw.floats(shape), draw.number()))


@case("lerp.Tensor")
def _lerp_tensor(draw):
    shape, weight = draw.pair()
    return Case((draw.floats(shape), draw.floats(shape), draw.floats(weight)))


@case("addcmul.default", "addcdiv.default")
def _addc(draw):
    shape, other = draw.pair()
    value = {"value": draw.number()} if draw.flag() else {}
    return Case((draw.floats(shape), draw.floats(other), draw.floats(other, 0.5, 2)), value, scale=2)


@case("clamp.default")
def _clamp(draw):
    x = _numbers(draw, draw.shape())
    low, high = draw.one((None, 1), (-1, None), (-1, 1), (-0.5, 0.7), (0, 0))
    return Case((x, low, high))


@case("clamp.Tensor")
def _clamp_tensor(draw):
    shape, bound = draw.pair()
    low = draw.floats(bound, -1, 0) if draw.flag() else None
    high = draw.floats(bound, 0, 1) if low is None or draw.flag() else None
    return Case((draw.floats(shape), low, high), gradient=False)


@case("clamp_min.default", "clamp_max.default")
def _clamp_one(draw):
    return Case((_numbers(draw, draw.shape()), draw.one(0, 0.5, -1)))


@case("clamp_min.Tensor", "clamp_max.Tensor")
def _clamp_one_tensor(draw):
    shape, bound = draw.pair()
    return Case((draw.floats(shape), draw.floats(bound)), gradient=False)


@case("where.self")
def _where(draw):
    shape, other = draw.pair()
    return Case((draw.bools(shape), draw.any(other), draw.any(shape)))


@case("where.ScalarSelf")
def _where_self(draw):
    shape, other = draw.pair()
    return Case((draw.bools(shape), draw.one(0, 1.5), draw.floats(other)))


@case("where.ScalarOther")
def _where_other(draw):
    shape, other = draw.pair()
    return Case((draw.bools(shape), draw.floats(other), draw.one(0, 1.5, -torch.inf)))


@case("where.Scalar")
def _where_scalars(draw):
    return Case((draw.bools(draw.shape()), draw.one(1, 2.5), 0.5))


@case("masked_fill.Scalar")
def _masked_fill(draw):
    shape = draw.shape()
    mask = tuple(draw.one(size, 1) for size in shape)
    return Case((draw.floats(shape), draw.bools(mask), draw.one(0, -torch.inf, 1.5)))


@case("masked_fill.Tensor")
def _masked_fill_tensor(draw):
    shape = draw.shape()
    return Case((draw.floats(shape), draw.bools(shape), draw.floats(())))
