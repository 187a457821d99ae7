"""Update rules of torch.optim in JAX, for one parameter each: `RULES["AdamW"]` equals `torch.optim.AdamW`.

A rule reads the options of a torch parameter group. Numbers that schedulers change (lr, betas, momentum, weight decay)
enter the compiled step as arrays; switches (amsgrad, nesterov, maximize, ...) decide what is compiled. Arithmetic is in
float32 for every parameter dtype. State keeps torch's names and is stored in the dtype that torch uses.

Source of every rule: the single-tensor functions of torch.optim, PyTorch 2.13.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

State = dict[str, jax.Array]
Numbers = Mapping[str, jax.Array]
Switches = frozenset[str]
ALL_MOMENTS = {"momentum": 1.0, "amsgrad": True, "centered": True}  # options with which a rule has all its moments
Update = Callable[[jax.Array, jax.Array, State, Numbers, Switches], tuple[jax.Array, State]]


@dataclasses.dataclass(frozen=True)
class Rule:
    """The update rule of a torch optimizer for one parameter.

    moments: a group's options -> {name of a state tensor of the parameter's shape: its initial value}.
    scalars: a group's options -> {name of further scalar state: its initial value}. `step` counts the updates.
    numbers: a group's options -> the numbers of the update, computed in double precision on the host.
    switches: a group's options -> the names of those that are on.
    update: (gradient, parameter, state, numbers, switches) -> parameter, state; `step` is already incremented.
    counts: True if torch keeps `step` in its state.
    """

    moments: Callable[[Mapping[str, Any]], dict[str, float]]
    update: Update
    numbers: Callable[[Mapping[str, Any]], dict[str, float]] = lambda group: {}
    scalars: Callable[[Mapping[str, Any]], dict[str, float]] = lambda group: {}
    switches: Callable[[Mapping[str, Any]], Switches] = lambda group: frozenset()
    counts: bool = True


def init(rule: Rule, param: jax.Array, group: Mapping[str, Any]) -> State:
    """Return the state of a parameter before its first update."""
    state = {name: jnp.full_like(param, value) for name, value in rule.moments(group).items()}
    scalars = {name: jnp.float32(value) for name, value in rule.scalars(group).items()}
    return {"step": jnp.float32(0), **scalars, **state}


def switches_of(rule: Rule, group: Mapping[str, Any]) -> Switches:
    """Return the options of a group that decide what is compiled, including whether there is weight decay."""
    on = {name for name in ("maximize", "amsgrad", "nesterov", "centered") if group.get(name)}
    if group.get("weight_decay"):
        on.add("decay")
    if group.get("decoupled_weight_decay"):
        on.add("decoupled")
    return frozenset(on) | rule.switches(group)


def numbers_of(rule: Rule, group: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a group's next update: lr, weight_decay and the rule's own."""
    return {
        "lr": float(group["lr"]),
        "weight_decay": float(group.get("weight_decay", 0.0)),
        **{name: float(value) for name, value in rule.numbers(group).items()},
    }


def apply(
    rule: Rule, grad: jax.Array, param: jax.Array, state: State, numbers: Numbers, switches: Switches
) -> tuple[jax.Array, State]:
    """Apply one update to one parameter. Complex parameters are treated as pairs of real numbers, as in torch."""
    if jnp.iscomplexobj(param):
        pair = lambda x: jnp.stack([x.real, x.imag], -1) if jnp.iscomplexobj(x) else x
        whole = lambda x, like: jax.lax.complex(x[..., 0], x[..., 1]).astype(like.dtype)
        new, after = apply(rule, pair(grad), pair(param), {k: pair(v) for k, v in state.items()}, numbers, switches)
        return whole(new, param), {k: whole(after[k], v) if jnp.iscomplexobj(v) else after[k] for k, v in state.items()}
    grad, wide = grad.astype(jnp.float32), param.astype(jnp.float32)
    moments = {key: value.astype(jnp.float32) for key, value in state.items()}
    moments["step"] = moments["step"] + 1
    if "maximize" in switches:
        grad = -grad
    if "decay" in switches:
        if "decoupled" in switches:
            wide = wide * (1 - numbers["lr"] * numbers["weight_decay"])
        else:
            grad = grad + numbers["weight_decay"] * wide
    new, after = rule.update(grad, wide, moments, numbers, switches)
    return new.astype(param.dtype), {key: (moments | after)[key].astype(value.dtype) for key, value in state.items()}


