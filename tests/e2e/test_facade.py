"""Trainer from Python: a user's own model and torch Dataset."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from jaxtrain import Loss, Trainer, TrainingConfig, UserError, nn
from jaxtrain.task import MeanLoss
from jaxtrain.train.user.resolve_task import resolve_task


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.fc1 = nn.Linear(3, 16, rngs=rngs)
        self.fc2 = nn.Linear(16, 1, rngs=rngs)

    def __call__(self, x, rngs=None):
        return self.fc2(nn.gelu(self.fc1(x)))[:, 0]


def squared_error(model, batch, rngs):
    return jnp.square(model(batch["0"], rngs=rngs) - batch["1"]).mean()


def dataset(size: int, seed: int) -> torch.utils.data.Dataset:
    x = np.random.default_rng(seed).normal(size=(size, 3)).astype(np.float32)
    return torch.utils.data.TensorDataset(torch.from_numpy(x), torch.from_numpy(np.sin(x).sum(1)))


@pytest.fixture
def trainer(tmp_path) -> Trainer:
    config = TrainingConfig(
        learning_rate=1e-2, num_epochs=12, batch_size=40, run={"dir": str(tmp_path)}, shard={"devices": 1}
    )
    return Trainer(Net(nnx.Rngs(0)), dataset(200, 0), dataset(50, 1), config, loss=squared_error)


def test_a_model_and_torch_datasets_train(trainer):
    history = trainer.train()
    assert len(history["train_history"]) == len(history["val_history"]) == 12
    assert history["best_val_loss"] < 0.25 * history["val_history"][0]["loss"]


def test_the_users_model_holds_the_trained_weights(trainer):
    trainer.train()
    np.testing.assert_array_equal(trainer.user_model.fc1.weight[...], trainer.state_dict()["fc1.weight"])


def test_a_torch_state_dict_goes_in_strictly(trainer):
    twin = torch.nn.ModuleDict({"fc1": torch.nn.Linear(3, 16), "fc2": torch.nn.Linear(16, 1)})
    trainer.load_state_dict(twin.state_dict())
    np.testing.assert_array_equal(trainer.state_dict()["fc2.bias"], twin["fc2"].bias.detach().numpy())
    with pytest.raises(ValueError, match=r"1 keys missing \(fc2.bias\)"):
        trainer.load_state_dict({k: v for k, v in twin.state_dict().items() if k != "fc2.bias"})


def test_an_uneven_last_batch_trains_on_every_sample_once(trainer):
    loader = trainer.train_loader
    seen = [loader.host_batch(step) for step in range(trainer.steps_per_epoch)]
    indices = np.concatenate([batch["index"][batch["valid"]] for batch in seen])
    assert sorted(indices) == list(range(200))


@pytest.mark.parametrize(
    ("found", "wanted"),
    [
        (jnp.array([1.0, 3.0]), MeanLoss(2.0, 2, {})),
        (jnp.array(5.0), MeanLoss(5.0, 2, {})),
        ((jnp.array(5.0), 7.0), Loss(5.0, 7.0, {})),
        ((jnp.array(5.0), {"accuracy": 0.5}), MeanLoss(5.0, 2, {"accuracy": 0.5})),
        (Loss(5.0, 7.0), Loss(5.0, 7.0)),
    ],
)
def test_a_loss_is_a_value_with_or_without_a_weight(found, wanted):
    task = resolve_task(None, lambda model, batch, rngs: found, TrainingConfig())
    loss = task.loss(None, {"valid": np.ones(2, bool)}, None, None)
    assert type(loss) is type(wanted)
    assert loss == wanted


def test_a_loss_per_column_is_refused_as_that_of_a_torch_module_is(tmp_path):
    by_column = lambda model, batch, rngs: jnp.square(model(batch["0"], rngs)[:, None] - jnp.zeros(5)).mean(0)
    config = TrainingConfig(batch_size=40, num_epochs=1, run={"dir": str(tmp_path)})
    trainer = Trainer(Net(nnx.Rngs(0)), dataset(80, 0), None, config, loss=by_column)
    with pytest.raises(UserError, match=r"the loss returned an array of shape \(5,\).*one value per sample"):
        trainer.train()
