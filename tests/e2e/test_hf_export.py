"""`jaxtrain.export --hf`: a trained run becomes a folder that transformers reads and scores alike."""

import json
import pathlib

import jax
import numpy as np
import pytest
import torch
import yaml

from jaxtrain import Trainer, config_io, export
from tests.contract.tasks import tiny, tiny_file
from torch_bridge.datasets import to_torch

pytestmark = pytest.mark.slow


def test_a_trained_classifier_predicts_the_same_from_its_hugging_face_folder(tmp_path, capsys):
    import transformers

    trainer = tiny("criteria_evidence.criteria", tmp_path / "run", "train.steps=3", "data.placement=host")
    trainer.train()
    assert export.main(["--run", str(tmp_path / "run"), "--checkpoint", "last", "--hf", str(tmp_path / "hf")]) == 0
    assert f"exported {tmp_path / 'hf'}" in capsys.readouterr().out
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "hf").eval()
    batch = trainer.train_loader.host_batch(0)
    given = {key: to_torch(batch[key]).long() for key in ("input_ids", "attention_mask")}
    with torch.no_grad():
        logits = theirs(**given).logits.numpy()
    ours = jax.device_get(trainer.task.outputs(trainer.model(), batch))
    np.testing.assert_allclose(jax.tree.leaves(ours)[0], logits, atol=1e-5)


def test_a_model_without_that_form_says_so(tmp_path, capsys):
    tiny("digits.classify", tmp_path / "run", "train.steps=1", "train.epochs=null").train()
    folder = pathlib.Path(tmp_path / "hf")
    assert export.main(["--run", str(tmp_path / "run"), "--hf", str(folder)]) == 2
    assert "--hf: the models of digits.classify have no Hugging Face form" in capsys.readouterr().err
    assert not folder.exists()


def test_a_lora_run_is_exported_for_peft_and_other_forms_are_refused(tmp_path, capsys):
    run = tmp_path / "run"
    values = yaml.safe_load(tiny_file("memory_lm.adapter").read_text())
    values["memory"]["use_memory_adapter"] = False
    del values["optim"]["groups"]["memory_bank"]
    values |= {"run": {"dir": str(run), "quiet": True}, "shard": {"devices": 1}, "train": {"steps": 1}}
    task, config = config_io.check(values)
    Trainer(config=config, task=task).train()
    assert export.main(["--run", str(run), "--format", "peft", str(tmp_path / "peft")]) == 0
    described = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert (described["r"], "lm_head" in described["target_modules"]) == (4, True)
    assert (tmp_path / "peft" / "adapter_model.safetensors").is_file()
    for form, problem in (
        ("original", "the original has no memory.routing_strategy_train=prefix"),
        ("gguf", "wanted one of peft, original"),
    ):
        assert export.main(["--run", str(run), "--as", form, str(tmp_path / "other")]) == 2
        assert problem in capsys.readouterr().err