def _betas(group: Mapping[str, Any]) -> dict[str, float]:
    """Return both betas, their complements and logarithms, computed before the cast to float32 loses digits."""
    first, second = (float(beta) for beta in group["betas"])
    log = lambda beta: math.log(beta) if beta > 0 else -math.inf
    return {
        "beta1": first,
        "beta2": second,
        "rest1": 1 - first,
        "rest2": 1 - second,
        "log1": log(first),
        "log2": log(second),
        "eps": float(group.get("eps", 0.0)),
    }


def _correction(step: jax.Array, log_beta: jax.Array) -> jax.Array:
    """Return 1 - beta^step, accurate also for beta near 1."""
    return -jnp.expm1(step * log_beta)


def _sgd(grad, param, state, n, on):
    if "momentum" in on:
        first = state["step"] == 1  # torch initialises the buffer with the undamped gradient
        buffer = jnp.where(first, grad, n["momentum"] * state["momentum_buffer"] + n["undamped"] * grad)
        state = {"momentum_buffer": buffer}
        grad = grad + n["momentum"] * buffer if "nesterov" in on else buffer
    else:
        state = {}
    return param - n["lr"] * grad, state


def _adam(grad, param, state, n, on):
    mean = state["exp_avg"] + n["rest1"] * (grad - state["exp_avg"])
    square = n["beta2"] * state["exp_avg_sq"] + n["rest2"] * grad * grad
    after = {"exp_avg": mean, "exp_avg_sq": square}
    if "amsgrad" in on:
        square = after["max_exp_avg_sq"] = jnp.maximum(state["max_exp_avg_sq"], square)
    size = jnp.sqrt(square) / jnp.sqrt(_correction(state["step"], n["log2"])) + n["eps"]
    return param - n["lr"] / _correction(state["step"], n["log1"]) * mean / size, after


def _rmsprop(grad, param, state, n, on):
    square = n["alpha"] * state["square_avg"] + n["rest"] * grad * grad
    after = {"square_avg": square}
    if "centered" in on:
        mean = after["grad_avg"] = state["grad_avg"] + n["rest"] * (grad - state["grad_avg"])
        square = square - mean * mean
    step = grad / (jnp.sqrt(square) + n["eps"])
    if "momentum" in on:
        step = after["momentum_buffer"] = n["momentum"] * state["momentum_buffer"] + step
    return param - n["lr"] * step, after


def _adagrad(grad, param, state, n, on):
    total = state["sum"] + grad * grad
    rate = n["lr"] / (1 + (state["step"] - 1) * n["lr_decay"])
    return param - rate * grad / (jnp.sqrt(total) + n["eps"]), {"sum": total}


def _adadelta(grad, param, state, n, on):
    square = n["rho"] * state["square_avg"] + n["rest"] * grad * grad
    move = jnp.sqrt(state["acc_delta"] + n["eps"]) / jnp.sqrt(square + n["eps"]) * grad
    moved = n["rho"] * state["acc_delta"] + n["rest"] * move * move
    return param - n["lr"] * move, {"square_avg": square, "acc_delta": moved}


def _adamax(grad, param, state, n, on):
    mean = state["exp_avg"] + n["rest1"] * (grad - state["exp_avg"])
    size = jnp.maximum(n["beta2"] * state["exp_inf"], jnp.abs(grad) + n["eps"])
    return param - n["lr"] / _correction(state["step"], n["log1"]) * mean / size, {"exp_avg": mean, "exp_inf": size}


LOG_NADAM = math.log(0.96)


def _nadam(grad, param, state, n, on):
    weight = lambda step: n["beta1"] * (1 - 0.5 * jnp.exp(LOG_NADAM * step * n["momentum_decay"]))
    now, then = weight(state["step"]), weight(state["step"] + 1)
    product = state["mu_product"] * now
    mean = state["exp_avg"] + n["rest1"] * (grad - state["exp_avg"])
    square = n["beta2"] * state["exp_avg_sq"] + n["rest2"] * grad * grad
    size = jnp.sqrt(square / _correction(state["step"], n["log2"])) + n["eps"]
    param = param - n["lr"] * (1 - now) / (1 - product) * grad / size
    param = param - n["lr"] * then / (1 - product * then) * mean / size
    return param, {"mu_product": product, "exp_avg": mean, "exp_avg_sq": square}


