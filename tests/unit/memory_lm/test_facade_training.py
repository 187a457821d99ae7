"""A user's session with the original's Trainer: construct, inspect, step, override, save, load, resume."""

import json
import logging
import random

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from jaxtrain.systems import memory_lm as memory
from jaxtrain.systems.memory_lm.tokenizers import from_json, train_bpe
from tests.unit.memory_lm.test_facade_models import case_of
from tests.unit.memory_lm.test_torch_compat import original

FILES = {"model.pt", "model.safetensors", "optimizer.bin", "scheduler.bin", "config.yaml", "trainer_state.json"}
FILES |= {"random_states_0.pkl"}


def tiny(folder, name: str = "data", rows: int = 12, **training):
    """The golden run's config on a little text, in bytes."""
    config = original("trainer_run")[0]
    lines = [json.dumps({"text": f"line {i} of text"}) for i in range(rows)]
    (folder / name).mkdir(exist_ok=True)
    for split in ("train", "test"):
        (folder / name / f"{split}.jsonl").write_text("\n".join(lines))
    config.model.vocab_size, config.model.max_seq_len, config.model.num_layers = 258, 16, 1
    config.memory.memory_layer_placement, config.memory.memory_gradient_checkpointing = "all", False
    own = {"dataset_name": str(folder / name), "text_field": "text", "training_mode": "pretraining", "max_length": 16}
    own |= {"num_epochs": None, "max_steps": 4, "eval_steps": 2, "save_steps": 2, "save_total_limit": 2}
    own |= {"output_dir": str(folder / "out"), "mixed_precision": "no", "gradient_checkpointing": False}
    for key, value in (own | training).items():
        setattr(config.training, key, value)
    return config


