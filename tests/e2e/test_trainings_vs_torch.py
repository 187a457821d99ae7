"""Trainings as torch users write them, on 20 samples in batches of 8: after 20 steps the weights are torch's."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.data import DataLoader, TensorDataset

from jaxtrain import Trainer
from tests.e2e.trainings import (
    BATCH,
    IMAGES,
    LABELS,
    SAMPLES,
    X,
    Y,
    assert_torchs,
    check,
    config,
    mlp,
    train_in_torch,
)

pytestmark = pytest.mark.slow


def regression(folder, loss, module=None) -> None:
    """loss: torch's (output, target)."""
    module = mlp() if module is None else module
    check(
        folder, module, TensorDataset(X, Y), lambda output, batch: loss(output, batch[1]),
        lambda module, batch: loss(module(batch[0]), batch[1]),
    )  # fmt: skip


def classification(folder, loss, module=None) -> None:
    module = mlp() if module is None else module
    check(
        folder, module, TensorDataset(X, LABELS), lambda output, batch: loss(output, batch[1]),
        lambda module, batch: loss(module(batch[0]), batch[1]),
    )  # fmt: skip


def rmse(output, target):
    return torch.sqrt(F.mse_loss(output, target) + 1e-8)


def focal(output, target):
    entropy = F.cross_entropy(output, target, reduction="none")
    return ((1 - torch.exp(-entropy)) ** 2 * entropy).mean()


def vicreg(output, target):
    spread = torch.relu(1 - torch.sqrt(output.var(0) + 1e-4)).mean()
    centred = output - output.mean(0)
    covariance = (centred.T @ centred) / (len(output) - 1)
    rest = covariance - torch.diag(torch.diag(covariance))
    return F.mse_loss(output, target) + spread + rest.pow(2).sum() / output.shape[1]


def info_nce(output, target):
    a, b = F.normalize(output, dim=1), F.normalize(target, dim=1)
    return F.cross_entropy(a @ b.T / 0.5, torch.arange(len(a)))


def hard_negatives(output, target):
    distances = torch.cdist(output, target)
    positive = distances.diagonal()
    negative = (distances + 1e6 * torch.eye(len(output))).min(1).values
    return torch.relu(positive - negative + 0.5).mean()


def sum_by_len(output, target):
    return ((output - target) ** 2).sum() / len(target)


def batch_max(output, target):
    return (output - target).abs().max() + (output - target).pow(2).mean()


@pytest.mark.parametrize(
    "loss", [rmse, vicreg, info_nce, hard_negatives, sum_by_len, batch_max], ids=lambda f: f.__name__
)
def test_a_loss_over_the_whole_batch(tmp_path, loss):
    regression(tmp_path, loss)


def test_focal_loss(tmp_path):
    classification(tmp_path, focal)


def test_cross_entropy_with_class_weights_and_smoothing(tmp_path):
    classification(tmp_path, nn.CrossEntropyLoss(torch.tensor([1.0, 2.0, 5.0]), label_smoothing=0.1))


class Centred(nn.Module):
    """Takes the batch's mean off, in the forward pass."""

    def __init__(self):
        super().__init__()
        self.body = mlp()

    def forward(self, x):
        h = self.body(x)
        return h - h.mean(0)


def test_a_forward_that_looks_at_the_whole_batch(tmp_path):
    regression(tmp_path, F.mse_loss, Centred())


class FrozenBackbone(nn.Module):
    """Transfer learning: a frozen body with BatchNorm in eval, a head that trains."""

    def __init__(self):
        super().__init__()
        self.body, self.head = mlp(4, nn.BatchNorm1d(8)), nn.Linear(4, 3)
        self.body.requires_grad_(False)

    def train(self, mode: bool = True):
        super().train(mode)
        self.body.eval()
        return self

    def forward(self, x):
        return self.head(self.body(x))


