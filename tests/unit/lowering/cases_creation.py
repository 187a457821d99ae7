"""Arguments for creation.py and for the parts of symbolic.py that give a value."""

import torch

from tests.unit.lowering.compare import FLOATS, Case, Draw, cases

CASES, case = cases()
DTYPES = (*FLOATS, torch.int64, torch.bool)


def _dtype(draw: Draw) -> dict:
    return draw.one({}, {"dtype": draw.one(*DTYPES)})


@case("full.default")
def _full(draw):
    return Case((list(draw.shape()), draw.one(1, 2.5, True)), _dtype(draw))


@case("zeros.default", "ones.default")
def _zeros(draw):
    return Case((list(draw.shape()),), _dtype(draw))


@case("full_like.default")
def _full_like(draw):
    return Case((draw.any(draw.shape()), draw.one(0, 1)), _dtype(draw))


@case("zeros_like.default", "ones_like.default")
def _like(draw):
    return Case((draw.any(draw.shape()),), _dtype(draw))


@case("new_full.default")
def _new_full(draw):
    return Case((draw.any(()), list(draw.shape()), 1), _dtype(draw))


@case("new_zeros.default", "new_ones.default")
def _new(draw):
    return Case((draw.any(()), list(draw.shape())), _dtype(draw))


@case("fill.Scalar")
def _fill(draw):
    return Case((draw.floats(draw.shape()), 1.5))


@case("fill.Tensor")
def _fill_tensor(draw):
    return Case((draw.floats(draw.shape()), draw.floats(())))


@case("scalar_tensor.default")
def _scalar(draw):
    return Case((draw.one(1, 2.5),), _dtype(draw))


@case("arange.default")
def _arange(draw):
    return Case((draw.one(draw.int(0, 6), 4.5),), draw.one({}, {"dtype": torch.float32}))


@case("arange.start")
def _arange_start(draw):
    return Case((draw.int(-3, 2), draw.int(2, 6)))


@case("arange.start_step")
def _arange_step(draw):
    return Case((draw.int(-3, 2), draw.one(draw.int(2, 6), 5.5), draw.one(1, 2, 0.5)))


@case("linspace.default")
def _linspace(draw):
    return Case((draw.number(), draw.number(), draw.int(0, 6)))


@case("eye.default")
def _eye(draw):
    return Case((draw.int(0, 4),), _dtype(draw))


@case("eye.m")
def _eye_m(draw):
    return Case((draw.int(0, 4), draw.int(0, 4)))


@case("tril_indices.default", "triu_indices.default")
def _indices(draw):
    return Case((draw.int(1, 4), draw.int(1, 4), draw.int(-2, 2)))


@case("hann_window.default")
def _hann(draw):
    return Case((draw.int(1, 8),))


@case("hann_window.periodic")
def _hann_periodic(draw):
    return Case((draw.int(1, 8), draw.flag()))


@case("sym_size.int", "sym_stride.int")
def _sym(draw):
    x = draw.any(draw.shape(1, smallest=1))
    return Case((x, draw.dim(x.dim())))


@case("sym_numel.default", "sym_storage_offset.default")
def _sym_number(draw):
    return Case((draw.any(draw.shape()),))


@case("range.default")
def _range(draw):
    return Case((draw.one(0, 0.5, -2), 3))


@case("range.step")
def _range_step(draw):
    return Case((draw.one(0, 0.5, -2), 3, draw.one(1, 0.5)))


@case("fft_fftfreq.default", "fft_rfftfreq.default")
def _frequencies(draw):
    return Case((draw.int(1, 7), draw.one(1.0, 0.5)))


@case("bartlett_window.default", "blackman_window.default", "hamming_window.default", "kaiser_window.default")
def _window(draw):
    return Case((draw.int(1, 8),), {}, scale=4)


@case("bartlett_window.periodic", "blackman_window.periodic", "hamming_window.periodic", "kaiser_window.periodic")
def _periodic_window(draw):
    return Case((draw.int(1, 8), draw.flag()), scale=4)


@case("hamming_window.periodic_alpha", "kaiser_window.beta")
def _window_of_a_number(draw):
    return Case((draw.int(1, 8), draw.flag(), draw.one(0.6, 3.0)), scale=4)


@case("hamming_window.periodic_alpha_beta")
def _window_of_two_numbers(draw):
    return Case((draw.int(1, 8), draw.flag(), 0.6, 0.3), scale=4)
