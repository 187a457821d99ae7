"""`precision.policy: fp8`: products in 8 bits, by emulation on a CPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain import nn
from jaxtrain.errors import UserError
from jaxtrain.nn import float8
from tests.chaos.runs import points
from tests.contract.tasks import assert_equal, final_parameters, flat, tiny

FEW = (
    "train.epochs=null",
    "train.steps=8",
    "train.log_every_steps=1",
    "evaluation.every_epochs=null",
    "optim.schedule.name=constant",
)


def drawn(*shape, seed=0):
    return jax.random.normal(jax.random.key(seed), shape).astype(jnp.bfloat16)


def relative(found, wanted) -> float:
    found, wanted = (np.asarray(x, np.float32) for x in (found, wanted))
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


def test_products_and_gradients_keep_what_three_and_two_bits_of_mantissa_hold():
    x, weight, grad = drawn(4, 8, 64), drawn(32, 64, seed=1), drawn(4, 8, 32, seed=2)
    wanted, exact = jax.vjp(lambda x, w: jnp.einsum("btd,od->bto", x, w), *(a.astype(jnp.float32) for a in (x, weight)))
    found, rounded = jax.vjp(float8.product, x, weight)
    assert 5e-3 < relative(found, wanted) < 4e-2
    for mine, its in zip(rounded(grad), exact(grad.astype(jnp.float32)), strict=True):
        assert 5e-3 < relative(mine, its) < 7e-2


@pytest.mark.parametrize("size", [2.0**-100, 2.0**100])
def test_a_tensor_of_any_size_is_scaled_into_the_format(size):
    x, weight = drawn(16, 32), drawn(16, 32, seed=1)
    np.testing.assert_array_equal(float8.product(x * size, weight), float8.product(x, weight) * size)


def test_zeros_give_zeros_and_what_is_not_finite_gives_nan():
    weight = drawn(16, 32)
    assert not float8.product(jnp.zeros((4, 32), jnp.bfloat16), weight).any()
    for strange in (jnp.inf, jnp.nan):
        assert jnp.isnan(float8.product(drawn(4, 32).at[0, 0].set(strange), weight)).all()


def in_eight_bits(function, *given) -> bool:
    with float8.products(True):
        return "f8_e4m3fn" in str(jax.make_jaxpr(function)(*given))


@pytest.mark.parametrize(("inputs", "outputs", "dtype", "taken"), [
    (32, 16, "bfloat16", True), (32, 10, "bfloat16", False), (24, 16, "bfloat16", False), (32, 16, "float32", False),
])  # fmt: skip
def test_layers_of_widths_in_steps_of_16_are_taken(inputs, outputs, dtype, taken):
    from flax import nnx

    layer = nn.Linear(inputs, outputs, rngs=nnx.Rngs(0))
    layer.weight.set_value(layer.weight[...].astype(dtype))
    assert in_eight_bits(layer, drawn(4, inputs)) is taken


def test_a_torch_modules_linear_layers_are_taken():
    pytest.importorskip("torch")
    from torch_bridge.lowering.operators.products import linear

    assert in_eight_bits(lambda x, w: linear(None, x, w), drawn(4, 32), drawn(16, 32))


def _steps_of(folder, policy, *overrides):
    """The training losses of digits, and what is there afterwards."""
    trainer = tiny("digits.classify", folder, *FEW, f"precision.policy={policy}", *overrides)
    trainer.train()
    return trainer, [values["loss"] for _, split, values in points(folder) if split == "train"]


def test_training_takes_eight_bits_and_evaluation_does_not(tmp_path):
    program = tiny("digits.classify", tmp_path, *FEW, "precision.policy=fp8").program
    state, batch, hyper, columns = program.abstract_arguments()
    assert "f8_e5m2" in str(jax.make_jaxpr(program.step())(state, batch, hyper, columns))
    of_model = state.params, state.frozen, state.buffers
    assert "f8_" not in str(jax.make_jaxpr(program.evaluation_step())(*of_model, batch, columns, hyper["numbers"]))


@pytest.mark.slow
def test_a_run_in_eight_bits_learns_as_one_in_sixteen(tmp_path):
    longer = ("train.steps=60",)
    losses = {policy: _steps_of(tmp_path / policy, policy, *longer)[1] for policy in ("bf16", "fp8")}
    ends = {policy: np.mean(values[-10:]) for policy, values in losses.items()}
    assert ends["fp8"] < 0.7 * np.mean(losses["fp8"][:5])
    assert abs(ends["fp8"] - ends["bf16"]) < 0.05 * ends["bf16"]


@pytest.mark.slow
def test_a_resumed_run_in_eight_bits_has_the_same_bits(tmp_path):
    saving = ("checkpoint.every_steps=4",)
    whole, _ = _steps_of(tmp_path / "whole", "fp8", *saving)
    _steps_of(tmp_path / "cut", "fp8", *saving, "train.steps=4")
    resumed, _ = _steps_of(tmp_path / "cut", "fp8", *saving)
    assert_equal(final_parameters(whole), final_parameters(resumed))
    assert_equal(flat(whole.state.opt_state), flat(resumed.state.opt_state))


@pytest.mark.parametrize(
    ("platform", "capability", "said"),
    [("gpu", (9, 0), None), ("gpu", (8, 9), None), ("cpu", None, None), ("tpu", None, "is offered on GPUs"),
     ("gpu", (8, 0), "needs a GPU of compute capability 8.9 or later (H100, L40S)")],
)  # fmt: skip
def test_devices_without_such_products_are_named(platform, capability, said):
    assert float8.lacking(platform, capability) == said


def test_a_compiled_step_refuses_it():
    import jaxtrain

    torch = pytest.importorskip("torch")
    module = torch.nn.Linear(16, 16)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with pytest.raises(UserError, match="precision: 'fp8' is not offered for a compiled step"):
        jaxtrain.compile(module, lambda module, x: module(x).mean(), optimizer, precision="fp8")