def _radam(grad, param, state, n, on):
    mean = state["exp_avg"] + n["rest1"] * (grad - state["exp_avg"])
    square = n["beta2"] * state["exp_avg_sq"] + n["rest2"] * grad * grad
    unbiased = mean / _correction(state["step"], n["log1"])
    # rho_t = rho_inf - 2 t b^t / (1 - b^t) loses digits early in a run; with u = -t log b the difference is accurate
    u = -state["step"] * n["log2"]
    small = u / 2 - u**2 / 12 + u**4 / 720 - u**6 / 30240
    rho = n["rho_rest"] - 2 / n["log2"] * jnp.where(u < 0.5, small, 1 - u / jnp.expm1(jnp.maximum(u, 0.25)))
    rho_inf = n["rho_inf"]
    share = (rho - 4) * (rho - 2) * rho_inf / ((rho_inf - 4) * (rho_inf - 2) * rho)
    rectified = jnp.sqrt(jnp.maximum(share, 0))
    size = jnp.sqrt(_correction(state["step"], n["log2"])) / (jnp.sqrt(square) + n["eps"])
    param = param - n["lr"] * unbiased * jnp.where(rho > 5, rectified * size, 1)
    return param, {"exp_avg": mean, "exp_avg_sq": square}


def _rprop(grad, param, state, n, on):
    sign = jnp.sign(grad * state["prev"])
    factor = jnp.where(sign > 0, n["up"], jnp.where(sign < 0, n["down"], 1.0))
    size = jnp.clip(state["step_size"] * factor, n["smallest"], n["largest"])
    grad = jnp.where(sign < 0, 0, grad)
    return param - jnp.sign(grad) * size, {"prev": grad, "step_size": size}


def _asgd(grad, param, state, n, on):
    step = state["step"]
    param = param * (1 - n["lambd"] * state["eta"]) - state["eta"] * grad
    average = jnp.where(state["mu"] == 1, param, state["ax"] + (param - state["ax"]) * state["mu"])
    eta = n["lr"] / jnp.power(1 + n["lambd"] * n["lr"] * step, n["alpha"])
    return param, {"ax": average, "eta": eta, "mu": 1 / jnp.maximum(1, step - n["t0"])}


def _lion(grad, param, state, n, on):
    mean = state["exp_avg"]
    param = param - n["lr"] * jnp.sign(n["beta1"] * mean + n["rest1"] * grad)
    return param, {"exp_avg": n["beta2"] * mean + n["rest2"] * grad}


def _rounded(x: jax.Array) -> jax.Array:
    """Round float32 to the values of bfloat16. A cast and its reverse would cancel in XLA (excess precision)."""
    return jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)


def _product(x: jax.Array, y: jax.Array) -> jax.Array:
    """Multiply matrices whose numbers are bfloat16's, summing in float32."""
    return jnp.matmul(x.astype(jnp.bfloat16), y.astype(jnp.bfloat16), preferred_element_type=jnp.float32)


def _lerp(start: jax.Array, end: jax.Array, weight: jax.Array, rest: jax.Array) -> jax.Array:
    """Return torch.lerp. rest: 1 - weight, computed in double precision."""
    return jnp.where(weight < 0.5, start + weight * (end - start), end - rest * (end - start))


def _muon(grad, param, state, n, on):
    buffer = _lerp(state["momentum_buffer"], grad, n["undamped"], n["momentum"])
    update = _lerp(grad, buffer, n["momentum"], n["undamped"]) if "nesterov" in on else buffer
    rows, columns = param.shape
    steps = next(int(name.removeprefix(_STEPS)) for name in on if name.startswith(_STEPS))
    if steps >= 100:
        raise ValueError("Number of steps must be less than 100 for computational efficiency")  # as torch does
    x = _rounded(update.T if rows > columns else update)
    x = _rounded(x / jnp.maximum(_rounded(jnp.sqrt(jnp.sum(x * x))), _rounded(n["eps"])))
    for _ in range(steps):  # torch's are products of bfloat16 matrices: what each of them returns is rounded
        gram = _rounded(_product(x, x.T))
        polynomial = _rounded(n["b"] * gram + n["c"] * _product(gram, gram))
        x = _rounded(n["a"] * x + _product(polynomial, x))
    scale = 0.2 * math.sqrt(max(rows, columns)) if "match_rms_adamw" in on else math.sqrt(max(1, rows / columns))
    return param - n["lr"] * scale * (x.T if rows > columns else x), {"momentum_buffer": buffer}


