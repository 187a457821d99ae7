"""What a torch file or another run holds reaches a run as torch would load it, or is refused in one sentence."""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from jaxtrain import Trainer, UserError
from jaxtrain.train.checkpoint import init_from
from tests.e2e.trainings import X, Y, config, mlp
from torch_bridge import files

ADAMW = {"name": "adamw", "lr": 1e-2, "weight_decay": 0.0, "clip_norm": None, "schedule": {"name": "constant"}}


def trainer_of(module, folder, **settings) -> Trainer:
    return Trainer(module, TensorDataset(X, Y), None, config(folder, **settings), loss=nn.MSELoss())


def assert_holds(trainer, module) -> None:
    for key, wanted in module.state_dict().items():
        np.testing.assert_array_equal(trainer.state_dict()[key], wanted.numpy(), err_msg=key)


class OldKeys(nn.Module):
    """Takes files of its first version, with another name and half the values."""

    _version = 2

    def __init__(self):
        super().__init__()
        self.body = mlp()

    def forward(self, x):
        return self.body(x)

    def _load_from_state_dict(self, state, prefix, metadata, *rest):
        if metadata.get("version", 1) < 2:
            for key in [key for key in state if key.startswith(f"{prefix}net.")]:
                state[key.replace("net.", "body.", 1)] = 2 * state.pop(key)
        super()._load_from_state_dict(state, prefix, metadata, *rest)


