"""Tokenizers as the original's users hand them over: named in the config, or objects of their own."""

import json
from unittest import mock

import datasets
import pytest
import torch

from jaxtrain.systems import memory_lm as memory
from jaxtrain.systems.memory_lm import data
from tests.unit.memory_lm.test_facade_training import tiny, with_tokenizer


@pytest.mark.parametrize("size", [50, 500])
def test_a_fresh_model_gets_the_tokenizers_vocabulary(tmp_path, size):
    config = with_tokenizer(tiny(tmp_path), tmp_path)
    config.model.vocab_size = size
    with pytest.warns(UserWarning, match=f"model.vocab_size: {size} becomes 264"):
        trainer = memory.Trainer(config)
    assert config.model.vocab_size == trainer.model.embed_tokens.num_embeddings == 264


def test_special_ids_of_the_config_are_the_tokenizers(tmp_path):
    config = with_tokenizer(tiny(tmp_path), tmp_path)
    config.model.eos_token_id, config.model.pad_token_id = 5, 6
    trainer = memory.Trainer(config)
    assert (trainer.tokenizer.eos_token_id, trainer.tokenizer.pad_token_id) == (5, 6)
    assert data.tokenizer_of(trainer.settings).pad_token_id == 6


def test_a_special_id_that_the_tokenizer_lacks_is_refused(tmp_path):
    config = with_tokenizer(tiny(tmp_path), tmp_path)
    config.model.pad_token_id = 9999
    with pytest.raises(ValueError, match=r"model.pad_token_id: 9999, wanted one of the 264 entries"):
        memory.Trainer(config)


def test_a_tokenizer_gets_the_special_ids_of_a_section(tmp_path):
    import transformers

    config = with_tokenizer(tiny(tmp_path), tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(config.model.tokenizer_name)
    config.model.eos_token_id, config.model.pad_token_id = 5, 6
    assert memory.configure_tokenizer_special_ids(tokenizer, config.model) is tokenizer
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (5, 6)
    config.model.bos_token_id = 9999
    with pytest.raises(ValueError, match="model.bos_token_id: 9999, wanted one of the 264 entries"):
        memory.configure_tokenizer_special_ids(tokenizer, config.model)


class Letters:
    """A test's own tokenizer: callable, with the few attributes that the original reads."""

    pad_token, pad_token_id, eos_token, eos_token_id = "_", 0, ".", 1

    def __call__(self, text, truncation=False, max_length=None, padding=False, return_tensors=None):
        return {"input_ids": [ord(letter) for letter in text][:max_length]}

    def encode(self, text, return_tensors=None):
        return torch.tensor([[ord(letter) for letter in text]])

    def decode(self, ids, skip_special_tokens=True):
        return "".join(map(chr, ids))


def test_a_dataset_takes_a_tokenizer_of_few_attributes(tmp_path):
    (tmp_path / "train.jsonl").write_text(json.dumps({"text": "one"}))
    assert memory.TextDataset(str(tmp_path), Letters(), 4)[0]["input_ids"].tolist() == [*map(ord, "one"), 0]


def test_what_a_tokenizer_pads_by_itself_is_no_text(tmp_path):
    (tmp_path / "train.jsonl").write_text(json.dumps({"text": "one"}))
    given = {"input_ids": torch.tensor([[5, 6, 7, 0]]), "attention_mask": torch.tensor([[1, 1, 1, 0]])}
    tokenizer = mock.MagicMock(pad_token_id=0, eos_token_id=1, return_value=given)
    item = memory.TextDataset(str(tmp_path), tokenizer, 6)[0]
    assert item["input_ids"].tolist() == [5, 6, 7, 0, 0, 0]
    assert item["attention_mask"].tolist() == [1, 1, 1, 0, 0, 0]
    assert item["labels"].tolist() == [5, 6, 7, -100, -100, -100]


def test_a_dataset_is_loaded_by_the_originals_call(monkeypatch):
    calls = []
    monkeypatch.setattr(datasets, "load_dataset", lambda *given, **named: calls.append((given, named)) or [])
    memory.TextDataset("some/dataset", Letters(), 4)
    assert calls == [(("some/dataset",), {"split": "train"})]


def test_generation_takes_tensors_of_the_tokenizer_and_no_prompts():
    sizes = {"hidden_dim": 8, "num_heads": 2, "num_layers": 1, "intermediate_dim": 8, "vocab_size": 128}
    config = memory.Config(memory.ModelConfig(**sizes), memory.MemoryConfig(vanilla_mode=True))
    model = memory.MemoryTransformer(config)
    assert memory.generate(model, Letters(), "ab", 2).startswith("ab")
    assert memory.generate_batch(model, Letters(), []) == []