@pytest.mark.slow
def test_a_run_keeps_its_attributes_true_and_writes_files_that_it_resumes_from(tmp_path, capsys):
    config = tiny(tmp_path)
    torch.manual_seed(0)
    model = memory.MemoryTransformer(config)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    trainer = memory.Trainer(config, model=model)
    assert [group["name"] for group in trainer.optimizer.param_groups] == ["memory", "memory_bank", "base_model"]
    assert trainer.total_steps == 4
    history = trainer.train()
    assert trainer.model is model
    assert any(not torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert (trainer.global_step, trainer.best_loss) == (4, history["best_val_loss"])
    assert trainer.optimizer.state[model.memory_banks[0].base_bank.memory]["step"] == 4
    assert trainer.scheduler.last_epoch == 4
    printed = capsys.readouterr().out
    assert "Step 4: eval_loss = " in printed
    assert "Training complete! Final step: 4" in printed
    out = tmp_path / "out"
    for name in ("checkpoint-2", "checkpoint-4", "best_model", "final_model"):
        assert {path.name for path in (out / name).iterdir()} == FILES, name
    state = json.loads((out / "checkpoint-2" / "trainer_state.json").read_text())
    assert (state["global_step"], list(state)) == (2, sorted(state))
    saved = torch.load(out / "final_model" / "model.pt", weights_only=True)
    for key, value in model.state_dict().items():
        assert torch.equal(saved[key], value), key
    kept = load_file(out / "final_model" / "model.safetensors")
    assert set(saved) - set(kept) == {"lm_head.weight"}  # tied: accelerate keeps one name
    theirs = memory.Trainer(tiny(tmp_path, output_dir=str(tmp_path / "other"))).optimizer
    theirs.load_state_dict(torch.load(out / "checkpoint-4" / "optimizer.bin", weights_only=True))
    assert theirs.param_groups[0]["initial_lr"] == config.training.memory_lr

    again = tiny(tmp_path, resume_from_checkpoint=str(out / "checkpoint-2"))
    resumed = memory.Trainer(again)
    assert resumed.train()["val_history"][-1]["loss"] == pytest.approx(history["val_history"][-1]["loss"], abs=1e-6)
    for key, value in model.state_dict().items():
        torch.testing.assert_close(resumed.model.state_dict()[key], value, atol=1e-6, rtol=1e-5)


def test_accelerate_takes_the_random_states(tmp_path, caplog):
    import accelerate

    from jaxtrain.systems.memory_lm.original.checkpoint_files import random_states

    accelerator = accelerate.Accelerator(cpu=True)
    accelerator.save_state(str(tmp_path))
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    (tmp_path / "random_states_0.pkl").write_bytes(random_states())
    draw = lambda: (torch.rand(1).item(), random.random(), np.random.random())
    first = draw()
    with caplog.at_level(logging.INFO, "accelerate.checkpointing"):
        accelerator.load_state(str(tmp_path))
    assert "All random states loaded successfully" in caplog.text
    assert draw() == first


def test_wrong_settings_are_refused(tmp_path):
    for name, value in {"batch_size": 0, "save_total_limit": 0, "warmup_steps": -1, "max_grad_norm": -1.0}.items():
        with pytest.raises(ValueError, match=f"training.{name}"):
            memory.Trainer(tiny(tmp_path, **{name: value}))
    with pytest.raises(ValueError, match="exclude each other"):
        memory.Trainer(tiny(tmp_path, resume_from_checkpoint="a", init_from_checkpoint="b"))


class Counting(memory.Trainer):
    """A user's own: it counts the steps."""

    seen = 0

    def training_step(self, batch, update=True):
        self.seen += 1
        return super().training_step(batch, update)


@pytest.mark.slow
def test_the_recorded_run_on_the_host_is_the_originals(tmp_path, capsys):
    import tokenizers

    case, tensors = case_of("trainer_run")
    training = {**case["config"]["training"], "output_dir": str(tmp_path / "out"), "num_epochs": 2, "max_length": 8}
    config = tiny(tmp_path, rows=10, **{k: v for k, v in training.items() if k not in ("dataset_name", "text_field")})
    config.training.training_mode = "pretraining"
    for section in ("model", "memory"):
        for key, value in case["config"][section].items():
            setattr(getattr(config, section), key, value)
    words = {"<pad>": 0, "<|endoftext|>": 1, **{f"w{i}": i for i in range(2, 53)}}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w2"))
    words.save(str(tmp_path / "tokenizer.json"))
    config.model.tokenizer_name = str(tmp_path / "tokenizer.json")
    model = memory.MemoryTransformer(config)
    model.load_state_dict({k.removeprefix("param/"): v for k, v in tensors.items() if k.startswith("param/")})
    trainer = Counting(config, model=model)
    batches = lambda split: [
        {name: tensors[f"in/{split}/{name}"][i : i + 2] for name in ("input_ids", "attention_mask", "labels")}
        for i in range(0, len(tensors[f"in/{split}/input_ids"]), 2)
    ]
    trainer.train_dataloader, trainer.eval_dataloader = batches("train"), batches("eval")
    trainer.train()
    assert "Counting.training_step is your own" in capsys.readouterr().out
    assert trainer.seen == 10
    assert (trainer.global_step, trainer.epoch) == (case["final_global_step"], case["final_epoch"])
    assert trainer.best_loss == pytest.approx(case["best_loss"], abs=1e-4)
    for key, value in tensors.items():
        if key.startswith("after_train/"):
            mine = trainer.model.state_dict()[key.removeprefix("after_train/")]
            torch.testing.assert_close(mine, value, atol=2e-4, rtol=1e-3, msg=key)
    assert (tmp_path / "out" / "best_model" / "optimizer.bin").is_file()


def test_a_tokenizer_without_an_end_token_is_one_clear_message():
    from jaxtrain.systems.memory_lm.text_dataset import Encoder

    class Endless:
        eos_token_id, name = None, "mine"

    with pytest.raises(ValueError, match="data.append_eos: the tokenizer mine has no end token"):
        Encoder(Endless(), 8)
    assert Encoder(Endless(), 8, original=True).append_eos is False


@pytest.fixture
def texts(tmp_path):
    """A function (training_mode) -> a TextDataset of one text, with a tokenizer without a padding token."""
    (tmp_path / "train.jsonl").write_text(json.dumps({"text": "one text"}))
    tokenizer = from_json(train_bpe(["one text"], 264)).inner
    return lambda mode: memory.TextDataset(str(tmp_path), tokenizer, 16, training_mode=mode)


def test_a_dataset_keeps_its_arguments_and_gives_the_tokenizer_its_padding(texts):
    dataset = texts("pretraining")
    assert (len(dataset), dataset.max_length, dataset.text_field, dataset.split) == (1, 16, "text", "train")
    assert dataset.tokenizer.pad_token == dataset.tokenizer.eos_token == "<|endoftext|>"
    assert [tuple(value.shape) for value in dataset[0].values()] == [(16,)] * 3


def test_an_unknown_training_mode_is_refused_where_an_item_is_read(texts):
    dataset = texts("dreaming")
    with pytest.raises(ValueError, match="'dreaming', wanted one of pretraining"):
        dataset[0]


def test_early_stopping_drifts_as_the_originals(tmp_path):
    cases = case_of("early_stopping")[0]["cases"]
    trainer = memory.Trainer.__new__(memory.Trainer)
    for case in cases:
        trainer.config = memory.Config()
        trainer.config.training.early_stopping = True
        trainer.config.training.early_stopping_patience = case["patience"]
        trainer.config.training.early_stopping_threshold = case["threshold"]
        trainer.best_loss, trainer.patience_counter = float("inf"), 0
        for point in case["trace"]:
            stop = trainer.check_early_stopping(float(point["eval_loss"]))
            assert (trainer.patience_counter, stop) == (point["patience"], point["stop"])
            assert trainer.best_loss == float(point["best_loss"])
