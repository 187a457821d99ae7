"""Language models, dict batches, teachers, queues as torch users write them: after 20 steps the weights are torch's."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from jaxtrain import Trainer, UserError
from tests.e2e.trainings import (
    BATCH,
    DRAW,
    LABELS,
    SAMPLES,
    TOKENS,
    X,
    Y,
    assert_torchs,
    check,
    config,
    mlp,
    train_in_torch,
)

pytestmark = pytest.mark.slow


class Tokens(torch.utils.data.Dataset):
    """Sentences of different lengths, as a tokenizer gives them."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        ids = TOKENS[index]
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": LABELS[index]}


def hugging_face():
    from torch_bridge.torchvision_operators import declare_torchvision

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
