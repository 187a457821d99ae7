"""Arguments for the operators of elementwise.py."""

import torch

from tests.unit.lowering.compare import FLOATS, INTEGERS, Case, Draw, cases

DOMAINS = {  # where the function is defined and smooth enough for float32
    "log": (0.1, 3),
    "log2": (0.1, 3),
    "log10": (0.1, 3),
    "log1p": (-0.9, 3),
    "sqrt": (0.1, 3),
    "rsqrt": (0.1, 3),
    "asin": (-0.9, 0.9),
    "acos": (-0.9, 0.9),
    "acosh": (1.1, 3),
    "atanh": (-0.9, 0.9),
    "erfinv": (-0.9, 0.9),
    "lgamma": (0.2, 3),
    "digamma": (0.3, 3),
    "reciprocal": (0.3, 3),
    "tan": (-1.2, 1.2),
}
FLOAT_FUNCTIONS = (
    "exp exp2 expm1 log log2 log10 log1p sqrt rsqrt reciprocal sin cos tan asin acos atan sinh cosh tanh asinh acosh "
    "atanh erf erfc erfinv lgamma digamma sigmoid sinc"
).split()
FLOAT_ONLY = (
    "log_sigmoid silu mish gelu leaky_relu elu celu selu softplus softshrink hardshrink hardtanh hardsigmoid hardswish"
).split()
ANY_FUNCTIONS = "abs neg sign sgn square isnan ceil floor trunc positive relu relu6 isfinite isinf signbit".split()

CASES, case = cases()


def _function(name):
    def build(draw: Draw) -> Case:
        low, high = DOMAINS.get(name, (-2, 2))
        if name not in DOMAINS and draw.flag():
            return Case((draw.any(draw.shape(), low, high),), scale=2)
        return Case((draw.floats(draw.shape(), low, high, draw.one(*FLOATS)),), scale=4)

    return build


for _name in FLOAT_FUNCTIONS:
    CASES[f"aten.{_name}.default"] = _function(_name)


def _float_only(draw: Draw) -> Case:
    return Case((draw.floats(draw.shape(), -4, 4, draw.one(*FLOATS)),), scale=2)


for _name in FLOAT_ONLY:
    CASES[f"aten.{_name}.default"] = _float_only


def _any(name):
    def build(draw: Draw) -> Case:
        x = draw.any(draw.shape())
        if x.dtype == torch.bool and name in ("neg", "abs", "sign", "sgn", "square", "positive", "relu", "relu6"):
            x = x.float()
        if x.dtype == torch.bool and name in ("ceil", "floor", "trunc"):
            x = x.int()
        if x.is_floating_point() and name in ("isnan", "isfinite", "isinf"):
            x = torch.where(x > 1, torch.inf, torch.where(x < -1, torch.nan, x))
        return Case((x,))

    return build


for _name in ANY_FUNCTIONS:
    CASES[f"aten.{_name}.default"] = _any(_name)


@case("frac.default", "round.default")
def _fractions(draw):
    return Case((draw.floats(draw.shape(), -4, 4),))


@case("round.decimals")
def _decimals(draw):
    return Case((draw.floats(draw.shape(), -4, 4),), {"decimals": draw.int(0, 2)}, scale=2)


@case("logical_not.default", "clone.default", "alias.default", "lift_fresh_copy.default", "detach.default")
def _same(draw):
    return Case((draw.any(draw.shape()),))


@case("resolve_conj.default", "resolve_neg.default", "conj_physical.default", "_conj.default", "angle.default")
def _complex_or_real(draw):
    x = draw.floats(draw.shape(), 0.3, 2)
    return Case((torch.complex(x, draw.floats(x.shape, 0.3, 2)),))


CASES["aten.real.default"] = CASES["aten.imag.default"] = _complex_or_real


@case("bitwise_not.default")
def _bits(draw):
    shape = draw.shape()
    return Case((draw.bools(shape) if draw.flag() else draw.ints(shape),))


@case("nan_to_num.default")
def _nan_to_num(draw):
    x = draw.floats(draw.shape())
    x = torch.where(x > 1.5, torch.nan, torch.where(x < -1.5, torch.inf, x))
    return Case((x, *draw.one((), (1.0,), (None, 5.0, -5.0))))


@case("_to_copy.default")
def _to_copy(draw):
    return Case(
        (draw.any(draw.shape()),), {"dtype": draw.one(*FLOATS, *INTEGERS[:2], torch.bool, None)}, gradient=False
    )


@case("type_as.default")
def _type_as(draw):
    return Case((draw.any(draw.shape()), draw.any(())), gradient=False)


