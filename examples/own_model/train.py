# %% [markdown]
# # Your Dataset, your model: trained in JAX, used in torch
#
# From top to bottom in about a minute on two cores: `python examples/own_model/train.py`, or cell by cell in an editor
# that knows `# %%`. Needs `pip install -e '.[torch]'`.

# %% The data: an ordinary torch Dataset, with its own randomness, as it would be in any torch project.
import os
import pathlib

import numpy as np
import torch
from sklearn.datasets import load_digits

EPOCHS = int(os.environ.get("EPOCHS", 20))
digits = load_digits()
images = torch.from_numpy(digits.images.astype(np.float32) / 16)[:, None]  # [1797, 1, 8, 8]
labels = torch.from_numpy(digits.target)
order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))


class Digits(torch.utils.data.Dataset):
    """Handwritten digits; where they train, half of them shifted by a pixel, all a little noisy."""

    def __init__(self, rows: torch.Tensor, augment: bool):
        self.rows, self.augment = rows, augment

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        image = images[self.rows[i]]
        if self.augment:
            if torch.rand(()) < 0.5:
                image = image.roll(int(torch.randint(-1, 2, ())), 2)
            image = image + 0.05 * torch.randn(image.shape)
        return image, labels[self.rows[i]]


train_set, test_set = Digits(order[:1437], augment=True), Digits(order[1437:], augment=False)
print(f"{len(train_set)} samples to train on, {len(test_set)} to judge by")

# %% The model: an nn.Module in shape. Attributes carry torch's names, so its weights are a torch state dict.
import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain import nn


class Net(nnx.Module):
    """The twin of net.Net, line by line."""

    def __init__(self, width: int = 16, *, rngs: nnx.Rngs):
        self.conv1 = nn.Conv2d(1, width, 3, padding=1, rngs=rngs)
        self.conv2 = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1, rngs=rngs)
        self.norm = nn.LayerNorm(2 * width * 4 * 4)
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(2 * width * 4 * 4, 10, rngs=rngs)

    def __call__(self, image, rngs=None):  # rngs: the randomness of a training step; None is torch's eval()
        x = nn.gelu(self.conv1(image))
        x = nn.gelu(self.conv2(x)).reshape(len(image), -1)
        return self.head(self.dropout(self.norm(x), rngs))


# %% The loss: one value per sample. The mean over a batch is the trainer's, which knows which rows only fill it up.
import optax


def loss(model, batch, rngs):  # a torch item (x, y) arrives as batch["0"], batch["1"]
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["0"], rngs), batch["1"])


# %% The run. Start the file again and it goes on where it stopped; another `run.dir` starts anew.
from jaxtrain import Trainer, TrainingConfig

config = TrainingConfig(
    learning_rate=3e-3,
    weight_decay=0.05,
    num_epochs=EPOCHS,
    batch_size=64,
    optim={"schedule": {"name": "cosine", "warmup_epochs": 1}},
    run={"dir": "runs/own_model"},
)
trainer = Trainer(Net(rngs=nnx.Rngs(0)), train_set, test_set, config, loss=loss)
history = trainer.train()
print(f"best validation loss {history['best_val_loss']:.4f}")

# %% Evaluated in JAX: the trained model is a function of arrays.
model = trainer.model()
predict = jax.jit(lambda image: model(image))
test_images, test_labels = (
    torch.stack(column) for column in zip(*map(test_set.__getitem__, range(len(test_set))), strict=True)
)
in_jax = np.asarray(predict(jnp.asarray(test_images.numpy())))
print(f"accuracy in jax: {np.mean(in_jax.argmax(1) == test_labels.numpy()):.4f}")

# %% Exported: a file that torch.load reads.
from torch_bridge import files

export = files.save(trainer.state_dict(), pathlib.Path("runs/own_model/exports/net.pt"))
print(f"exported {export}, {export.stat().st_size:,} bytes")

# %% Back in torch: the plain module takes the file with strict=True and gives the same numbers.
import net

twin = net.Net()
twin.load_state_dict(torch.load(export, weights_only=True), strict=True)
with torch.no_grad():
    in_torch = twin.eval()(test_images).numpy()
print(f"accuracy in torch: {np.mean(in_torch.argmax(1) == test_labels.numpy()):.4f}")
print(f"largest difference of a logit: {np.abs(in_jax - in_torch).max():.1e}")
assert np.abs(in_jax - in_torch).max() < 1e-4