class WithHook(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = mlp()
        self.register_load_state_dict_pre_hook(self.rename)

    @staticmethod
    def rename(module, state, prefix, *rest):
        for key in [key for key in state if key.startswith(f"{prefix}net.")]:
            state[key.replace("net.", "body.", 1)] = 2 * state.pop(key)

    def forward(self, x):
        return self.body(x)


@pytest.mark.parametrize("kind", [OldKeys, WithHook])
def test_a_file_is_loaded_through_the_modules_own_hooks(kind, tmp_path):
    old = {f"net.{key}": value + 1 for key, value in mlp().state_dict().items()}
    torch.save(old, tmp_path / "old.pt")
    theirs = kind()
    theirs.load_state_dict(torch.load(tmp_path / "old.pt"))
    trainer = trainer_of(kind(), tmp_path / "run")
    init_from.apply(trainer, tmp_path / "old.pt")
    assert_holds(trainer, theirs)
    trainer = trainer_of(kind(), tmp_path / "run")
    trainer.load_state_dict(old)
    assert_holds(trainer, theirs)


def test_a_file_of_the_modules_present_version_is_not_converted(tmp_path):
    module = OldKeys()
    torch.save(nn.ModuleDict({"module": module}).state_dict(), tmp_path / "new.pt")  # as inside DDP
    trainer = trainer_of(OldKeys(), tmp_path / "run")
    init_from.apply(trainer, tmp_path / "new.pt")
    assert_holds(trainer, module)
    again = trainer_of(OldKeys(), tmp_path / "run")
    again.load_state_dict(torch.load(files.save(trainer.state_dict(), tmp_path / "again.pt")))
    assert_holds(again, module)


class Counting(nn.Module):
    def __init__(self, count: int):
        super().__init__()
        self.body, self.count = mlp(), count

    def forward(self, x):
        return self.body(x)

    def get_extra_state(self):
        return {"count": self.count}

    def set_extra_state(self, state):
        self.count = state["count"]


def test_extra_states_go_both_ways(tmp_path):
    theirs = Counting(9)
    torch.save(theirs.state_dict(), tmp_path / "a.pt")
    ours = Counting(5)
    trainer = trainer_of(ours, tmp_path / "run")
    init_from.apply(trainer, tmp_path / "a.pt")
    assert ours.count == 9
    fresh = Counting(0)
    fresh.load_state_dict(torch.load(files.save(trainer.state_dict(), tmp_path / "b.pt")), strict=True)
    assert fresh.count == 9


def test_a_state_without_the_extra_state_is_refused_as_in_torch(tmp_path):
    trainer = trainer_of(Counting(5), tmp_path)
    with pytest.raises(UserError, match=r"1 keys missing \(_extra_state\)"):
        trainer.load_state_dict({f"body.{key}": value for key, value in mlp().state_dict().items()})


def test_counters_that_an_old_file_lacks_stay_as_in_torch(tmp_path):
    net = mlp(3, nn.BatchNorm1d(8))
    net.train()(X)
    plain = {key: value for key, value in net.state_dict().items() if "num_batches" not in key}
    theirs, ours = mlp(3, nn.BatchNorm1d(8)), mlp(3, nn.BatchNorm1d(8))
    theirs.load_state_dict(plain)
    trainer = trainer_of(ours, tmp_path)
    trainer.load_state_dict(plain)
    assert_holds(trainer, theirs)
    versioned = net.state_dict()
    del versioned["1.num_batches_tracked"]
    with pytest.raises(UserError, match=r"1 keys missing \(1.num_batches_tracked\)"):
        trainer.load_state_dict(versioned)


# --- optimizers and averages --------------------------------------------------------------------------------------


def checkpoint(**more):
    """A torch loop's checkpoint after one step of AdamW."""
    module = mlp()
    optimizer = torch.optim.AdamW(module.named_parameters(), 1e-2, weight_decay=0.0)
    nn.functional.mse_loss(module(X), Y).backward()
    optimizer.step()
    return module, optimizer, {"model": module.state_dict(), "step": 1, **more}


def test_an_optimizers_state_is_found_under_any_name(tmp_path):
    module, optimizer, saved = checkpoint()
    torch.save({**saved, "opt": optimizer.state_dict()}, tmp_path / "a.pt")
    trainer = trainer_of(mlp(), tmp_path / "run", optim=ADAMW)
    init_from.apply(trainer, tmp_path / "a.pt")
    moment = optimizer.state[module[0].weight]["exp_avg"]
    np.testing.assert_array_equal(trainer.state.opt_state.mu["0.weight"], moment)


def test_states_of_two_optimizers_are_refused(tmp_path):
    _, optimizer, saved = checkpoint()
    torch.save({**saved, "optimizer_states": [optimizer.state_dict()] * 2}, tmp_path / "a.pt")
    trainer = trainer_of(mlp(), tmp_path / "run", optim=ADAMW)
    with pytest.raises(UserError, match=r"states of 2 optimizers \(optimizer_states\[0\], .*init_optimizer=false"):
        init_from.apply(trainer, tmp_path / "a.pt")


def test_the_average_of_an_averaged_model_goes_on(tmp_path):
    module, optimizer, saved = checkpoint()
    averaged = torch.optim.swa_utils.AveragedModel(mlp())
    averaged.update_parameters(nn.Sequential(*mlp()))
    torch.save({**saved, "optimizer": optimizer.state_dict(), "ema": averaged.state_dict()}, tmp_path / "a.pt")
    trainer = trainer_of(mlp(), tmp_path / "run", optim={**ADAMW, "ema_decay": 0.9})
    init_from.apply(trainer, tmp_path / "a.pt")
    np.testing.assert_array_equal(trainer.state.ema["0.weight"], averaged.module[0].weight.detach())
    np.testing.assert_array_equal(trainer.state.params["0.weight"], module[0].weight.detach())


# --- runs ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    module = mlp()
    trainer_of(module, folder, train={"steps": 4}).train()
    return folder, module


def test_a_run_of_a_module_given_in_python_gives_its_weights(run, tmp_path):
    folder, module = run
    trainer = trainer_of(mlp(), tmp_path)
    told = init_from.apply(trainer, folder).lines
    assert_holds(trainer, module)
    assert told == [f"started from the weights of {folder} at step 4"]


def test_a_checkpoint_of_a_run_is_told_from_a_file(run, tmp_path):
    trainer = trainer_of(mlp(), tmp_path)
    with pytest.raises(UserError, match=f"is a part of a jaxtrain run folder: give the folder, {run[0]},"):
        init_from.apply(trainer, run[0] / "checkpoints" / "4")


def test_going_on_with_a_frozen_layer_names_it_and_the_way(run):
    frozen = copy.deepcopy(run[1])
    frozen[0].requires_grad_(False)
    with pytest.raises(UserError, match=r"0.bias was trained and is frozen here\n(.*\n)*The weights fit: init_from="):
        trainer_of(frozen, run[0], train={"steps": 8}).train(resume=str(run[0]))


def test_going_on_with_another_optimizer_names_both_and_the_way(run):
    trainer = trainer_of(copy.deepcopy(run[1]), run[0], train={"steps": 8}, optim=ADAMW)
    wanted = r"another optimizer, whose state is trace; this run's is count, mu, nu\nThe weights fit: init_from="
    with pytest.raises(UserError, match=wanted):
        trainer.train(resume=str(run[0]))


def test_integers_beyond_32_bits_stay_as_they_are(tmp_path):
    module = mlp()
    module.register_buffer("large", torch.tensor(2**40))
    trainer = trainer_of(module, tmp_path)
    trainer.train()
    assert int(trainer.state_dict()["large"]) == int(module.large) == 2**40