_STEPS = "ns_steps="


def _muon_numbers(group: Mapping[str, Any]) -> dict[str, float]:
    momentum = group["momentum"]
    coefficients = dict(zip("abc", group["ns_coefficients"], strict=True))
    return {"momentum": momentum, "undamped": 1 - momentum, "eps": group["eps"], **coefficients}


def _momentum(group: Mapping[str, Any]) -> Switches:
    return frozenset({"momentum"} if group.get("momentum") else ())


def _radam_numbers(group: Mapping[str, Any]) -> dict[str, float]:
    beta = float(group["betas"][1])
    rho_inf = 2 / (1 - beta) - 1
    return _betas(group) | {"rho_inf": rho_inf, "rho_rest": rho_inf + 2 / math.log(beta)}


def _adam_moments(group: Mapping[str, Any]) -> dict[str, float]:
    moments = {"exp_avg": 0.0, "exp_avg_sq": 0.0}
    return moments | ({"max_exp_avg_sq": 0.0} if group.get("amsgrad") else {})


def _rmsprop_moments(group: Mapping[str, Any]) -> dict[str, float]:
    moments = {"square_avg": 0.0}
    moments |= {"momentum_buffer": 0.0} if group.get("momentum") else {}
    return moments | ({"grad_avg": 0.0} if group.get("centered") else {})


_ADAM = Rule(_adam_moments, _adam, _betas)

RULES: dict[str, Rule] = {
    "SGD": Rule(
        lambda group: {"momentum_buffer": 0.0} if group.get("momentum") else {},
        _sgd,
        lambda group: {"momentum": group["momentum"], "undamped": 1 - group["dampening"]},
        switches=_momentum,
        counts=False,
    ),
    "Adam": _ADAM,
    "AdamW": dataclasses.replace(_ADAM, switches=lambda group: frozenset({"decoupled"})),
    "RMSprop": Rule(
        _rmsprop_moments,
        _rmsprop,
        lambda group: {
            "alpha": group["alpha"],
            "rest": 1 - group["alpha"],
            "eps": group["eps"],
            "momentum": group["momentum"],
        },
        switches=_momentum,
    ),
    "Adagrad": Rule(
        lambda group: {"sum": group["initial_accumulator_value"]},
        _adagrad,
        lambda group: {"lr_decay": group["lr_decay"], "eps": group["eps"]},
    ),
    "Adadelta": Rule(
        lambda group: {"square_avg": 0.0, "acc_delta": 0.0},
        _adadelta,
        lambda group: {"rho": group["rho"], "rest": 1 - group["rho"], "eps": group["eps"]},
    ),
    "Adamax": Rule(lambda group: {"exp_avg": 0.0, "exp_inf": 0.0}, _adamax, _betas),
    "NAdam": Rule(
        lambda group: {"exp_avg": 0.0, "exp_avg_sq": 0.0},
        _nadam,
        lambda group: _betas(group) | {"momentum_decay": group["momentum_decay"]},
        scalars=lambda group: {"mu_product": 1.0},
    ),
    "RAdam": Rule(lambda group: {"exp_avg": 0.0, "exp_avg_sq": 0.0}, _radam, _radam_numbers),
    "Rprop": Rule(
        lambda group: {"prev": 0.0, "step_size": group["lr"]},
        _rprop,
        lambda group: {
            "down": group["etas"][0],
            "up": group["etas"][1],
            "smallest": group["step_sizes"][0],
            "largest": group["step_sizes"][1],
        },
    ),
    "ASGD": Rule(
        lambda group: {"ax": 0.0},
        _asgd,
        lambda group: {"lambd": group["lambd"], "alpha": group["alpha"], "t0": group["t0"]},
        scalars=lambda group: {"eta": group["lr"], "mu": 1.0},
    ),
    "Muon": Rule(
        lambda group: {"momentum_buffer": 0.0},
        _muon,
        _muon_numbers,
        switches=lambda group: frozenset(
            {"decoupled", f"{_STEPS}{group['ns_steps']}", group["adjust_lr_fn"] or "original"}
        ),
        counts=False,
    ),
    "Lion": Rule(
        lambda group: {"exp_avg": 0.0},
        _lion,
        _betas,
        switches=lambda group: frozenset({"decoupled"}),
        counts=False,
    ),
}
