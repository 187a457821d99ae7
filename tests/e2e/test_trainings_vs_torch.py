"""Trainings as torch users write them, on 20 samples in batches of 8: after 20 steps the weights are torch's."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.data import DataLoader, TensorDataset

from jaxtrain import Trainer, TrainingConfig, UserError

STEPS, SAMPLES, BATCH = 20, 20, 8
DRAW = torch.Generator().manual_seed(0)
X, Y = torch.randn(SAMPLES, 6, generator=DRAW), torch.randn(SAMPLES, 3, generator=DRAW)
LABELS = torch.randint(0, 3, (SAMPLES,), generator=DRAW)
TOKENS = torch.randint(1, 30, (SAMPLES, 10), generator=DRAW)
IMAGES = torch.randn(SAMPLES, 1, 8, 8, generator=DRAW)


def mlp(out: int = 3, *middle: nn.Module) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), *middle, nn.Tanh(), nn.Linear(8, out))


def config(folder, **more) -> TrainingConfig:
    given = {
        "run": {"dir": str(folder), "quiet": True},
        "data": {"batch_size": BATCH, "shuffle": False},
        "optim": {"name": "sgd", "lr": 0.05, "momentum": 0.9, "weight_decay": 0.0, "clip_norm": None}
        | {"schedule": {"name": "constant"}},
        "train": {"steps": STEPS},
        "evaluation": {"every_epochs": None},
        "shard": {"devices": 1},
        "tracking": {"tensorboard": False},
        "precision": {"matmul": "highest"},
    }
    return TrainingConfig(**{**given, **more})


def train_in_torch(module: nn.Module, dataset, loss_of, collate=None, parameters=None) -> None:
    """loss_of: (module, batch) -> scalar tensor."""
    trained = [p for p in (parameters or module.parameters()) if p.requires_grad]
    optimizer = torch.optim.SGD(trained, 0.05, momentum=0.9)
    module.train()
    step = 0
    while step < STEPS:
        for batch in DataLoader(dataset, BATCH, collate_fn=collate):
            if step == STEPS:
                return
            optimizer.zero_grad()
            loss_of(module, batch).backward()
            optimizer.step()
            step += 1


def assert_torchs(theirs: nn.Module, ours: nn.Module) -> None:
    for (key, want), got in zip(theirs.state_dict().items(), ours.state_dict().values(), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4, msg=lambda text, key=key: f"{key}: {text}")


def check(folder, module, dataset, loss, loss_of, **more) -> None:
    theirs = copy.deepcopy(module)
    Trainer(module, dataset, None, config(folder, **more), loss=loss).train()
    train_in_torch(theirs, dataset, loss_of)
    assert_torchs(theirs, module)


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


class Tokens(torch.utils.data.Dataset):
    """Sentences of different lengths, as a tokenizer gives them."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        ids = TOKENS[index]
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": LABELS[index]}


def hugging_face():
    from jaxtrain.systems.torch_module.torch_examples import declare_torchvision

    declare_torchvision()
    return pytest.importorskip("transformers")


def test_a_hugging_face_classifier(tmp_path):
    transformers = hugging_face()
    torch.manual_seed(8)
    settings = transformers.BertConfig(
        vocab_size=30, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, num_labels=3,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, max_position_embeddings=16,
    )  # fmt: skip
    module = transformers.BertForSequenceClassification(settings)
    check(tmp_path, module, Tokens(), None, lambda module, batch: module(**batch).loss)


class Text(torch.utils.data.Dataset):
    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        ids = TOKENS[index]
        return {"input_ids": ids, "labels": ids}


