"""Out of memory: the message says what needs how much and which settings help."""

import types

import jax
import jax.numpy as jnp
import pytest

from jaxtrain.config import TrainingConfig
from jaxtrain.train.compilation.compiled import Compiled
from jaxtrain.train.compilation.out_of_memory import Memory, OutOfMemoryError, bytes_per_device, explain, measure
from tests.unit.engine import runs

MEMORY = Memory(params=10**9, optimizer=2 * 10**9, columns=5 * 10**8, work=8 * 10**9, capacity=10**10)


def config(**sections):
    return TrainingConfig(**{"data": {"batch_size": 64}, **sections})


def test_every_setting_that_helps_is_named_with_what_it_saves():
    text = explain(config(), MEMORY, devices=8)
    for part in (
        "needs 11.50 GB on each device, which offers 10.00 GB",
        "1.00 GB parameters, 2.00 GB optimizer, 0.50 GB dataset, 8.00 GB activations",
        "train.accumulate_steps=2: micro-batches of 32 instead of 64, the same batch of 64, about 4.00 GB less",
        "data.batch_size=32, about 4.00 GB less",
        "train.remat=dots or full",
        "precision.policy=bf16",
        "data.placement=host",
        "shard.strategy=fsdp: parameters and optimizer over 8 devices, 2.62 GB less",
        "optim.name=adafactor",
    ):
        assert part in text


def test_what_is_already_set_is_not_named_again():
    settings = {
        "train": {"remat": "full", "accumulate_steps": 64},
        "precision": {"policy": "bf16"},
        "shard": {"strategy": "fsdp"},
        "optim": {"name": "sgd"},
    }
    text = explain(config(**settings), Memory(10**9, 0, 0, None, None), devices=8)
    for part in ("remat", "accumulate_steps", "batch_size", "bf16", "fsdp", "adafactor", "placement"):
        assert part not in text


def test_the_compiled_step_gives_the_numbers(tmp_path):
    made = runs.trainer(tmp_path)
    program = made.program.train_step()
    batch = next(made.train_loader.batches([(0, 1)]))[2]
    columns = made.program.columns(made.train_loader)
    made.state, _ = program(made.state, batch, made.program.hyper(), columns)
    memory = measure(made.state, columns, program.programs[0])
    assert memory.params == 4 * (4 * 8 + 8 + 8 + 1)
    assert memory.optimizer == 2 * memory.params + 4
    assert memory.columns == 4 * 5 * runs.SAMPLES
    assert memory.work > 0


def test_an_exhausted_device_raises_the_advice_instead_of_xlas_dump():
    def exhausted(*arguments):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9e9 bytes")

    compiled = Compiled(jax.jit(lambda batch: batch), "the step", batch=0, out_of_memory=lambda *_: "what helps: ...")
    compiled._programs[((jnp.zeros(2).shape, jnp.zeros(2).dtype),)] = types.SimpleNamespace(__call__=exhausted)
    compiled._programs = dict.fromkeys(compiled._programs, exhausted)
    with pytest.raises(OutOfMemoryError, match="what helps"):
        compiled(jnp.zeros(2))


def test_sharded_arrays_count_their_share():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    assert bytes_per_device({"w": jax.device_put(jnp.zeros((16, 4)), sharding)}) == 2 * 4 * 4
