"""`python -m torch_bridge.verify`: agreement is shown layer by layer, and a departure is named where it begins."""

import jax
import pytest
import torch

from tests.contract.tasks import tiny
from torch_bridge import comparison, files, verification, verify
from torch_bridge.datasets import to_torch

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("verify")
    tiny("digits.classify", path, "train.steps=3", "train.epochs=null", "evaluation.every_epochs=null").train()
    return path


def test_an_export_agrees_in_every_layer_loss_and_gradient(folder, capsys):
    assert verify.main(["--run", str(folder), "--batches", "2"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("digits.classify in JAX, step 3, beside its torch twin with that step exported\n")
    assert "all agree: output 13, loss 1, gradient 21" in said
    for name in ("stem", "blocks.0.norm1", "blocks.0.attn", "blocks.0.fc2", "blocks.0", "head"):
        assert f"  {name}\n" in said


def test_an_altered_file_is_caught_at_the_layer_that_departs(folder, tmp_path, capsys):
    model = verification.run_dir.load_model(folder, "last")[2]
    state = verification.state_dict(model)
    state["blocks.0.fc1.weight"] = state["blocks.0.fc1.weight"] * 1.01
    path = files.save(state, tmp_path / "altered.safetensors")
    assert verify.main(["--run", str(folder), "--weights", str(path)]) == 1
    assert "the output of blocks.0.fc1 departs first: relative difference" in capsys.readouterr().out


def test_a_gradient_that_departs_alone_is_named(folder):
    """A twin whose forward is right and whose backward is not."""
    task, config, model, _ = verification.run_dir.load_model(folder, "last")
    twin = task.twin.build(config).eval()
    twin.load_state_dict({key: to_torch(value) for key, value in verification.state_dict(model).items()})
    twin.blocks[0].fc2.weight.register_hook(lambda grad: grad * 1.1)
    loader = verification._loader(task, config, verification.as_source(task.build_data(config, "validation")))
    report = verification.compare(task, config, model, twin, [loader.host_batch(0)])
    assert (report.first.kind, report.first.name) == ("gradient", "blocks.0.fc2.weight")


def test_recording_leaves_the_classes_as_they_were(folder):
    model = verification.run_dir.load_model(folder, "last")[2]
    before = {type(module): type(module).__call__ for module in comparison.modules(model) if callable(module)}
    with verification.recording_flax(model) as records:
        model(jax.numpy.zeros((2, 1, 8, 8)))
    assert len(records) > 10
    assert all(kind.__call__ is call for kind, call in before.items())
    assert not any(layer._forward_hooks for layer in torch.nn.Linear(1, 1).modules())


@pytest.mark.parametrize("strategy", ["token", "prefix", "sequence"])
def test_routers_agree_too(strategy, tmp_path):
    settings = (f"memory.routing_strategy_{stage}={strategy}" for stage in ("train", "inference"))
    at_hand = ("data.batch_size=4", "data.placement=host", "memory.num_shared_chapters=0")
    trainer = tiny("memory_lm.scratch", tmp_path, *at_hand, *settings)
    twin = trainer.task.twin.build(trainer.config).eval()
    twin.load_state_dict({key: to_torch(value) for key, value in trainer.state_dict().items()}, strict=True)
    batch = trainer.train_loader.host_batch(0)
    report = verification.compare(trainer.task, trainer.config, trainer.model(), twin, [batch])
    assert report.first is None, str(report)
    if strategy == "token":  # the other strategies call the router's parts, not the router
        assert "routers.1" in {difference.name for difference in report.differences}, report.unmatched
