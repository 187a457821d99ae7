"""Optimizers against torch's, or their published rule, over 100 steps from the same gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

from jaxtrain.config import GroupConfig, OptimConfig
from jaxtrain.errors import UserError
from jaxtrain.optim import optimizer as optimizers

SHAPES = {"encoder.weight": (7, 5), "encoder.bias": (7,), "conv.weight": (4, 3, 2), "head.weight": (3, 7), "gain": ()}
STEPS = 100


def start():
    rng = np.random.default_rng(0)
    return {key: rng.normal(size=shape).astype(np.float32) for key, shape in SHAPES.items()}


def gradients(step):
    rng = np.random.default_rng(100 + step)
    size = 10.0 ** rng.uniform(-4, 1)  # from far below to far above the clip
    return {key: np.asarray(size * rng.normal(size=shape), np.float32) for key, shape in SHAPES.items()}


def rate(step):
    return np.float32(1e-2 * (1 - step / STEPS))


def ours(config, group=lambda key: "default", steps=STEPS):
    params = {key: jax.numpy.asarray(value) for key, value in start().items()}
    optimizer = optimizers.build(config, params, group)
    decay = optimizers.rates(config, set(optimizer.groups.values()))["weight_decay"]
    scale = {name: value / config.lr for name, value in optimizers.rates(config, set(decay))["lr"].items()}
    update = jax.jit(optimizer.update)
    state = optimizer.init(params)
    for step in range(steps):
        lr = {name: rate(step) * factor for name, factor in scale.items()}
        params, state, _ = update(gradients(step), state, params, lr, decay)
    return jax.device_get(params), state


def theirs(make, clip=None, steps=STEPS, groups=None):
    params = {key: torch.nn.Parameter(torch.tensor(value)) for key, value in start().items()}
    optimizer = make(groups(params) if groups else list(params.values()))
    for step in range(steps):
        for key, grad in gradients(step).items():
            params[key].grad = torch.tensor(grad)
        if clip:
            torch.nn.utils.clip_grad_norm_(list(params.values()), clip)
        for group in optimizer.param_groups:
            group["lr"] = float(rate(step)) * group.get("factor", 1.0)
        optimizer.step()
    return {key: value.detach().numpy() for key, value in params.items()}


def difference(first, second):
    """Largest relative L2 over the arrays."""
    return max(np.linalg.norm(first[key] - second[key]) / np.linalg.norm(second[key]) for key in second)


@pytest.mark.parametrize(
    ("settings", "make"),
    [
        ({"name": "adamw"}, lambda p: torch.optim.AdamW(p)),
        (
            {"name": "adamw", "beta1": 0.8, "beta2": 0.95, "eps": 1e-6, "weight_decay": 0.3},
            lambda p: torch.optim.AdamW(p, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.3),
        ),
        ({"name": "adamw", "clip_norm": 0.5}, lambda p: torch.optim.AdamW(p)),
        ({"name": "adam", "weight_decay": 0.1}, lambda p: torch.optim.Adam(p, weight_decay=0.1)),
        ({"name": "sgd", "weight_decay": 0.1}, lambda p: torch.optim.SGD(p, weight_decay=0.1)),
        (
            {"name": "sgd", "weight_decay": 0.01, "momentum": 0.9, "clip_norm": 1.0},
            lambda p: torch.optim.SGD(p, momentum=0.9, weight_decay=0.01),
        ),
        (
            {"name": "sgd", "weight_decay": 0.0, "momentum": 0.9, "nesterov": True},
            lambda p: torch.optim.SGD(p, momentum=0.9, nesterov=True),
        ),
    ],
    ids=["adamw", "adamw-betas", "adamw-clip", "adam-l2", "sgd", "sgd-momentum-clip", "sgd-nesterov"],
)
def test_trajectories_equal_torchs_over_100_steps_to_1e_6(settings, make):
    config = OptimConfig(**{"lr": 1e-2, "clip_norm": None, **settings})
    assert difference(ours(config)[0], theirs(make, config.clip_norm)) < 1e-6


def test_adafactor_equals_its_published_rule_over_100_steps_to_1e_6():
    """Shazeer & Stern 2018, algorithms 4 to 6, in float64; transformers' Adafactor gives the same."""
    params = {key: value.astype(float) for key, value in start().items()}
    means = {key: [0.0, 0.0] for key in params}
    for step in range(STEPS):
        beta = 1 - (step + 1) ** -0.8
        for key, grad in gradients(step).items():
            square = grad.astype(float) ** 2 + 1e-30
            if grad.ndim >= 2:
                rows, columns = square.mean(-1, keepdims=True), square.mean(-2, keepdims=True)
                row, column = means[key] = [
                    beta * m + (1 - beta) * v for m, v in zip(means[key], (rows, columns), strict=True)
                ]
                second = row * column / row.mean(-2, keepdims=True)
            else:
                second = means[key][0] = beta * means[key][0] + (1 - beta) * square
            update = grad / np.sqrt(second)
            update = update / max(1.0, np.sqrt(np.mean(update**2)))
            params[key] = params[key] - rate(step) * (0.1 * params[key] + update)
    config = OptimConfig(name="adafactor", lr=1e-2, weight_decay=0.1, clip_norm=None)
    assert difference(ours(config)[0], params) < 1e-6


