"""Arguments for products.py, normalization.py, attention.py, recurrent.py."""

import torch

from tests.unit.lowering.compare import FLOATS, Case, Draw, cases

CASES, case = cases()


def size(draw: Draw) -> int:
    return draw.int(1, 4)


@case("linear.default")
def _linear(draw):
    width, out, dtype = draw.int(0, 4), size(draw), draw.one(*FLOATS)
    x = draw.floats((*draw.shape(1, 3), width), dtype=dtype)
    bias = (draw.floats((out,), dtype=dtype),) if draw.flag() else ()
    return Case((x, draw.floats((out, width), dtype=dtype), *bias), scale=4)


@case("mm.default")
def _mm(draw):
    inner = draw.int(0, 4)
    return Case((draw.floats((draw.int(0, 4), inner)), draw.floats((inner, size(draw)))))


@case("bmm.default")
def _bmm(draw):
    batch, inner = draw.int(0, 3), size(draw)
    return Case((draw.floats((batch, size(draw), inner)), draw.floats((batch, inner, size(draw)))))


@case("matmul.default")
def _matmul(draw):
    inner = size(draw)
    left, right = draw.shape(0, 2, smallest=1, largest=2), draw.shape(0, 2, smallest=1, largest=2)
    left, right = (left, right) if left == right else (left, ())
    x = draw.floats((inner,) if draw.flag() and not left else (*left, size(draw), inner))
    y = draw.floats((inner,) if draw.flag() and not right else (*right, inner, size(draw)))
    return Case((x, y), scale=2)


@case("mv.default")
def _mv(draw):
    return Case((draw.floats((size(draw), 3)), draw.floats((3,))))


@case("dot.default", "vdot.default")
def _dot(draw):
    n = draw.int(0, 5)
    return Case((draw.floats((n,)), draw.floats((n,))))


def _scales(draw):
    return draw.one({}, {"beta": 0.5, "alpha": 2}, {"beta": 0})


@case("addmm.default")
def _addmm(draw):
    n, k, m = size(draw), size(draw), size(draw)
    bias = draw.floats(draw.one((m,), (n, m), (1, m)))
    return Case((bias, draw.floats((n, k)), draw.floats((k, m))), _scales(draw))


@case("addmv.default")
def _addmv(draw):
    return Case((draw.floats((3,)), draw.floats((3, 2)), draw.floats((2,))), _scales(draw))


@case("baddbmm.default")
def _baddbmm(draw):
    return Case((draw.floats((2, 3, 4)), draw.floats((2, 3, 2)), draw.floats((2, 2, 4))), _scales(draw))


@case("addbmm.default")
def _addbmm(draw):
    return Case((draw.floats((3, 4)), draw.floats((2, 3, 2)), draw.floats((2, 2, 4))), _scales(draw))


@case("addr.default")
def _addr(draw):
    return Case((draw.floats((3, 2)), draw.floats((3,)), draw.floats((2,))), _scales(draw))


@case("outer.default")
def _outer(draw):
    return Case((draw.floats((draw.int(0, 3),)), draw.floats((size(draw),))))


@case("einsum.default")
def _einsum(draw):
    equation, shapes = draw.one(
        ("ij,jk->ik", [(2, 3), (3, 4)]),
        ("b i d, b j d -> b i j", [(2, 3, 4), (2, 2, 4)]),
        ("...d,de->...e", [(2, 3, 4), (4, 2)]),
        ("ii->i", [(3, 3)]),
        ("ij->", [(2, 3)]),
        ("bhqk,bkhd->bqhd", [(2, 2, 3, 4), (2, 4, 2, 3)]),
    )
    return Case((equation, [draw.floats(shape) for shape in shapes]), scale=2)


@case("bilinear.default")
def _bilinear(draw):
    batch = draw.shape(1, 2, smallest=1)
    bias = draw.one(None, draw.floats((2,)))
    return Case((draw.floats((*batch, 3)), draw.floats((*batch, 4)), draw.floats((2, 3, 4)), bias), scale=2)