def test_a_frozen_backbone_with_batch_norm_in_eval(tmp_path):
    module = FrozenBackbone()
    before = copy.deepcopy(module.body.state_dict())
    classification(tmp_path, nn.CrossEntropyLoss(), module)
    assert all(torch.equal(before[key], value) for key, value in module.body.state_dict().items())


def test_batch_norm_on_a_short_last_batch(tmp_path):
    classification(tmp_path, nn.CrossEntropyLoss(), mlp(3, nn.BatchNorm1d(8)))


def test_tied_weights(tmp_path):
    torch.manual_seed(2)
    module = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 3))
    module[2].weight = module[0].weight
    regression(tmp_path, F.mse_loss, module)
    assert module[2].weight is module[0].weight


@pytest.mark.parametrize("norm", [parametrizations.weight_norm, parametrizations.spectral_norm])
def test_normalised_weights(tmp_path, norm):
    module = mlp()
    norm(module[0])
    regression(tmp_path, F.mse_loss, module)


class ArcFace(nn.Module):
    """A loss with a parameter of its own: one centre per class."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.centres = nn.Parameter(torch.randn(3, 4))

    def forward(self, output, target):
        cosine = F.normalize(output, dim=1) @ F.normalize(self.centres, dim=1).T
        angle = torch.acos(cosine.clamp(-0.999, 0.999))
        hit = F.one_hot(target, 3).bool()
        return F.cross_entropy(4 * torch.where(hit, torch.cos(angle + 0.2), cosine), target)


def test_a_loss_modules_own_parameters_train(tmp_path):
    module, loss = mlp(4), ArcFace()
    theirs, their_loss = copy.deepcopy(module), copy.deepcopy(loss)
    Trainer(module, TensorDataset(X, LABELS), None, config(tmp_path), loss=loss).train()
    together = [*theirs.parameters(), *their_loss.parameters()]
    train_in_torch(
        theirs, TensorDataset(X, LABELS), lambda m, batch: their_loss(m(batch[0]), batch[1]), parameters=together
    )
    assert_torchs(theirs, module)
    assert_torchs(their_loss, loss)


class Penalised(nn.Module):
    """Returns its own loss, with a penalty on the gradient of the output by the input."""

    def __init__(self):
        super().__init__()
        self.critic = mlp(1)

    def forward(self, x, target):
        x = x.requires_grad_(True)
        score = self.critic(x)
        (slope,) = torch.autograd.grad(score.sum(), x, create_graph=True)
        return {"loss": F.mse_loss(score[:, 0], target[:, 0]) + 0.1 * (slope.norm(dim=1) - 1).pow(2).mean()}


class Named(torch.utils.data.Dataset):
    def __init__(self, **columns):
        self.columns = columns

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return {name: column[index] for name, column in self.columns.items()}


def test_a_gradient_penalty(tmp_path):
    check(tmp_path, Penalised(), Named(x=X, target=Y), None, lambda module, batch: module(**batch)["loss"])


class Gan(nn.Module):
    """Both players in one module: each loss moves its own, as requires_grad_ in the loops of GANs does."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.generator, self.critic = nn.Linear(3, 6), mlp(1)

    def forward(self, x, noise):
        fake = self.generator(noise)
        self.critic.requires_grad_(True)
        for_critic = F.softplus(-self.critic(x)).mean() + F.softplus(self.critic(fake.detach())).mean()
        self.critic.requires_grad_(False)
        for_generator = F.softplus(-self.critic(fake)).mean()
        self.critic.requires_grad_(True)
        return {"loss": for_critic + for_generator}


def test_a_gan_that_switches_requires_grad(tmp_path):
    check(tmp_path, Gan(), Named(x=X, noise=Y), None, lambda module, batch: module(**batch)["loss"])


