"""shard.strategy: ddp_local, every device its own rows and one sum."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.config import ShardConfig
from jaxtrain.errors import UserError
from jaxtrain.runtime.mesh import make_layout
from jaxtrain.task import Loss
from jaxtrain.train.step.local_data_parallel import per_device
from tests.unit.engine import runs
from tests.unit.engine.runs import arrays, difference, trained

LOCAL = {"shard__strategy": "ddp_local", "shard__devices": 4}
SGD = {"optim__name": "sgd", "optim__clip_norm": None, "train__steps": 4}


def test_devices_whose_rows_weigh_differently_equal_the_whole_batch(tmp_path):
    whole, parts = trained(tmp_path / "whole", **SGD), trained(tmp_path / "parts", **LOCAL, **SGD)
    assert difference(arrays(parts), arrays(whole)) < 1e-6


def test_a_step_sends_one_array(tmp_path):
    made = runs.trainer(tmp_path, runs.task(runs.Network), **LOCAL)
    program = made.program.train_step()
    _, _, batch = next(iter(made.train_loader.batches([(0, 1)])))
    program(made.state, batch, made.program.hyper(), made.program.columns(made.train_loader))
    sent = re.findall(r"= (.*) (?:all-|reduce-scatter|collective-)[a-z-]*\(", program.programs[0].as_text())
    assert [shapes.count("f32[") for shapes in sent] == [1]


def test_batch_norm_sees_the_rows_of_its_device(tmp_path):
    """Two devices with the same rows each: statistics as of those rows alone, with their own Bessel's correction."""
    half = {name: column[:4] for name, column in runs.data().items()}
    twice = {name: np.concatenate([column, column]) for name, column in half.items()}
    network = runs.task(runs.Network)
    settings = {**SGD, "train__steps": 1, "data__shuffle": False}
    one = trained(tmp_path / "one", network, half, data__batch_size=4, **settings)
    two = trained(tmp_path / "two", network, twice, shard__strategy="ddp_local", shard__devices=2, **settings)
    statistics = [{n: arrays(made)[f"blocks.0.norm.running_{n}"] for n in ("mean", "var")} for made in (one, two)]
    assert difference(*statistics) < 1e-6


@pytest.fixture(scope="module")
def joined():
    """What four devices make of gradients drawn from their keys, weights 1 to 4, and buffers that tell the device."""
    layout = make_layout(ShardConfig(strategy="ddp_local", devices=4))

    def compute(state, batch, rng, scale, numbers):
        weight, ids = batch["weight"].sum(), batch["id"][0, 0]
        buffers = {"count": 2**24 + 1 + ids, "small": ids.astype(jnp.int8), "mean": 10.0 + ids}
        return {"w": jax.random.uniform(rng, (3,))}, Loss(weight, weight, {"part": weight}), buffers, weight

    batch = {"weight": jnp.arange(1.0, 5)[None], "id": jnp.arange(4)[None]}
    return jax.jit(per_device(compute, layout, False))({}, batch, jax.random.key(0), jnp.float32(1), {})


def test_every_device_draws_its_own_noise(joined):
    draws = [jax.random.uniform(jax.random.fold_in(jax.random.key(0), device), (3,)) for device in range(4)]
    want = np.average(draws, axis=0, weights=[1, 2, 3, 4])
    np.testing.assert_allclose(joined[0]["w"], want, rtol=1e-6)


def test_loss_and_parts_are_weighted_means_and_tokens_a_sum(joined):
    loss, tokens = joined[1], joined[3]
    assert (float(loss.value), float(loss.weight), float(loss.parts["part"]), float(tokens)) == (3.0, 10.0, 3.0, 10.0)


def test_buffers_are_the_first_devices_to_the_last_bit(joined):
    buffers = jax.device_get(joined[2])
    assert (buffers["count"], buffers["small"], buffers["mean"]) == (2**24 + 1, 0, 10.0)
    assert buffers["small"].dtype == np.int8


def test_layers_cannot_be_split_too():
    with pytest.raises(UserError, match=r"shard\.tensor"):
        make_layout(ShardConfig(strategy="ddp_local", tensor=2))
