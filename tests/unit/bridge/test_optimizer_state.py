"""A torch optimizer's moments go to the parameters that they belong to, or nowhere."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from jaxtrain import UserError
from torch_bridge.optimizer_state import Group, from_torch, group_options

ORDER = ["enc.weight", "enc.bias", "dec.weight", "dec.bias"]


def module_and_optimizer(groups):
    """groups: module -> what AdamW takes. Returns the module and the optimizer after one step."""
    torch.manual_seed(0)
    module = nn.ModuleDict({"enc": nn.Linear(4, 4), "dec": nn.Linear(4, 4)})
    optimizer = torch.optim.AdamW(groups(module), 1e-2)
    module["dec"](module["enc"](torch.randn(3, 4))).pow(2).mean().backward()
    optimizer.step()
    return module, optimizer


def group(name: str, keys: list[str], lr: float) -> Group:
    return Group(name, group_options("adamw", lr, lr, 0.01, (0.9, 0.999), 1e-8, 0.0, False), keys)


def read(saved, groups):
    zeros = lambda: {key: jnp.zeros((4, 4) if "weight" in key else 4) for key in ORDER}
    like = optax.ScaleByAdamState(jnp.int32(0), zeros(), zeros())
    return from_torch("adamw", saved, like, groups, ORDER)


def assert_moments_of(optimizer, module, state) -> None:
    for key, parameter in module.named_parameters():
        np.testing.assert_array_equal(state.mu[key], optimizer.state[parameter]["exp_avg"])


def one_group_backwards(module):
    return [*module["dec"].parameters(), *module["enc"].parameters()]


def two_groups_backwards(lr: float):
    return lambda module: [
        {"params": list(module["dec"].parameters()), "lr": 1e-2},
        {"params": list(module["enc"].parameters()), "lr": lr},
    ]


def test_a_state_keyed_by_names_is_read_by_name():
    module, optimizer = module_and_optimizer(one_group_backwards)
    saved = get_optimizer_state_dict(module, optimizer)
    state, count, notes = read(saved, [group("default", ORDER, 1e-2)])
    assert_moments_of(optimizer, module, state)
    assert (count, notes) == (1, [])


def test_an_order_that_is_assumed_is_told():
    _, optimizer = module_and_optimizer(lambda module: module.parameters())
    _, _, notes = read(optimizer.state_dict(), [group("default", ORDER, 1e-2)])
    assert notes == ["the file's optimizer does not name its parameters: taken in the order of model.parameters()"]


def test_groups_in_another_order_are_told_apart_by_their_rates():
    module, optimizer = module_and_optimizer(two_groups_backwards(1e-3))
    groups = [group("enc", ORDER[:2], 1e-3), group("dec", ORDER[2:], 1e-2)]
    state, _, notes = read(optimizer.state_dict(), groups)
    assert_moments_of(optimizer, module, state)
    assert len(notes) == 1
    assert "taken as the groups dec, enc" in notes[0]


def test_groups_that_nothing_tells_apart_are_refused():
    _, optimizer = module_and_optimizer(two_groups_backwards(1e-2))
    groups = [group("enc", ORDER[:2], 1e-2), group("dec", ORDER[2:], 1e-2)]
    with pytest.raises(UserError, match=r"groups of \[2, 2\] parameters are none that this run can tell apart"):
        read(optimizer.state_dict(), groups)


@pytest.mark.parametrize("lacking", ["lr", "params"])
def test_a_group_without_what_every_group_has_is_refused(lacking):
    _, optimizer = module_and_optimizer(lambda module: module.parameters())
    saved = optimizer.state_dict()
    saved["param_groups"][0].pop(lacking)
    with pytest.raises(UserError, match=f"group 0 of its optimizer has no {lacking}, wanted what"):
        read(saved, [group("default", ORDER, 1e-2)])


def test_a_state_of_another_models_names_is_refused():
    _, optimizer = module_and_optimizer(lambda module: nn.ModuleDict({"other": module}).named_parameters())
    with pytest.raises(UserError, match=r"holds a state of other.enc.weight, which is no parameter of this model \(4"):
        read(optimizer.state_dict(), [group("default", ORDER, 1e-2)])


def test_the_state_of_another_optimizer_is_refused_by_what_it_holds():
    module = nn.ModuleDict({"enc": nn.Linear(4, 4), "dec": nn.Linear(4, 4)})
    optimizer = torch.optim.RMSprop(module.parameters())
    module["dec"](module["enc"](torch.randn(3, 4))).pow(2).mean().backward()
    optimizer.step()
    with pytest.raises(UserError, match="holds square_avg; optim.name=adamw wants exp_avg, exp_avg_sq"):
        read(optimizer.state_dict(), [group("default", ORDER, 1e-2)])