@case("copy.default")
def _copy(draw):
    shape = draw.shape()
    other = tuple(draw.one(size, 1) for size in shape)
    return Case((draw.floats(shape), draw.floats(other)), gradient=False)


@case("complex.default", "polar.default")
def _complex(draw):
    shape = draw.shape()
    return Case((draw.floats(shape, 0.2, 2), draw.floats(shape)))


@case("view_as_real.default", "view_as_real_copy.default")
def _view_as_real(draw):
    x = draw.floats(draw.shape(smallest=1))
    return Case((torch.complex(x, draw.floats(x.shape)),), gradient=False)


@case("view_as_complex.default", "view_as_complex_copy.default")
def _view_as_complex(draw):
    return Case((draw.floats((*draw.shape(smallest=1), 2)),), gradient=False)


def _options(name, options):
    def build(draw: Draw) -> Case:
        return Case((draw.floats(draw.shape(), -4, 4, draw.one(*FLOATS)), *draw.one((), *options)), scale=2)

    CASES[f"aten.{name}.default"] = build


_options("leaky_relu", [(0.3,)])
_options("elu", [(1.5,), (1.5, 1.2), (1.5, 1.2, 0.7)])
_options("celu", [(1.5,)])
_options("softplus", [(2,), (2, 3)])
_options("softshrink", [(0.3,)])
_options("hardshrink", [(0.3,)])
_options("hardtanh", [(-0.5, 0.7)])


@case("gelu.default")
def _gelu(draw):
    return Case(
        (draw.floats(draw.shape(), -4, 4, draw.one(*FLOATS)),), {"approximate": draw.one("none", "tanh")}, scale=2
    )


@case("threshold.default")
def _threshold(draw):
    return Case((draw.floats(draw.shape()), 0.3, draw.one(0.0, 7.0)))


@case("prelu.default")
def _prelu(draw):
    shape = draw.shape(2, 4, smallest=1)
    return Case((draw.floats(shape), draw.floats((draw.one(1, shape[1]),))))


@case("_prelu_kernel.default")
def _prelu_kernel(draw):
    shape = draw.shape(2, 4, smallest=1)
    return Case((draw.floats(shape), draw.floats((1, shape[1], *(1,) * (len(shape) - 2)))))


@case("glu.default")
def _glu(draw):
    shape = draw.shape(1, 3)
    dim = draw.dim(len(shape))
    shape = tuple(2 * size if axis == dim % len(shape) else size for axis, size in enumerate(shape))
    return Case((draw.floats(shape), dim))


@case("gcd.default", "lcm.default")
def _divisors(draw):
    a, b = draw.pair()
    return Case((draw.ints(a, -12, 12), draw.ints(b, -12, 12)))


@case("nextafter.default")
def _nextafter(draw):
    a, b = draw.pair()
    return Case((draw.floats(a), draw.floats(b)), gradient=False)


@case("igamma.default", "igammac.default")
def _igamma(draw):
    a, b = draw.pair()
    return Case((draw.floats(a, 0.3, 3), draw.floats(b, 0.1, 4)), gradient=False)


@case("polygamma.default")
def _polygamma(draw):
    return Case((draw.int(0, 3), draw.floats(draw.shape(), 0.5, 3)), scale=20)


@case("special_zeta.default")
def _zeta(draw):
    a, b = draw.pair()
    return Case((draw.floats(a, 1.5, 4), draw.floats(b, 0.5, 3)), gradient=False, scale=4)


@case("ldexp.Tensor")
def _ldexp(draw):
    a, b = draw.pair()
    return Case((draw.floats(a), draw.ints(b)), gradient=False)


@case("frexp.Tensor")
def _frexp(draw):
    return Case((draw.floats(draw.shape(), -4, 4),), gradient=False)


@case("i0.default", "special_i0e.default", "special_i1.default", "special_i1e.default", "special_ndtri.default")
def _special(draw):
    return Case((draw.floats(draw.shape(), 0.1, 0.9),), scale=4)


@case("__lshift__.Tensor", "__rshift__.Tensor")
def _shift(draw):
    a, b = draw.pair()
    return Case((draw.ints(a, 0, 9), draw.ints(b, 0, 4)))


@case("__lshift__.Scalar", "__rshift__.Scalar")
def _shift_by(draw):
    return Case((draw.ints(draw.shape(), 0, 9), draw.int(0, 4)))


@case("special_erfcx.default")
def _erfcx(draw):
    return Case((draw.floats(draw.shape(), -2, 12),), gradient=False, scale=4)
