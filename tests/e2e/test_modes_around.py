"""Modes around a run that see each of torch's operations, or move new tensors: torch runs it, or it is refused."""

import contextlib

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import TensorDataset
from torch.utils.flop_counter import FlopCounterMode

import jaxtrain
from jaxtrain import Trainer, UserError
from jaxtrain.accelerate import Accelerator
from tests.e2e.loops import assert_same, batches, mse, pair, torch_step
from tests.e2e.trainings import X, Y, config, mlp


class Doubles(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        return found * 2 if func is torch.nn.functional.linear else found


class DoublesBelow(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        return found * 2 if func is torch.ops.aten.addmm.default else found


def halved():
    return saved_tensors_hooks(lambda tensor: tensor * 0.5, lambda tensor: tensor)


AROUND = {"functions": Doubles, "operators": DoublesBelow, "saved tensors": halved}


@pytest.mark.parametrize("around", AROUND)
def test_a_compiled_step_leaves_calls_inside_modes_to_torch(around, caplog):
    (theirs, their_optimizer), (ours, optimizer) = pair()
    plain, step = torch_step(theirs, their_optimizer), jaxtrain.compile(ours, mse, optimizer)
    for call in (plain, step):
        for number, batch in enumerate(batches(4)):
            with AROUND[around]() if number > 1 else contextlib.nullcontext():
                call(batch)
    step.sync()
    assert_same(theirs, ours)
    assert "around the step sees each of torch's own operations" in caplog.text


def test_flops_of_an_evaluation_and_of_a_prepared_module_are_counted_as_in_torch():
    theirs, ours = pair()[0][0], pair()[1][0]
    step = jaxtrain.compile(ours, mse, torch.optim.SGD(ours.parameters(), 0.1))
    prepared = Accelerator(cpu=True).prepare(pair()[0][0])
    counted = []
    for forward in (theirs, step.eval(), prepared):
        forward(batches(1)[0][0])
        with FlopCounterMode(display=False) as flops:
            forward(batches(1)[0][0])
        counted.append(flops.get_total_flops())
    assert counted == [counted[0]] * 3 != [0] * 3


@pytest.mark.parametrize(
    ("around", "words"), [(Doubles, "Doubles is on around"), (lambda: torch.device("meta"), "default device is meta")]
)
def test_a_trainer_refuses_what_it_would_not_follow(around, words, tmp_path):
    make = lambda: Trainer(mlp(), TensorDataset(X, Y), None, config(tmp_path), loss=nn.MSELoss())
    trainer, module = make(), mlp()
    with around(), pytest.raises(UserError, match=words):
        trainer.train()
    with around(), pytest.raises(UserError, match=words):
        Trainer(module, TensorDataset(X, Y), None, config(tmp_path), loss=nn.MSELoss())
