"""Pretrained models and datasets by their hub id: downloaded once, then at hand without a network."""

import json
import pathlib

import pytest
import tokenizers
import torch

from tests.e2e import hub
from tests.processes import finish, start
from tests.unit.criteria_evidence.judge import transformers

pytestmark = pytest.mark.slow

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


def run(config: str, folder: pathlib.Path, address: str, *settings: str) -> tuple[int, str]:
    """Exit code and output."""
    places = {"HF_ENDPOINT": address, "HF_HOME": str(folder.parent / "hf"), "HF_HUB_OFFLINE": "0"}
    given = ("--config", str(CONFIGS / f"{config}.yaml"), f"run.dir={folder}", "train.steps=2")
    return finish(start(1, *given, "tracking.tensorboard=false", *settings, **places))[0]


@pytest.mark.parametrize("config", RUNS)
def test_a_model_of_the_hub_is_downloaded_once_and_then_needs_no_network(config, tmp_path):
    torch.manual_seed(0)
    setting, without, *names = RUNS[config]
    sizes, model = (getattr(transformers(), name) for name in names)
    model(sizes(**SIZES)).save_pretrained(tmp_path / "hub" / "lab" / "tiny")
    tokenizer().save_pretrained(tmp_path / "hub" / "lab" / "tiny")
    with hub.serving(tmp_path / "hub") as (address, asked):
        first = run(config, tmp_path / "first", address, f"{setting}=lab/tiny", without)
        assert first[0] == 0, first[1][-2000:]
        assert any(path.endswith("/model.safetensors") for path in asked)
        code, said = run(config, tmp_path / "missing", address, f"{setting}=lab/other", without)
    second = run(config, tmp_path / "second", address, f"{setting}=lab/tiny", without)
    assert second[0] == 0, second[1][-2000:]
    assert "cannot be reached" in second[1]
    assert "Retry" not in second[1]
    assert (code, said.count("Traceback")) == (2, 0)
    assert "lab/other is no local folder" in said


@pytest.mark.parametrize("streaming", ["false", "true"])
def test_a_dataset_of_the_hub_is_trained_on(streaming, tmp_path):
    texts = tmp_path / "hub" / "datasets" / "lab" / "texts"
    texts.mkdir(parents=True)
    for split, count in {"train": 64, "test": 16}.items():
        rows = [{"text": f"{split} text number {i}, long enough for a few windows of bytes"} for i in range(count)]
        (texts / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    small = ("model.num_layers=1", "model.hidden_dim=32", "model.intermediate_dim=64", "data.max_length=32")
    small += ("data.num_samples=64", f"data.streaming={streaming}", f"data.cache_dir={tmp_path / 'rows'}")
    with hub.serving(tmp_path / "hub") as (address, asked):
        done = run("memory_lm_vanilla_tiny", tmp_path / "run", address, *small, "data.dataset_name=lab/texts")
        code, said = run("memory_lm_vanilla_tiny", tmp_path / "missing", address, *small, "data.dataset_name=lab/other")
    assert done[0] == 0, done[1][-2000:]
    assert any(path.endswith("/train.jsonl") for path in asked)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 2
    assert (code, said.count("Traceback")) == (2, 0)
    assert "data.dataset_name: lab/other" in said
