"""Pretrained models by their hub id: downloaded once, then at hand without a network."""

import os
import pathlib
import subprocess
import sys

import pytest
import tokenizers
import torch

from tests.e2e import hub
from tests.unit.criteria_evidence.judge import transformers

CONFIGS = pathlib.Path(__file__).parents[2] / "configs"
SIZES = {"vocab_size": 258, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "intermediate_size": 64, "max_position_embeddings": 64, "tie_word_embeddings": True}
RUNS = {
    "memory_lm_adapter_tiny": ("model.base_model_name", "model.base_config=null", "Qwen2Config", "Qwen2ForCausalLM"),
    "criteria_tiny": ("model.pretrained", "model.encoder=null", "BertConfig", "BertModel"),
}


def tokenizer():
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    words = {word: i for i, word in enumerate([*names.values(), "sleep", "sad", "tired", "no"])}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "[UNK]"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers().PreTrainedTokenizerFast(tokenizer_object=inner, **names)


def run(config: str, name: str, folder: pathlib.Path, address: str) -> subprocess.CompletedProcess:
    setting, without, *_ = RUNS[config]
    command = [sys.executable, "-m", "jaxtrain.run", "--config", str(CONFIGS / f"{config}.yaml"), f"run.dir={folder}"]
    command += ["train.steps=2", "tracking.tensorboard=false", f"{setting}={name}", without]
    places = {"HF_ENDPOINT": address, "HF_HOME": str(folder.parent / "hf"), "HF_HUB_OFFLINE": "0"}
    return subprocess.run(command, env=os.environ | places, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.parametrize("config", RUNS)
def test_a_model_of_the_hub_is_downloaded_once_and_then_needs_no_network(config, tmp_path):
    torch.manual_seed(0)
    sizes, model = (getattr(transformers(), name) for name in RUNS[config][2:])
    model(sizes(**SIZES)).save_pretrained(tmp_path / "hub" / "lab" / "tiny")
    tokenizer().save_pretrained(tmp_path / "hub" / "lab" / "tiny")
    with hub.serving(tmp_path / "hub") as (address, asked):
        first = run(config, "lab/tiny", tmp_path / "first", address)
        assert first.returncode == 0, first.stderr[-2000:]
        assert any(path.endswith("/model.safetensors") for path in asked)
        missing = run(config, "lab/other", tmp_path / "missing", address)
    second = run(config, "lab/tiny", tmp_path / "second", address)
    assert second.returncode == 0, second.stderr[-2000:]
    assert (missing.returncode, missing.stderr.count("Traceback")) == (2, 0)
    assert "lab/other is no local folder" in missing.stderr