@case("convolution.default")
def _convolution(draw):
    rank, groups, transposed = draw.int(1, 3), draw.int(1, 2), draw.flag()
    inputs, outputs = groups * draw.int(1, 2), groups * draw.int(1, 2)
    stride = [draw.int(1, 2) for _ in range(rank)]
    extra = [draw.int(0, step - 1) if transposed else 0 for step in stride]
    kernel = [draw.int(1, 3) for _ in range(rank)]
    weight = (inputs, outputs // groups, *kernel) if transposed else (outputs, inputs // groups, *kernel)
    return Case(
        (
            draw.floats((2, inputs, *(draw.int(5, 6) for _ in range(rank)))),
            draw.floats(weight),
            draw.one(None, draw.floats((outputs,))),
            stride,
            [draw.int(0, 1) for _ in range(rank)],
            [draw.int(1, 2) for _ in range(rank)],
            transposed,
            extra,
            groups,
        ),
        scale=4,
    )


def _affine(draw, shape, dtype=torch.float32):
    weight = draw.one(None, draw.floats(shape, dtype=dtype))
    return weight, None if weight is None else draw.floats(shape, dtype=dtype)


@case("layer_norm.default")
def _layer_norm(draw):
    inner, dtype = draw.shape(1, 2, smallest=2), draw.one(*FLOATS)
    x = draw.floats((*draw.shape(0, 2), *inner), dtype=dtype)
    return Case((x, list(inner), *_affine(draw, inner, dtype), 1e-3), scale=8)


@case("native_layer_norm.default")
def _native_layer_norm(draw):
    inner = draw.shape(1, 2, smallest=2)
    x = draw.floats((*draw.shape(1, 2, smallest=1), *inner))
    return Case((x, list(inner), *_affine(draw, inner), 1e-3), gradient=False, scale=8)


@case("rms_norm.default")
def _rms_norm(draw):
    inner, dtype = draw.shape(1, 2, smallest=2), draw.one(*FLOATS)
    x = draw.floats((*draw.shape(1, 2, smallest=1), *inner), dtype=dtype)
    return Case((x, list(inner), _affine(draw, inner, dtype)[0], draw.one(None, 1e-3)), scale=8)


@case("group_norm.default")
def _group_norm(draw):
    groups = draw.int(1, 3)
    channels = groups * draw.int(1, 2)
    x = draw.floats((2, channels, *draw.shape(1, 2, smallest=2)))
    return Case((x, groups, *_affine(draw, (channels,)), 1e-3), scale=8)


@case("native_group_norm.default")
def _native_group_norm(draw):
    groups = draw.int(1, 3)
    channels = groups * 2
    x = draw.floats((2, channels, 3, 2))
    return Case((x, *_affine(draw, (channels,)), 2, channels, 6, groups, 1e-3), gradient=False, scale=8)


def _batch(draw):
    channels = size(draw)
    return draw.floats((4, channels, *draw.shape(0, 2, smallest=2))), channels


@case("_native_batch_norm_legit_functional.default")
def _batch_norm(draw):
    x, c = _batch(draw)
    running = (draw.floats((c,)), draw.floats((c,), 0.5, 2))
    training = draw.flag()
    case = Case((x, *_affine(draw, (c,)), *running, training, 0.1, 1e-3), gradient=False, scale=8)
    if not training:
        case.outputs = 1
    return case


@case("_native_batch_norm_legit_no_training.default")
def _batch_norm_evaluation(draw):
    x, c = _batch(draw)
    args = (x, *_affine(draw, (c,)), draw.floats((c,)), draw.floats((c,), 0.5, 2), 0.1, 1e-3)
    return Case(args, gradient=False, outputs=1, scale=8)


@case("_native_batch_norm_legit.no_stats")
def _batch_norm_no_stats(draw):
    x, c = _batch(draw)
    return Case((x, *_affine(draw, (c,)), True, 0.1, 1e-3), scale=8, outputs=1)


@case("native_batch_norm.default")
def _native_batch_norm(draw):
    x, c = _batch(draw)
    return Case((x, *_affine(draw, (c,)), None, None, True, 0.1, 1e-3), scale=8, outputs=1)


@case("scaled_dot_product_attention.default")
def _attention(draw):
    batch, heads, width = draw.int(1, 2), draw.one(2, 4), draw.int(1, 4)
    queries, keys, grouped = size(draw), size(draw), draw.flag()
    kv_heads = heads // 2 if grouped else heads
    q = draw.floats((batch, heads, queries, width))
    k, v = draw.floats((batch, kv_heads, keys, width)), draw.floats((batch, kv_heads, keys, width + draw.int(0, 1)))
    causal = draw.flag()
    mask = None
    if not causal:
        shape = (batch, draw.one(1, heads), queries, keys)
        mask = draw.one(None, draw.bools(shape), draw.floats(shape))
    options = {"scale": draw.one(None, 0.3), "enable_gqa": grouped}
    return Case((q, k, v, mask, 0.0, causal), options, scale=4)


def _recurrent(states: int, gates: int, projection: bool = False):
    def build(draw: Draw) -> Case:
        width, hidden, layers, both = size(draw), draw.int(2, 3), draw.int(1, 2), draw.flag()
        biases, first, time = draw.flag(), draw.flag(), draw.int(1, 3)
        ways = 2 if both else 1
        out = hidden - 1 if projection and draw.flag() else hidden
        params = []
        for layer in range(layers):
            for _ in range(ways):
                inputs = width if layer == 0 else out * ways
                params += [draw.floats((gates * hidden, inputs)), draw.floats((gates * hidden, out))]
                params += [draw.floats((gates * hidden,)), draw.floats((gates * hidden,))] if biases else []
                params += [draw.floats((out, hidden))] if out != hidden else []
        x = draw.floats((2, time, width) if first else (time, 2, width))
        start = [draw.floats((layers * ways, 2, size)) for size in (out, hidden)[:states]]
        hx = start if states == 2 else start[0]
        return Case((x, hx, params, biases, layers, 0.0, False, both, first), scale=4)

    return build


CASES["aten.lstm.input"] = _recurrent(2, 4, projection=True)
CASES["aten.gru.input"] = _recurrent(1, 3)
CASES["aten.rnn_tanh.input"] = CASES["aten.rnn_relu.input"] = _recurrent(1, 1)


def _cell(states: int, gates: int):
    def build(draw: Draw) -> Case:
        width, hidden = size(draw), size(draw)
        hx = [draw.floats((2, hidden)) for _ in range(states)]
        weights = draw.floats((gates * hidden, width)), draw.floats((gates * hidden, hidden))
        bias = (draw.floats((gates * hidden,)), draw.floats((gates * hidden,))) if draw.flag() else ()
        return Case((draw.floats((2, width)), hx if states == 2 else hx[0], *weights, *bias), scale=4)

    return build


CASES["aten.lstm_cell.default"] = _cell(2, 4)
CASES["aten.gru_cell.default"] = _cell(1, 3)
CASES["aten.rnn_tanh_cell.default"] = CASES["aten.rnn_relu_cell.default"] = _cell(1, 1)


@case("_grouped_mm.default")
def _grouped_mm(draw):
    x, weight, ends = draw.one(
        ((32, 16), (4, 16, 24), (8, 8, 24, 32)),
        ((4, 8, 16), (4, 16, 24), None),
        ((8, 16), (16, 24), (8, 8, 16)),
        ((3, 8, 16), (16, 24), (8, 8, 24)),
    )
    dtype = draw.one(torch.bfloat16, torch.float32)
    ends = None if ends is None else torch.tensor(ends, dtype=torch.int32)
    return Case((draw.floats(x, dtype=dtype), draw.floats(weight, dtype=dtype), ends), gradient=False, scale=2)