def test_lion_equals_its_published_rule_over_100_steps_to_1e_6():
    beta1, beta2, decay = 0.9, 0.99, 0.1
    params = {key: value.astype(float) for key, value in start().items()}
    mean = {key: np.zeros_like(value) for key, value in params.items()}
    for step in range(STEPS):
        for key, grad in gradients(step).items():
            direction = np.sign(beta1 * mean[key] + (1 - beta1) * grad)
            params[key] = params[key] - rate(step) * (direction + decay * params[key])
            mean[key] = beta2 * mean[key] + (1 - beta2) * grad
    config = OptimConfig(name="lion", lr=1e-2, beta2=beta2, weight_decay=decay, clip_norm=None)
    assert difference(ours(config)[0], params) < 1e-6


def test_muon_moves_matrices_as_torchs_up_to_its_bfloat16_and_the_rest_as_adamw():
    config = OptimConfig(name="muon", lr=1e-2, weight_decay=0.1, clip_norm=None)
    mine, state = ours(config)
    muon = lambda p: torch.optim.Muon(
        [x for x in p if x.ndim == 2], weight_decay=0.1, adjust_lr_fn="match_rms_adamw", nesterov=True
    )
    adam = lambda p: torch.optim.AdamW([x for x in p if x.ndim != 2], weight_decay=0.1)
    matrices, others = theirs(muon), theirs(adam)
    assert difference(mine, {key: matrices[key] for key in ("encoder.weight", "head.weight")}) < 2e-2
    assert difference(mine, {key: others[key] for key in ("encoder.bias", "conv.weight", "gain")}) < 1e-6
    assert set(state.nu) == {"encoder.bias", "conv.weight", "gain"}


def test_groups_have_their_own_rate_and_decay():
    config = OptimConfig(lr=1e-2, clip_norm=None, groups={"head": GroupConfig(lr=1e-3, weight_decay=0.5)})
    mine, _ = ours(config, lambda key: "head" if key.startswith("head") else "body")

    def groups(params):
        head = {"params": [params["head.weight"]], "weight_decay": 0.5, "factor": 0.1}
        return [head, {"params": [value for key, value in params.items() if key != "head.weight"]}]

    assert difference(mine, theirs(torch.optim.AdamW, groups=groups)) < 1e-6


def test_decay_spares_biases_and_gains_where_asked():
    config = OptimConfig(lr=1e-2, weight_decay=0.5, clip_norm=None, decay_bias_and_norm=False)

    def groups(params):
        plain = [value for value in params.values() if value.ndim <= 1]
        return [{"params": plain, "weight_decay": 0.0}, {"params": [v for v in params.values() if v.ndim > 1]}]

    assert difference(ours(config)[0], theirs(lambda p: torch.optim.AdamW(p, weight_decay=0.5), groups=groups)) < 1e-6


@pytest.mark.parametrize("max_norm", [1e-3, 1.0, 1e9])
def test_clipping_equals_torchs(max_norm):
    grads = gradients(3)
    clipped = optimizers.clip(grads, optimizers.global_norm(grads), max_norm)
    params = {key: torch.nn.Parameter(torch.zeros(np.shape(value))) for key, value in grads.items()}
    for key, grad in grads.items():
        params[key].grad = torch.tensor(grad)
    torch.nn.utils.clip_grad_norm_(list(params.values()), max_norm)
    for key, value in clipped.items():
        np.testing.assert_allclose(value, params[key].grad.numpy(), rtol=1e-6)


def test_the_norm_of_bfloat16_gradients_is_summed_in_float32():
    grads = {"weight": jax.numpy.full((1000,), 1.0, jax.numpy.bfloat16)}
    assert float(optimizers.global_norm(grads)) == pytest.approx(1000**0.5, rel=1e-6)


@pytest.mark.parametrize("name", ["adamw", "sgd", "lion", "muon", "adafactor"])
def test_bfloat16_parameters_stay_bfloat16(name):
    config = OptimConfig(name=name, momentum=0.9)
    params = {"weight": jax.numpy.ones((4, 3), jax.numpy.bfloat16), "bias": jax.numpy.ones(4, jax.numpy.bfloat16)}
    optimizer = optimizers.build(config, params, lambda key: "default")
    rates = {"default": 1e-2}
    state = optimizer.init(params)
    new, new_state, _ = optimizer.update(params, state, params, rates, rates)
    assert {value.dtype.name for value in new.values()} == {"bfloat16"}
    assert [leaf.dtype for leaf in jax.tree.leaves(new_state)] == [leaf.dtype for leaf in jax.tree.leaves(state)]