def test_a_causal_language_model_with_its_cache(tmp_path):
    transformers = hugging_face()
    torch.manual_seed(9)
    settings = transformers.GPT2Config(
        vocab_size=30, n_positions=16, n_embd=16, n_layer=1, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    module = transformers.GPT2LMHeadModel(settings)
    assert module.config.use_cache
    check(tmp_path, module, Text(), None, lambda module, batch: module(**batch).loss)


class Forms(nn.Module):
    """form: the forward's signature, as users write it; it computes its own loss."""

    def __init__(self, form: str):
        super().__init__()
        self.net, self.form = mlp(), form

    def loss(self, x, y):
        return {"loss": F.mse_loss(self.net(x), y)}


class TakesBatch(Forms):
    def forward(self, batch):
        x, y = batch if self.form == "tuple" else (batch["x"], batch["y_true"])
        return self.loss(x, y)


class TakesKeywords(Forms):
    def forward(self, **batch):
        return self.loss(batch["x"], batch["y_true"])


class TakesTargets(Forms):
    def forward(self, x, targets=None):
        return self.loss(x, targets)


class Entries(torch.utils.data.Dataset):
    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return {"x": X[index], "y_true": Y[index]}


@pytest.mark.parametrize(
    ("module", "dataset", "call"),
    [
        (TakesBatch("dict"), Entries(), lambda module, batch: module(batch)),
        (TakesBatch("tuple"), TensorDataset(X, Y), lambda module, batch: module(batch)),
        (TakesKeywords("keywords"), Entries(), lambda module, batch: module(**batch)),
        (TakesTargets("targets"), TensorDataset(X, Y), lambda module, batch: module(*batch)),
    ],
    ids=["batch of a dict", "batch of a tuple", "keywords", "targets"],
)
def test_a_forward_gets_what_torchs_loop_would_pass(tmp_path, module, dataset, call):
    check(tmp_path, module, dataset, None, lambda module, batch: call(module, batch)["loss"])


def test_the_first_entry_of_a_dict_is_the_datasets_first_not_the_alphabets(tmp_path):
    def collate(items):
        x, y = zip(*items, strict=True)
        return {"x": torch.stack(x), "goal": torch.stack(y)}

    module, loader = mlp(), DataLoader(TensorDataset(X, Y), BATCH, collate_fn=collate)
    theirs = copy.deepcopy(module)
    Trainer(
        module, loader, None, config(tmp_path), loss=lambda output, batch: F.mse_loss(output, batch["goal"])
    ).train()
    train_in_torch(theirs, TensorDataset(X, Y), lambda m, batch: F.mse_loss(m(batch[0]), batch[1]))
    assert_torchs(theirs, module)


class Siamese(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = mlp()

    def forward(self, a, b):
        return self.net(a), self.net(b)


def test_several_inputs_come_from_the_first_entries_of_a_tuple(tmp_path):
    dataset = TensorDataset(X, X.flip(0), torch.where(Y[:, 0] > 0, 1.0, -1.0))
    loss = nn.CosineEmbeddingLoss(0.2)
    check(
        tmp_path, Siamese(), dataset, lambda outputs, batch: loss(*outputs, batch[2]),
        lambda module, batch: loss(*module(batch[0], batch[1]), batch[2]),
    )  # fmt: skip


class MomentumEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.online, self.predictor = mlp(), nn.Linear(3, 3)
        self.target = copy.deepcopy(self.online).requires_grad_(False)

    def forward(self, a, b):
        with torch.no_grad():
            if self.training:
                for slow, fast in zip(self.target.parameters(), self.online.parameters(), strict=True):
                    slow.mul_(0.9).add_(fast, alpha=0.1)
            target = self.target(b)
        return -F.cosine_similarity(self.predictor(self.online(a)), target).mean()


def test_a_teacher_that_the_forward_moves(tmp_path):
    check(tmp_path, MomentumEncoder(), TensorDataset(X, X + 0.1), None, lambda module, batch: module(*batch))


class Queue(nn.Module):
    """A queue of embeddings whose place is read as a Python number, as MoCo's is."""

    def __init__(self):
        super().__init__()
        self.net = mlp(4)
        self.register_buffer("queue", torch.randn(16, 4, generator=torch.Generator().manual_seed(1)))
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))

    def forward(self, x):
        z = self.net(x)
        logits = z @ self.queue.clone().T
        if self.training:
            place = int(self.place)
            self.queue[place : place + 4] = z[:4].detach()
            self.place[0] = (place + 4) % 16
        return logits.logsumexp(1).mean()


def test_a_changing_buffer_read_by_python_is_refused_with_its_line(tmp_path):
    with pytest.raises(UserError, match=r"reads a number out of the buffer place, which the forward changes(.|\n)*int"):
        Trainer(Queue(), TensorDataset(X), None, config(tmp_path))


class Speech(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Linear(6, 5)

    def forward(self, x):
        return self.net(x).log_softmax(-1)


def test_ctc_with_lengths_of_the_batch(tmp_path):
    sound = torch.randn(SAMPLES, 12, 6, generator=DRAW)
    labels = torch.randint(1, 5, (SAMPLES, 4), generator=DRAW)
    lengths = torch.randint(1, 5, (SAMPLES,), generator=DRAW)

    def ctc(output, batch):
        steps = torch.full((len(output),), 12)
        return F.ctc_loss(output.transpose(0, 1), batch[1], steps, batch[2], zero_infinity=True)

    dataset = TensorDataset(sound, labels, lengths)
    check(tmp_path, Speech(), dataset, ctc, lambda module, batch: ctc(module(batch[0]), batch))


class Annealed(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.beta, self.seen = mlp(), 0.0, 0

    def forward(self, x):
        return self.net(x) * (1 - self.beta)

    def note(self):
        self.seen += 1


@pytest.mark.parametrize("changed", ["beta", "seen"])
def test_a_callback_may_change_what_the_step_does_not_read(tmp_path, changed):
    module = Annealed()

    class Anneal:
        def on_step_end(self, trainer, step, metrics):
            setattr(module, changed, step)

    train = Trainer(module, TensorDataset(X, Y), None, config(tmp_path), loss=nn.MSELoss(), callbacks=[Anneal()]).train
    if changed == "seen":
        assert train()["train_history"]
    else:
        with pytest.raises(UserError, match=r"callback Anneal.on_step_end changed Annealed.beta, and the compiled"):
            train()
