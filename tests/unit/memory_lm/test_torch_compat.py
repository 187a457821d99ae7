"""The original's names, used as its users use them."""

import json
import pathlib

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from jaxtrain.systems import memory_lm
from jaxtrain.systems.memory_lm import losses, torch_twin
from jaxtrain.systems.memory_lm.config import Memory, Model
from tests.unit.memory_lm.models import ids, small, strategy
from torch_bridge.state_dict import state_dict

GOLDEN = pathlib.Path(__file__).parents[2] / "golden" / "memory_lm"


def original(name: str):
    """The config of a golden case as the original's object, and the case's tensors."""
    given = json.loads((GOLDEN / f"{name}.json").read_text())["config"]
    config = memory_lm.Config(
        memory_lm.ModelConfig(**given["model"]),
        memory_lm.MemoryConfig(**given["memory"]),
        memory_lm.TrainingConfig(**given["training"]),
    )
    return config, load_file(GOLDEN / f"{name}.safetensors")


def test_importing_the_system_is_cheap():
    import subprocess
    import sys

    code = "import sys, jaxtrain.systems.memory_lm; print('torch' in sys.modules, 'transformers' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).split() == ["False", "False"]


def test_a_saved_config_is_read_back(tmp_path):
    config = original("scratch_moc_seq_shared")[0]
    memory_lm.save_config(config, tmp_path / "new" / "c.yaml")
    assert memory_lm.load_config(tmp_path / "new" / "c.yaml") == config


def test_fields_stand_in_the_originals_order(tmp_path):
    config = memory_lm.Config(memory=memory_lm.MemoryConfig(True, 64))
    assert config.memory.num_memory_tokens == 64
    memory_lm.save_config(config, tmp_path / "c.yaml")
    model = (tmp_path / "c.yaml").read_text().split("memory:")[0].split()
    assert model.index("base_model_name:") < model.index("use_flash_attention:") < model.index("tie_embeddings:")


def test_small_numbers_are_read_as_numbers_and_wrong_keys_refused(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("training: {memory_lr: 1e-4}")
    assert memory_lm.load_config(path).training.memory_lr == 1e-4
    path.write_text("model: {hiden_dim: 4}")
    with pytest.raises(TypeError, match="hiden_dim"):
        memory_lm.load_config(path)
    with pytest.raises(FileNotFoundError):
        memory_lm.load_config(tmp_path / "none.yaml")


def test_a_checkpoint_of_the_original_loads_strictly_and_gives_its_logits_and_loss():
    config, tensors = original("scratch_moc_token")
    model = memory_lm.MemoryTransformer(config).eval()
    model.load_state_dict(
        {k.removeprefix("param/"): torch.tensor(v) for k, v in tensors.items() if k.startswith("param/")}
    )
    names = ("input_ids", "attention_mask", "labels")
    out = model(*(torch.tensor(tensors[f"in/{name}"]) for name in names))
    np.testing.assert_allclose(out["logits"].detach(), tensors["out/eval_logits"], atol=2e-5)
    np.testing.assert_allclose(out["loss"].detach(), tensors["loss/eval_ce"], rtol=1e-5)


@pytest.mark.parametrize(
    "name", ["scratch_dense_factorized_lowrankproj_variantB", "scratch_moc_seqrolling", "scratch_vanilla"]
)
def test_the_torch_twin_gives_the_recorded_logits(name):
    config, tensors = original(name)
    section = Model(**vars(config.model))
    twin = torch_twin.MemoryTransformer(section, Memory(**vars(config.memory))).eval()
    twin.load_state_dict(
        {k.removeprefix("param/"): torch.tensor(v) for k, v in tensors.items() if k.startswith("param/")}
    )
    with torch.no_grad():
        logits = twin(torch.tensor(tensors["in/input_ids"]), torch.tensor(tensors["in/attention_mask"]).bool())[0]
    np.testing.assert_allclose(logits.numpy(), tensors["out/eval_logits"], atol=2e-5)


@pytest.mark.parametrize("options", [{}, {"quantize_memory": True, "memory_quant_bits": 4}], ids=["plain", "4_bits"])
def test_the_torch_twin_evaluates_as_jax_does(options):
    model = small(**strategy("token"), **options)
    twin = torch_twin.MemoryTransformer(model.config, model.memory).eval()
    twin.load_state_dict({key: torch.tensor(np.asarray(v)) for key, v in state_dict(model).items()}, strict=True)
    tokens = np.asarray(ids())
    batch = {"input_ids": tokens, "labels": tokens, "attention_mask": np.ones_like(tokens), "valid": np.ones(2, bool)}
    with torch.no_grad():
        theirs = torch_twin.call(twin, {key: torch.tensor(value) for key, value in batch.items()})
    ours = losses.outputs(model, batch)
    assert set(ours) == set(theirs)
    for name, value in ours.items():
        np.testing.assert_allclose(value, theirs[name].numpy(), atol=2e-5, err_msg=name)


def test_memory_weights_come_with_their_norms():
    model = memory_lm.MemoryTransformer(original("scratch_dense_factorized_lowrankproj_variantB")[0])
    names = set(memory_lm.extract_memory_weights(model))
    assert {"memory_banks.0.A", "layers.0.memory_layernorm.weight", "layers.0.post_memory_mlp.up_proj.weight"} <= names
    assert "layers.0.mlp.up_proj.weight" not in names


def test_the_trainer_trains_from_an_original_config(tmp_path):
    config = original("trainer_run")[0]
    lines = [json.dumps({"text": f"line {i} of text"}) for i in range(12)]
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text("\n".join(lines))
    config.model.vocab_size, config.model.max_seq_len = 258, 16
    training = config.training
    training.dataset_name, training.text_field, training.training_mode = str(tmp_path), "text", "pretraining"
    training.max_length, training.num_epochs, training.max_steps, training.eval_steps = 16, None, 4, 4
    training.output_dir, training.mixed_precision = str(tmp_path / "out"), "no"
    trainer = memory_lm.Trainer(config)
    history = trainer.train()
    assert trainer.evaluate()["eval_loss"] == pytest.approx(history["best_val_loss"], rel=1e-5)