@pytest.mark.parametrize(("name", "theirs"), [("adamw", torch.optim.AdamW), ("sgd", torch.optim.SGD)])
def test_complex_parameters_move_as_torchs(name, theirs):
    rng = np.random.default_rng(0)
    draw = lambda: (rng.normal(size=4) + 1j * rng.normal(size=4)).astype(np.complex64)
    params = {"w": draw()}
    weight = torch.nn.Parameter(torch.from_numpy(params["w"].copy()))
    twin = theirs([weight], lr=1e-2, weight_decay=0.1)
    optimizer = optimizers.build(
        OptimConfig(name=name, clip_norm=1.0, momentum=0.0, decay_bias_and_norm=True), params, lambda key: "all"
    )
    state = optimizer.init(params)
    for _ in range(5):
        slope = draw()
        weight.grad = torch.from_numpy(slope.copy())
        torch.nn.utils.clip_grad_norm_([weight], 1.0)
        twin.step()
        lr, decay = {"all": np.float32(1e-2)}, {"all": np.float32(0.1)}
        params, state, _ = optimizer.update({"w": slope}, state, params, lr, decay)
    np.testing.assert_allclose(params["w"], weight.detach().numpy(), rtol=1e-5)


def belief(config):
    return optax.scale_by_belief(config.beta1, config.beta2, 1e-16)


def with_its_rate(config):
    return optax.adabelief(config.lr)


def nothing(config):
    return None


def test_an_optax_transformation_by_import_path_moves_as_in_optaxs_own_chain_to_1e_6():
    name = "tests.unit.engine.test_optimizers.belief"
    found, _ = ours(OptimConfig(name=name, weight_decay=0.1, clip_norm=None))
    chain = optax.chain(
        optax.scale_by_belief(0.9, 0.999, 1e-16), optax.add_decayed_weights(0.1), optax.scale_by_learning_rate(rate_at)
    )
    params, state = start(), chain.init(start())
    step = jax.jit(chain.update)
    for number in range(STEPS):
        updates, state = step(gradients(number), state, params)
        params = optax.apply_updates(params, updates)
    assert difference(found, jax.device_get(params)) < 1e-6


def rate_at(count):
    return 1e-2 * (1 - count / STEPS)


def test_a_step_that_is_not_accepted_leaves_an_imported_optimizers_state():
    optimizer = optimizers.build(
        OptimConfig(name="tests.unit.engine.test_optimizers.belief"), start(), lambda key: "default"
    )
    state = optimizer.init(start())
    rates = {"default": 0.1}
    params, moved, _ = optimizer.update(gradients(0), state, start(), rates, rates, accept=np.bool_(False))
    for before, after in zip(jax.tree.leaves((start(), state)), jax.tree.leaves((params, moved)), strict=True):
        np.testing.assert_array_equal(before, after)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("torch.optim.AdamW", r"is torch's; write optim\.name: adamw, or give the optimizer to Trainer\(optimizer="),
        ("torch.optim.Rprop", r"is torch's; give the optimizer to Trainer\(optimizer="),
        ("optax.adam", "optax.adam failed, called with the config: .* wanted a function of the config"),
        ("os.system", "os.system failed, called with the config: TypeError"),
        ("no_such_package.adam", "no_such_package.adam cannot be imported: No module named 'no_such_package'"),
        ("tests.unit.engine.test_optimizers.absent", "cannot be imported: module .* has no attribute 'absent'"),
        ("tests.unit.engine.test_optimizers.nothing", "returned NoneType, wanted an optax.GradientTransformation"),
        ("tests.unit.engine.test_optimizers.with_its_rate", "returned an optimizer with its learning rate in it"),
    ],
)
def test_an_import_path_that_gives_no_optimizer_is_refused(name, message):
    with pytest.raises(UserError, match=message):
        optimizers.build(OptimConfig(name=name), start(), lambda key: "default")


def test_an_unknown_optimizer_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="'adamx' is unknown; wanted adamw, adam, sgd, lion, muon, adafactor"):
        OptimConfig(name="adamx")


def test_the_norm_of_joined_arrays_is_the_norm():
    rng = np.random.default_rng(0)
    shapes = {"a": (4, 3), "b": (300, 300), "c": (), "d": (7,)}
    grads = {key: jnp.asarray(rng.normal(size=shape), jnp.float32) for key, shape in shapes.items()}
    plain, joined = (optimizers.build(OptimConfig(), grads, lambda key: "default", joined=j) for j in (False, True))
    np.testing.assert_allclose(joined.norm(grads), plain.norm(grads), rtol=1e-6)
    np.testing.assert_allclose(plain.norm(grads), np.sqrt(sum(float((g**2).sum()) for g in grads.values())), rtol=1e-5)
