"""Hidden states of transformers' models in a loss, as distillation asks for them: one program all the same."""

import pytest
import torch

import jaxtrain
from tests.e2e.loops import assert_same, torch_step

transformers = pytest.importorskip("transformers")
SIZES = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}


def bert():
    torch.manual_seed(0)
    model = transformers.BertForSequenceClassification(transformers.BertConfig(**SIZES))
    return model.eval()  # no dropout


def hints(model, ids):
    """The hooks that collect these are registered at a model's first call."""
    return sum(state.square().mean() for state in model(ids, output_hidden_states=True).hidden_states)


def test_a_loss_on_hidden_states_is_one_program_with_torchs_weights():
    theirs, ours = bert(), bert()
    plain = torch_step(theirs, torch.optim.SGD(theirs.parameters(), 0.05), hints)
    step = jaxtrain.compile(ours, hints, torch.optim.SGD(ours.parameters(), 0.05))
    for ids in torch.randint(3, 50, (3, 2, 7)):
        assert float(step(ids)) == pytest.approx(plain(ids), rel=1e-5)
    step.sync()
    assert step.torch is None
    assert_same(theirs, ours)
