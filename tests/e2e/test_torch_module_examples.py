"""The example configurations for transformers and timm, from the command line's own entry point."""

import json

import pytest
import torch

from jaxtrain import UserError
from jaxtrain.run import main
from jaxtrain.systems.torch_module import torch_examples
from torch_bridge import torchvision_operators

pytestmark = pytest.mark.slow

torchvision_operators.declare_torchvision()
transformers = pytest.importorskip("transformers")
pytest.importorskip("timm")


def run(name: str, folder, *overrides: str) -> int:
    quick = ("train.epochs=1", "shard.devices=1", "tracking.tensorboard=false", "run.quiet=true")
    return main(["--config", f"configs/{name}.yaml", f"run.dir={folder}", *quick, *overrides])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    sizes = {"vocab_size": 100, "hidden_size": 16, "intermediate_size": 32, "max_position_embeddings": 32}
    config = transformers.BertConfig(num_hidden_layers=1, num_attention_heads=2, **sizes)
    path = tmp_path_factory.mktemp("models") / "tiny"
    transformers.BertForSequenceClassification(config).save_pretrained(path)
    return path


def test_a_hugging_face_model_of_a_local_folder_trains_and_is_exported(folder, tmp_path):
    data = ("data.kwargs.samples=64", "data.batch_size=16", "evaluation.every_epochs=1")
    assert run("torch_module_hugging_face", tmp_path / "run", f"model.kwargs.name={folder}", *data) == 0
    assert json.loads((tmp_path / "run/summary.json").read_text())["steps"] == 4
    exported = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
    exported.load_state_dict(torch.load(tmp_path / "run/exports/best.pt", weights_only=True), strict=True)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nobody/no-such-model", "cannot be downloaded"),
        ("./no_such_folder", "there is no folder ./no_such_folder"),
        ("docs", "docs holds no model"),
    ],
)
def test_a_model_that_is_not_there_is_one_message(name, said, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=said):
        torch_examples.hugging_face("AutoModelForSequenceClassification", name=name)


def test_a_timm_model_trains(tmp_path):
    small = ("data.kwargs.limit=32", "data.batch_size=16")
    assert run("torch_module_timm", tmp_path / "run", *small) == 0
    assert json.loads((tmp_path / "run/summary.json").read_text())["steps"] == 2


def test_a_misspelt_timm_model_is_one_message_with_those_near_it():
    with pytest.raises(UserError, match="near it are test_resnet"):
        torch_examples.timm("tst_resnet")
