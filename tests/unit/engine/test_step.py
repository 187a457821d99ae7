"""The compiled step: accumulation, several steps per call, placement, rematerialisation, averages, frozen parts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxtrain import Trainer, config_io
from jaxtrain.errors import UserError
from jaxtrain.nn import Rngs
from jaxtrain.nn.remat import rematerialise
from jaxtrain.train.compilation.compiled import Compiled, RetraceError
from tests.unit.engine import runs
from tests.unit.engine.runs import arrays, assert_same_bits, difference, points, trained


@pytest.mark.usefixtures("optimised")
@pytest.mark.parametrize("count", [4, 16])
def test_steps_per_call_gives_the_same_bits_as_one_step_at_a_time(tmp_path, count):
    network = runs.task(runs.Network)
    one = trained(tmp_path / "one", network, train__steps=22)
    many = trained(tmp_path / "many", network, train__steps=22, train__steps_per_call=count)
    assert_same_bits(arrays(one), arrays(many))
    assert [p["loss"] for p in points(tmp_path / "one")] == [p["loss"] for p in points(tmp_path / "many")]


@pytest.mark.usefixtures("optimised")
def test_data_on_the_device_gives_the_same_bits_as_data_on_the_host(tmp_path):
    made = [trained(tmp_path / place, runs.task(runs.Network), data__placement=place) for place in ("device", "host")]
    assert [m.train_loader.on_device for m in made] == [True, False]
    assert_same_bits(*map(arrays, made))


@pytest.mark.parametrize("micro_batches", [2, 4])
def test_micro_batches_of_different_weight_equal_the_whole_batch(tmp_path, micro_batches):
    settings = {"optim__name": "sgd", "optim__clip_norm": None, "train__steps": 4}
    whole = trained(tmp_path / "whole", **settings)
    parts = trained(tmp_path / "parts", train__accumulate_steps=micro_batches, **settings)
    assert difference(arrays(parts), arrays(whole)) < 1e-6
    assert points(tmp_path / "parts")[0]["loss"] == pytest.approx(points(tmp_path / "whole")[0]["loss"], rel=1e-6)


def test_the_mean_of_micro_batch_means_is_the_originals_rule(tmp_path):
    made = runs.trainer(tmp_path, train__accumulate_steps=2, train__accumulate_mean="micro")
    batch, model = made.train_loader.host_batch(0), made.model()
    halves = [jax.tree.map(lambda rows: rows[part], batch) for part in (slice(0, 4), slice(4, 8))]
    losses = [
        float(runs.loss(model, half | jax.tree.map(lambda c: c[half["index"]], runs.data()), None, None).value)
        for half in halves
    ]
    made.train()
    assert points(tmp_path)[0]["loss"] == pytest.approx(np.mean(losses), rel=1e-6)


@pytest.mark.parametrize("policy", ["dots", "full"])
def test_rematerialised_blocks_train_to_the_same_parameters(tmp_path, policy):
    settings = {"optim__name": "sgd"}  # Adam would blow up the rounding of gradients that are zero
    plain = trained(tmp_path / "none", runs.task(runs.Network), **settings)
    again = trained(tmp_path / policy, runs.task(runs.Network), train__remat=policy, **settings)
    assert difference(arrays(again), arrays(plain)) < 1e-5
    assert int(again.state.buffers["blocks.0.norm.num_batches_tracked"]) == 8


@pytest.mark.parametrize(("policy", "most"), [("none", 1e9), ("dots", 0.7), ("full", 0.5)])
def test_rematerialised_blocks_keep_fewer_activations(policy, most):
    """Elements kept for the backward pass, as a share of what the plain model keeps."""
    model = runs.Network(8, rngs=nnx.Rngs(0))
    graphdef, state = nnx.split(model)
    x = jnp.ones((64, 4))

    def kept(chosen):
        def call(state):
            with rematerialise(chosen, {}, None):
                return nnx.merge(graphdef, state)(x, Rngs(jax.random.key(0))).sum()

        return sum(leaf.size for leaf in jax.tree.leaves(jax.vjp(call, state, has_aux=False)[1]))

    assert kept(policy) <= most * kept("none")


def test_rematerialisation_without_marked_blocks_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"train.remat: full.*marks no blocks"):
        trained(tmp_path, train__remat="full")


def test_averaged_weights_follow_their_rule(tmp_path):
    made = runs.trainer(tmp_path, optim__ema_decay=0.9, train__steps=1)
    before = jax.device_get(made.state.params)
    made.train()
    for key, after in jax.device_get(made.state.params).items():
        np.testing.assert_allclose(made.state.ema[key], 0.9 * before[key] + 0.1 * after, rtol=1e-6, atol=1e-8)


def test_evaluation_takes_the_averaged_weights_unless_told_otherwise(tmp_path):
    losses = []
    for averaged in (True, False):
        made = runs.trainer(tmp_path / str(averaged), optim__ema_decay=0.9, evaluation__averaged=averaged)
        made.program.data._sources["validation"] = made.source("train")
        made.train()
        losses.append(made.evaluate()["loss"])
    assert losses[0] > losses[1]  # the average lags behind while the loss falls


def test_a_frozen_parameter_stays_and_has_no_optimizer_state(tmp_path):
    chosen = runs.task(trainable=lambda key, config: not key.startswith("fc1"))
    made = runs.trainer(tmp_path, chosen)
    before = jax.device_get(made.state.frozen)
    made.train()
    assert set(made.state.opt_state.mu) == {"fc2.weight", "fc2.bias"}
    assert_same_bits(before, jax.device_get(made.state.frozen))


def test_groups_log_their_learning_rates(tmp_path):
    chosen = runs.task(param_group=lambda key, config: "head" if key.startswith("fc2") else "default")
    trained(tmp_path, chosen, optim__groups={"head": {"lr": 1e-3}}, train__steps=1)
    first = points(tmp_path)[0]
    assert (first["lr"], first["lr/head"]) == pytest.approx((1e-2, 1e-3))


def test_the_logged_rate_is_the_one_that_the_step_used(tmp_path):
    trained(tmp_path, optim__schedule={"name": "linear", "warmup_steps": 2}, train__steps=6)
    assert [p["lr"] for p in points(tmp_path)] == pytest.approx([0, 5e-3, 1e-2, 7.5e-3, 5e-3, 2.5e-3])


@pytest.mark.parametrize("policy", ["bf16", "fp16"])
def test_low_precision_lowers_the_loss_as_float32_does(tmp_path, policy):
    losses = {}
    for name in ("fp32", policy):
        trained(tmp_path / name, precision__policy=name, train__steps=60)
        losses[name] = [p["loss"] for p in points(tmp_path / name)]
    first, last = losses["fp32"][0], {name: np.mean(values[-10:]) for name, values in losses.items()}
    assert last["fp32"] < 0.2 * first
    assert abs(last[policy] - last["fp32"]) < 0.02 * first


def test_bf16_params_keeps_weights_and_moments_in_bfloat16(tmp_path):
    made = trained(tmp_path, precision__policy="bf16_params")
    dtypes = {leaf.dtype for leaf in jax.tree.leaves((made.state.params, made.state.opt_state.mu))}
    assert dtypes == {jnp.dtype("bfloat16")}


def test_a_second_trace_names_the_argument_that_changed():
    compiled = Compiled(jax.jit(lambda state, batch: state + batch["x"].sum()), "the training step", batch=1)
    compiled(jnp.float32(0), {"x": jnp.ones((8, 4))})
    with pytest.raises(RetraceError, match=r"batch\['x'\]: float32\[8, 4\] -> float32\[6, 4\]"):
        compiled(jnp.float32(0), {"x": jnp.ones((6, 4))})
    with pytest.raises(RetraceError, match=r"state: float32\[\] -> float32\[2\]"):
        compiled(jnp.zeros(2), {"x": jnp.ones((8, 4))})


def test_a_type_error_of_the_users_own_code_is_raised_as_it_is():
    def loss(state, batch):
        raise TypeError("add got incompatible shapes")

    with pytest.raises(TypeError, match="add got incompatible shapes"):
        Compiled(jax.jit(loss), "the training step", batch=1)(jnp.float32(0), {"x": jnp.ones((8, 4))})


def test_announced_shapes_compile_once_each():
    compiled = Compiled(jax.jit(lambda batch: batch.sum()), "the training step", batch=0, shapes=2)
    for size in (4, 8, 4, 8):
        compiled(jnp.ones(size))
    assert len(compiled.programs) == 2
    with pytest.raises(RetraceError):
        compiled(jnp.ones(16))


def test_either_weights_are_exported(tmp_path):
    from safetensors.numpy import load_file

    from jaxtrain.export import export_weights

    arguments = ["--config", "configs/digits_tiny.yaml", f"run.dir={tmp_path}", "optim.ema_decay=0.9", "run.quiet=true"]
    settings = ["train.steps=4", "evaluation.every_epochs=null", "tracking.tensorboard=false", "shard.devices=1"]
    task, config = config_io.load(arguments[1], [*arguments[2:], *settings])
    made = Trainer(config=config, task=task)
    made.train()
    for averaged, kept in ((True, made.state.ema), (False, made.state.params)):
        path = export_weights(tmp_path, tmp_path / f"{averaged}.safetensors", "last", averaged)
        exported = load_file(path)
        assert_same_bits({key: exported[key] for key in kept}, jax.device_get(kept))
