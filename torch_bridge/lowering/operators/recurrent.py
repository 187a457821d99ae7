"""LSTM, GRU and plain recurrent layers as scans over time."""

import jax
import jax.numpy as jnp

from torch_bridge.lowering.dtypes import match_products
from torch_bridge.lowering.table import lowering


def _project(x, weight, bias):
    x, weight, bias = match_products(x, weight, bias)
    y = jnp.matmul(x, weight.T)
    return y if bias is None else y + bias


def _lstm_cell(state, projected, weights):
    """Compute one LSTM step. Gates in torch's order: input, forget, cell, output."""
    hidden, cell = state
    gates = projected + _project(hidden, weights["hh"], weights.get("bias_hh"))
    i, f, g, o = jnp.split(gates, 4, axis=-1)
    cell = jax.nn.sigmoid(f) * cell + jax.nn.sigmoid(i) * jnp.tanh(g)
    hidden = jax.nn.sigmoid(o) * jnp.tanh(cell)
    if "hr" in weights:
        hidden = _project(hidden, weights["hr"], None)
    return (hidden, cell), hidden


def _gru_cell(state, projected, weights):
    """Compute one GRU step. Gates in torch's order: reset, update, new; the reset acts after the recurrent product."""
    (hidden,) = state
    r, z, n = jnp.split(projected, 3, axis=-1)
    hr, hz, hn = jnp.split(_project(hidden, weights["hh"], weights.get("bias_hh")), 3, axis=-1)
    r, z = jax.nn.sigmoid(r + hr), jax.nn.sigmoid(z + hz)
    hidden = (1 - z) * jnp.tanh(n + r * hn) + z * hidden
    return (hidden,), hidden


def _plain_cell(activation):
    def cell(state, projected, weights):
        hidden = activation(projected + _project(state[0], weights["hh"], weights.get("bias_hh")))
        return (hidden,), hidden

    return cell


def _layers(params, has_biases: bool, projected: bool) -> list[dict]:
    names = ["ih", "hh"] + ["bias_ih", "bias_hh"] * has_biases + ["hr"] * projected
    return [
        dict(zip(names, params[start : start + len(names)], strict=True)) for start in range(0, len(params), len(names))
    ]


def _run(call, cell, x, states, params, has_biases, num_layers, dropout, train, bidirectional, batch_first, real=None):
    """Run a recurrent layer; return the outputs and the last states. x: [time, batch, width], [batch, time, width] if
    batch_first, or [time, width]. states: each [layer * direction, batch, width]. real: bool [time, batch]; where
    False, the state stays and the output is 0."""
    lonely = x.ndim == 2
    if lonely:
        x, states = x[:, None], [state[:, None] for state in states]
    elif batch_first:
        x = jnp.swapaxes(x, 0, 1)
    directions = 2 if bidirectional else 1
    layers = _layers(params, has_biases, len(states) == 2 and states[0].shape[-1] != states[1].shape[-1])
    last = []
    for layer in range(num_layers):
        if layer and dropout and train:
            keep = jax.random.bernoulli(call.key(), 1 - dropout, x.shape)
            x = jnp.where(keep, x / (1 - dropout), 0)
        outputs = []
        for direction in range(directions):
            which = layer * directions + direction
            weights = layers[which]
            projected = _project(x, weights["ih"], weights.get("bias_ih"))
            start = tuple(state[which].astype(projected.dtype) for state in states)
            step = _step(cell, weights, real is not None)
            rows = projected if real is None else (projected, real)
            end, output = jax.lax.scan(step, start, rows, reverse=direction == 1)
            outputs.append(output)
            last.append(end)
        x = jnp.concatenate(outputs, axis=-1) if directions == 2 else outputs[0]
    finals = [jnp.stack(state) for state in zip(*last, strict=True)]
    if lonely:
        return (x[:, 0], *(state[:, 0] for state in finals))
    return (jnp.swapaxes(x, 0, 1) if batch_first else x, *finals)


def _step(cell, weights, packed: bool):
    if not packed:
        return lambda state, row: cell(state, row, weights)

    def step(state, row):
        projected, real = row
        moved, output = cell(state, projected, weights)
        keep = real[:, None]
        return tuple(jnp.where(keep, new, old) for new, old in zip(moved, state, strict=True)), output * keep

    return step


_CELLS = {
    "LSTM": _lstm_cell,
    "GRU": _gru_cell,
    "RNN_TANH": _plain_cell(jnp.tanh),
    "RNN_RELU": _plain_cell(jax.nn.relu),
}


@lowering("lstm.input")
def lstm(call, x, hx, params, *options):
    return _run(call, _CELLS["LSTM"], x, hx, params, *options)


@lowering("gru.input")
def gru(call, x, hx, params, *options):
    return _run(call, _CELLS["GRU"], x, [hx], params, *options)


@lowering("rnn_tanh.input")
def rnn_tanh(call, x, hx, params, *options):
    return _run(call, _CELLS["RNN_TANH"], x, [hx], params, *options)


@lowering("rnn_relu.input")
def rnn_relu(call, x, hx, params, *options):
    return _run(call, _CELLS["RNN_RELU"], x, [hx], params, *options)


@lowering("lstm_cell.default")
def lstm_cell(call, x, hx, w_ih, w_hh, b_ih=None, b_hh=None):
    weights = {"hh": w_hh, "bias_hh": b_hh}
    return _lstm_cell(tuple(hx), _project(x, w_ih, b_ih), weights)[0]


@lowering("gru_cell.default")
def gru_cell(call, x, hx, w_ih, w_hh, b_ih=None, b_hh=None):
    return _gru_cell((hx,), _project(x, w_ih, b_ih), {"hh": w_hh, "bias_hh": b_hh})[1]


@lowering("rnn_tanh_cell.default")
def rnn_tanh_cell(call, x, hx, w_ih, w_hh, b_ih=None, b_hh=None):
    return jnp.tanh(_project(x, w_ih, b_ih) + _project(hx, w_hh, b_hh))


@lowering("rnn_relu_cell.default")
def rnn_relu_cell(call, x, hx, w_ih, w_hh, b_ih=None, b_hh=None):
    return jax.nn.relu(_project(x, w_ih, b_ih) + _project(hx, w_hh, b_hh))


@lowering("torch_bridge.recurrent.default")
def recurrent(call, kind, x, states, params, has_biases, both, batch_first):
    return list(_run(call, _CELLS[kind], x, states, params, has_biases, 1, 0.0, False, both, batch_first))


@lowering("torch_bridge.recurrent_backward.default")
def recurrent_backward(call, kind, slopes, x, states, params, has_biases, both, batch_first):
    def forward(x, states, params):
        return recurrent(call, kind, x, states, params, has_biases, both, batch_first)

    outputs, pull = jax.vjp(forward, x, list(states), list(params))
    slope, of_states, of_params = pull([s.astype(y.dtype) for s, y in zip(slopes, outputs, strict=True)])
    return [slope, *of_states, *of_params]