class Denoiser(nn.Module):
    """A small U-Net that learns the noise which the dataset has drawn."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.time = nn.Embedding(10, 4)
        self.down, self.middle = nn.Conv2d(1, 4, 3, stride=2, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.up, self.out = nn.ConvTranspose2d(4, 4, 2, stride=2), nn.Conv2d(5, 1, 3, padding=1)

    def forward(self, image, noise, step):
        level = (step.float() / 10).sqrt()[:, None, None, None]
        noisy = (1 - level) * image + level * noise
        h = F.silu(self.down(noisy) + self.time(step)[:, :, None, None])
        h = self.up(F.silu(self.middle(h)))
        return {"loss": F.mse_loss(self.out(torch.cat([h, noisy], 1)), noise)}


def test_a_diffusion_u_net(tmp_path):
    noise = torch.randn(IMAGES.shape, generator=torch.Generator().manual_seed(6))
    dataset = Named(image=IMAGES, noise=noise, step=torch.arange(SAMPLES) % 10)
    check(tmp_path, Denoiser(), dataset, None, lambda module, batch: module(**batch)["loss"])


class NoisyDenoiser(Denoiser):
    """Draws its noise in the forward pass: JAX's numbers, torch's distribution."""

    def forward(self, image, step):
        return super().forward(image, torch.randn_like(image), step)


def test_noise_drawn_in_the_forward_has_torchs_distribution(tmp_path):
    losses = {"ours": [], "theirs": []}
    dataset = Named(image=IMAGES, step=torch.arange(SAMPLES) % 10)
    module = NoisyDenoiser()
    theirs = copy.deepcopy(module)
    settings = config(tmp_path, train={"steps": 60, "log_every_steps": 1})
    history = Trainer(module, dataset, None, settings, loss=None).train()
    losses["ours"] = [point["loss"] for point in history["train_history"]]
    optimizer = torch.optim.SGD(theirs.parameters(), 0.05, momentum=0.9)
    torch.manual_seed(7)
    for _ in range(20):
        total = 0.0
        for batch in DataLoader(dataset, BATCH):
            optimizer.zero_grad()
            loss = theirs(**batch)["loss"]
            loss.backward()
            optimizer.step()
            total += loss.item() / 3
        losses["theirs"].append(total)
    late = {name: sum(values[-8:]) / 8 for name, values in losses.items()}
    assert late["ours"] == pytest.approx(late["theirs"], rel=0.15)


class Mapped(nn.Module):
    """Three networks at once: their stacked weights are mapped over, as ensembles are written."""

    def __init__(self):
        super().__init__()
        self.net = mlp()

    def forward(self, x):
        weights = {name: torch.stack([p, 1.1 * p, 0.9 * p]) for name, p in self.net.named_parameters()}
        rows = torch.vmap(lambda row, scale: self.net(row) * scale, in_dims=(0, None))(x, torch.tensor(0.5))
        return rows + torch.vmap(lambda w: torch.func.functional_call(self.net, w, (x,)))(weights).mean(0)


def test_a_forward_that_maps_over_rows_and_weights(tmp_path):
    regression(tmp_path, F.mse_loss, Mapped())


class Decoder(nn.Module):
    """The form of nanoGPT: logits, and the loss where targets are given."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(16, 8), nn.Linear(8, 16, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens, targets=None):
        logits = self.head(torch.tanh(self.embedding(tokens).cumsum(1)))
        return logits, None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def test_a_model_that_returns_logits_and_its_loss(tmp_path):
    tokens = torch.randint(0, 16, (20, 9), generator=torch.Generator().manual_seed(0))
    check(tmp_path, Decoder(), TensorDataset(tokens[:, :-1], tokens[:, 1:]), None, lambda m, batch: m(*batch)[1])


def test_a_similarity_without_its_diagonal(tmp_path):
    """As in SimCLR: `fill_diagonal_` of a matrix as wide as the batch."""

    def contrast(output, target):
        similar = F.normalize(output) @ F.normalize(output).T
        return F.cross_entropy(similar.fill_diagonal_(-1e9) / 0.5, torch.arange(len(output)).flip(0))

    classification(tmp_path, contrast)
