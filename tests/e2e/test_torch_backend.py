"""torch.compile(backend="jaxtrain") trains models of four libraries in loops of torch's own: the losses are torch's."""

import logging

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.unit.capture.sides import Messages
from torch_bridge.capture import torch_api
from torch_bridge.capture.backend import jaxtrain
from torch_bridge.torchvision_operators import declare_torchvision

declare_torchvision()

STEPS, TOLERANCE = 6, 1e-4
MODELS = {}


def model(function):
    """Register a function that returns (model, batches, loss of model and batch)."""
    MODELS[function.__name__] = function
    return function


def _generator():
    return torch.Generator().manual_seed(0)


def _ids(rows=4, length=12, vocabulary=64):
    generator = _generator()
    return [torch.randint(1, vocabulary, (rows, length), generator=generator) for _ in range(STEPS)]


def _images(size, rows=4, classes=4):
    generator = _generator()
    draws = range(STEPS)
    labels = lambda: torch.randint(0, classes, (rows,), generator=generator)
    return [(torch.randn(rows, 3, size, size, generator=generator), labels()) for _ in draws]


def _classified(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


@model
def bert():
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=3,
    )
    batches = [{"input_ids": ids, "attention_mask": (ids > 5).long(), "labels": ids[:, 0] % 3} for ids in _ids()]
    return transformers.BertForSequenceClassification(config), batches, lambda model, batch: model(**batch).loss


@model
def gpt2():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=64, n_embd=32, n_layer=2, n_head=2, n_positions=32, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    )
    return transformers.GPT2LMHeadModel(config), _ids(), lambda model, ids: model(input_ids=ids, labels=ids).loss


@model
def t5():
    transformers = pytest.importorskip("transformers")
    config = transformers.T5Config(
        vocab_size=64, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2, dropout_rate=0, decoder_start_token_id=0
    )
    loss = lambda model, ids: model(input_ids=ids, labels=ids.flip(1)).loss
    return transformers.T5ForConditionalGeneration(config), _ids(), loss


@model
def llama():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config), _ids(), lambda model, ids: model(input_ids=ids, labels=ids).loss


@model
def timm_resnet():
    timm = pytest.importorskip("timm")
    return timm.create_model("test_resnet", num_classes=4), _images(64, rows=8), _classified


@model
def timm_vit():
    timm = pytest.importorskip("timm")
    options = {"img_size": 32, "patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2}
    return timm.create_model("vit_tiny_patch16_224", num_classes=4, **options), _images(32), _classified


@model
def timm_convnext():
    timm = pytest.importorskip("timm")
    options = {"depths": (1, 1, 1, 1), "dims": (8, 8, 16, 16)}
    return timm.create_model("convnext_atto", num_classes=4, **options), _images(32), _classified


def _graphs():
    generator = _generator()
    nodes, links = 10, 30
    batches = []
    for _ in range(STEPS):
        edges = torch.randint(0, nodes, (2, links), generator=generator)
        batches.append((torch.randn(nodes, 6, generator=generator), edges, torch.arange(nodes) % 3))
    return batches


class _Graph(nn.Module):
    def __init__(self, first, second):
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x, edges):
        return self.second(F.relu(self.first(x, edges)), edges)


def _nodes_classified(model, batch):
    x, edges, labels = batch
    return F.cross_entropy(model(x, edges), labels)


@model
def geometric_gcn():
    geometric = pytest.importorskip("torch_geometric.nn")
    return _Graph(geometric.GCNConv(6, 8), geometric.GCNConv(8, 3)), _graphs(), _nodes_classified


@model
def geometric_sage():
    geometric = pytest.importorskip("torch_geometric.nn")
    return _Graph(geometric.SAGEConv(6, 8), geometric.SAGEConv(8, 3)), _graphs(), _nodes_classified


@model
def unet():
    class UNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.down, self.up = nn.Conv2d(3, 8, 3, padding=1), nn.ConvTranspose2d(8, 8, 2, 2)
            self.norm, self.out = nn.GroupNorm(2, 8), nn.Conv2d(16, 4, 1)

        def forward(self, x):
            a = F.relu(self.norm(self.down(x)))
            b = self.up(F.max_pool2d(a, 2))
            return self.out(torch.cat([a, b], 1)).mean((2, 3))

    return UNet(), _images(16), _classified


@model
def tagger():
    class Tagger(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.rnn, self.head = nn.Embedding(64, 8), nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 5)

        def forward(self, ids):
            return self.head(self.rnn(self.embedding(ids))[0])

    loss = lambda model, ids: F.cross_entropy(model(ids).flatten(0, 1), (ids % 5).flatten())
    return Tagger(), _ids(), loss


@model
def autoencoder():
    """A variational autoencoder whose noise comes with the batch."""

    class Autoencoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.decoder = nn.Linear(12, 8), nn.Sequential(nn.Linear(4, 16), nn.SiLU(), nn.Linear(16, 12))

        def forward(self, x, noise):
            mean, spread = self.encoder(x).chunk(2, 1)
            q = torch.distributions.Normal(mean, F.softplus(spread) + 1e-3)
            p = torch.distributions.Normal(torch.zeros_like(mean), torch.ones_like(mean))
            return self.decoder(mean + q.scale * noise), torch.distributions.kl_divergence(q, p).mean()

    def loss(model, batch):
        y, divergence = model(*batch)
        return F.mse_loss(y, batch[0]) + 0.1 * divergence

    generator = _generator()
    draw = lambda *shape: torch.randn(*shape, generator=generator)
    return Autoencoder(), [(draw(8, 12), draw(8, 4)) for _ in range(STEPS)], loss


def _train(make, compiled):
    torch.manual_seed(0)
    module, batches, loss_of = make()
    run = torch.compile(module, backend=jaxtrain) if compiled else module
    optimizer = torch.optim.SGD(module.parameters(), 0.02, momentum=0.9)
    losses = []
    for batch in batches:
        loss = loss_of(run, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    module.eval()
    with torch.no_grad():
        return [*losses, float(loss_of(run, batches[0]))]


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_losses_are_torchs_to_1e_4(name):
    torch_api.reset()
    messages = Messages()
    log = logging.getLogger("torch_bridge.capture.backend")
    log.addHandler(messages)
    try:
        wanted, got = _train(MODELS[name], False), _train(MODELS[name], True)
    finally:
        log.removeHandler(messages)
    assert got == pytest.approx(wanted, rel=TOLERANCE)
    assert messages.lines == []  # every graph of every model is computed by JAX
