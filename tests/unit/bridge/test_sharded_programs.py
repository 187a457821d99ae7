"""The compiled program of a sharded step: what crosses between the devices, and what is computed again."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import jaxtrain
from jaxtrain.runtime.collectives import collectives
from jaxtrain.runtime.hlo import Program


class Net(nn.Module):
    def __init__(self, again):
        super().__init__()
        torch.manual_seed(0)
        self.again = again
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64)) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = x + (checkpoint(layer, x, use_reentrant=False) if self.again else layer(x))
        return x


def lowered(shard, again=False):
    """Run one step; return it, and its program before XLA's passes."""
    module = Net(again)
    step = jaxtrain.compile(
        module, lambda module, x: module(x).square().mean(), torch.optim.AdamW(module.parameters()), shard=shard
    )
    x = torch.randn(32, 64)
    step(x)
    (program,) = step.programs
    given = step.weights.arrays, step.opt_state, step.grads, [step.weights.place(x.numpy())], (), step.updates.numbers()
    return step, program.jitted.lower(*given, None, np.uint32(1))


def compiled(shard):
    """Run one step; return it, and its optimised program as text."""
    step, program = lowered(shard)
    return step, program.compile().as_text()


def bytes_of(step) -> list[int]:
    return sorted(array.nbytes for array in step.weights.arrays.values())


@pytest.mark.parametrize("shard", ["fsdp", "shard_grad_op"])
def test_weights_are_gathered_once_each_and_no_gradient_ever_is(shard):
    """A gathered gradient would be one more all-gather of a weight's size. XLA's compiler for the CPU writes a
    reduce-scatter as an all-reduce of which each device uses its part; on a GPU it is one."""
    step, text = compiled(shard)
    moved = collectives(text)
    assert sorted(one.size for one in moved if one.kind == "all-gather") == bytes_of(step)
    reduced = [one for one in moved if one.kind in ("all-reduce", "reduce-scatter")]
    loss = 4
    assert sum(one.size for one in reduced) == sum(bytes_of(step)) + loss
    assert {one.kind for one in moved} <= {"all-gather", "all-reduce", "reduce-scatter"}


@pytest.mark.parametrize("shard", ["fsdp", "shard_grad_op"])
def test_every_moment_is_an_eighth_on_each_device_before_and_after(shard):
    step, text = compiled(shard)
    for key, entries in step.opt_state.items():
        for name in ("exp_avg", "exp_avg_sq"):
            assert entries[name].addressable_shards[0].data.size * 8 == entries[name].size, (key, name)
    inputs = [i for i in Program(text).computations[Program(text).entry].values() if i.opcode == "parameter"]
    whole = sum(array.size for array in step.weights.arrays.values())
    weights = whole if shard == "shard_grad_op" else whole // 8
    batch = 32 * 64 // 8
    scalars = sum(i.elements for i in inputs if not i.shapes[0][1])
    assert sum(i.elements for i in inputs) - scalars == weights + 2 * whole // 8 + batch


def test_a_checkpointed_layer_is_computed_again_behind_a_barrier():
    """In the program that XLA is given. Its compiler for the CPU removes barriers first, and then computes equal parts
    once; that for GPUs does not."""
    programs = [lowered("fsdp", again)[1].as_text() for again in (False, True)]
    assert [text.count("stablehlo.tanh") for text in programs] == [2, 4]
    barriers = [text.count("stablehlo.optimization_barrier") for text in programs]
    assert barriers[1] - barriers[0] == 2  # one for each layer
