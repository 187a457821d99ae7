"""Averages keep their precision; parameters without gradient stay as they are, as in torch."""

import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx

from jaxtrain import Trainer, TrainingConfig
from torch_bridge import files
from torch_bridge.optimizer_state import Group, from_plateau
from torch_bridge.state_dict import without_wrappers


class Net(nnx.Module):
    def __init__(self):
        self.w, self.idle = nnx.Param(jnp.ones(4)), nnx.Param(jnp.ones(4))


def trained(folder, **settings):
    config = TrainingConfig(
        run={"dir": str(folder), "quiet": True},
        data={"batch_size": 4},
        train={"steps": 3},
        shard={"devices": 1},
        tracking={"tensorboard": False},
        **settings,
    )
    run = Trainer(
        Net(), {"x": np.ones(4, np.float32)}, None, config, loss=lambda m, b, r: (m.w[...].sum() - b["x"]) ** 2
    )
    run.train()
    return run.state


def test_the_average_of_bfloat16_weights_is_float32(tmp_path):
    state = trained(tmp_path, precision={"policy": "bf16_params"}, optim={"ema_decay": 0.999})
    assert (state.params["w"].dtype, state.ema["w"].dtype) == (jnp.bfloat16, jnp.float32)


def test_a_parameter_without_gradient_does_not_decay(tmp_path):
    state = trained(tmp_path, optim={"weight_decay": 0.5, "lr": 0.1})
    assert (np.asarray(state.params["idle"]).tolist(), bool((state.params["w"] != 1).all())) == ([1.0] * 4, True)


def test_names_inside_fsdp_and_checkpoint_wrappers_are_the_models_own():
    state = {"_fsdp_wrapped_module.a._checkpoint_wrapped_module.weight": 1, "module.b.bias": 2}
    assert without_wrappers(state, {"a.weight": 0, "b.bias": 0}) == {"a.weight": 1, "b.bias": 2}


def test_the_count_of_an_averaged_model_is_no_weight():
    assert without_wrappers({"n_averaged": 3, "module.a": 1}, {"a": 0}) == {"a": 1}


def test_conjugated_and_negated_views_are_read_as_what_they_show(tmp_path):
    value = torch.randn(3, dtype=torch.complex64)
    shown = {"conj": value.conj(), "neg": torch.randn(4)._neg_view()}
    torch.save(shown, tmp_path / "a.pt")
    read = files.load(tmp_path / "a.pt")
    wanted = {key: tensor.resolve_conj().resolve_neg().numpy() for key, tensor in shown.items()}
    assert all(np.array_equal(read[key], wanted[key]) for key in shown)


def test_a_plateau_of_two_groups_lowers_both_by_its_factor():
    groups = [Group(name, {"initial_lr": rate}, [name]) for name, rate in (("back", 1e-3), ("head", 1e-2))]
    optimizer = {"param_groups": [{"param_names": [g.name], "params": [i], "lr": 0.1} for i, g in enumerate(groups)]}
    state = {"num_bad_epochs": 0, "best": 1.0, "_last_lr": [1e-4, 1e-3]}
    assert np.isclose(from_plateau(state, optimizer, groups, 1e-2, "f")["lr"], 1e-3)
