"""A user's session with the original's Trainer: construct, inspect, step, override, save, load, resume."""

import copy
import json
import logging
import random

import jax
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


def with_tokenizer(config, folder):
    """Give the config a tokenizer of 264 entries, in a folder of its own."""
    tokenizer = from_json(train_bpe(["line 1 of text"], 264), pad="<pad>").inner
    tokenizer.save_pretrained(folder / "tokenizer")
    config.model.tokenizer_name, config.model.vocab_size = str(folder / "tokenizer"), len(tokenizer)
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
def test_the_recorded_run_is_the_originals(tmp_path):
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
    assert trainer.seen == 10
    assert (trainer.global_step, trainer.epoch) == (case["final_global_step"], case["final_epoch"])
    assert trainer.best_loss == pytest.approx(case["best_loss"], abs=1e-4)
    for key, value in tensors.items():
        if key.startswith("after_train/"):
            mine = trainer.model.state_dict()[key.removeprefix("after_train/")]
            torch.testing.assert_close(mine, value, atol=2e-4, rtol=1e-3, msg=key)
    assert (tmp_path / "out" / "best_model" / "optimizer.bin").is_file()


@pytest.mark.slow
def test_small_gains_in_a_row_stop_a_run_as_in_the_original(tmp_path):
    early = {"early_stopping": True, "early_stopping_patience": 3, "early_stopping_threshold": 10.0}
    trainer = memory.Trainer(tiny(tmp_path, max_steps=20, eval_steps=1, save_steps=100, **early))
    trainer.train()
    assert (trainer.global_step, trainer.patience_counter) == (4, 3)  # the first gain is infinite
    assert trainer.should_stop
    assert progress(tmp_path / "out" / "final_model")["patience_counter"] == 3


def test_a_run_is_not_judged_between_its_eval_steps(tmp_path):
    trainer = memory.Trainer(tiny(tmp_path, max_steps=1, eval_steps=2, save_steps=2))
    trainer.train()
    assert trainer.best_loss == float("inf")
    assert progress(tmp_path / "out" / "final_model")["best_loss"] is None
    assert not (tmp_path / "out" / "best_model").exists()


def test_more_gpus_than_there_are_is_a_warning(tmp_path):
    config = tiny(tmp_path, num_gpus=64)
    with pytest.warns(UserWarning, match="training.num_gpus: 64, but this process has"):
        trainer = memory.Trainer(config)
    assert (trainer.settings.shard.devices, config.training.num_gpus) == (jax.local_device_count(), 64)


@pytest.mark.slow
def test_fsdp_and_recomputed_layers_change_no_number(tmp_path):
    trained = {}
    for options in ({}, {"distributed_strategy": "fsdp", "gradient_checkpointing": True}):
        config = tiny(tmp_path, num_gpus=2, **options)
        config.model.dropout = 0.0
        trainer = memory.Trainer(config)
        batch = next(iter(trainer.train_dataloader))
        losses = [float(trainer.training_step(batch)["loss"]) for _ in range(2)]
        compiled = trainer._step().compiled
        trained[compiled.weights.layout.strategy, trainer.model.recomputes_layers] = losses
    assert trained["fsdp", True] == pytest.approx(trained["ddp", False], rel=1e-6)


def test_a_pass_leaves_out_an_incomplete_micro_batch(tmp_path):
    options = {"batch_size": 2, "gradient_accumulation_steps": 1, "num_epochs": 2}
    trainer = memory.Trainer(with_tokenizer(tiny(tmp_path, rows=5, **options), tmp_path))
    assert (len(trainer.train_dataloader), trainer.total_steps) == (2, 4)


def test_an_evaluation_is_over_the_rows_of_the_trainers_loader(tmp_path):
    config = with_tokenizer(tiny(tmp_path, rows=5), tmp_path)
    config.memory.wo_init_zero = False
    trainer = memory.Trainer(config)
    losses, model = [], trainer.model.eval()
    with torch.no_grad():
        for batch in trainer.eval_dataloader:
            logits = model(batch["input_ids"], batch["attention_mask"])["logits"][:, :-1]
            losses.append(
                torch.nn.functional.cross_entropy(
                    logits.flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=-100, reduction="none"
                )
            )
    losses = torch.cat(losses)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(losses[losses > 0].mean().item(), abs=1e-5)


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


@pytest.mark.slow
def test_a_second_trainer_in_an_output_dir_trains_the_model_that_it_is_given(tmp_path):
    few = {"max_steps": 2, "eval_steps": 100, "save_steps": 100}
    memory.Trainer(tiny(tmp_path, **few)).train()
    config = tiny(tmp_path, **few)
    model = memory.MemoryTransformer(config)
    model.norm.weight.data.fill_(5.0)
    trainer = memory.Trainer(config, model=model)
    trainer.train()
    assert trainer.global_step == 2
    assert (model.norm.weight > 4.9).all()
    saved = torch.load(tmp_path / "out" / "final_model" / "model.pt", weights_only=True)
    assert torch.equal(saved["norm.weight"], model.norm.weight)


class Batches(list):
    """A user's own loader: it counts its passes."""

    passes = 0

    def __iter__(self):
        self.passes += 1
        return super().__iter__()


@pytest.mark.slow
def test_replaced_parts_are_the_ones_that_train(tmp_path):
    trainer = memory.Trainer(with_tokenizer(tiny(tmp_path, max_steps=3, eval_steps=1, save_steps=100), tmp_path))
    trainer.train_dataloader = Batches(list(trainer.train_dataloader)[:2])
    trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.0)
    losses = iter([3.0, 2.0, 1.0])
    trainer.evaluate = lambda: {"eval_loss": next(losses)}
    before = {key: value.clone() for key, value in trainer.model.state_dict().items()}
    trainer.train()
    assert (trainer.train_dataloader.passes, trainer.global_step, trainer.best_loss) == (3, 3, 1.0)
    assert all(torch.equal(value, before[key]) for key, value in trainer.model.state_dict().items())


def test_parts_that_cannot_be_replaced_are_refused(tmp_path):
    trainer = memory.Trainer(tiny(tmp_path))
    with pytest.raises(ValueError, match=r"pass Trainer\(config, model=...\)"):
        trainer.model = trainer.model
    with pytest.raises(ValueError, match="parameters that are not trainer.model's"):
        trainer.optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))])
    with pytest.raises(ValueError, match="without a metric"):
        trainer.scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(trainer.optimizer)


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    """A trainer after two of an epoch's three updates, and its output_dir."""
    folder = tmp_path_factory.mktemp("short")
    options = {"batch_size": 4, "max_steps": 2, "eval_steps": 2, "save_steps": 2, "save_best_model": False}
    config = with_tokenizer(tiny(folder, **options), folder)
    config.training.gradient_accumulation_steps = 1
    trainer = memory.Trainer(config)
    trainer.train()
    return trainer, folder / "out"


def progress(folder):
    return json.loads((folder / "trainer_state.json").read_text())


@pytest.mark.slow
def test_a_pass_that_was_cut_off_counts_as_an_epoch(short):
    trainer, out = short
    assert trainer.steps_per_epoch == 3
    assert (trainer.epoch, progress(out / "final_model")["epoch"], progress(out / "checkpoint-2")["epoch"]) == (1, 1, 0)


@pytest.mark.slow
def test_saves_hold_the_whole_config_and_the_loss_of_the_last_update(short):
    trainer, out = short
    assert memory.load_config(out / "final_model" / "config.yaml") == trainer.config
    last = progress(out / "final_model")["loss"]
    assert progress(out / "checkpoint-2")["loss"] == last
    assert last != trainer.best_loss
    assert not (out / "best_model").exists()


@pytest.mark.slow
def test_the_best_model_holds_its_evaluations_loss(tmp_path):
    trainer = memory.Trainer(tiny(tmp_path, max_steps=2, eval_steps=2, save_steps=2))
    trainer.train()
    out = tmp_path / "out"
    assert progress(out / "best_model")["loss"] == trainer.best_loss
    assert progress(out / "checkpoint-2")["loss"] == progress(out / "final_model")["loss"] != trainer.best_loss


def test_the_originals_own_steps_can_be_called(tmp_path):
    trainer = memory.Trainer(tiny(tmp_path, early_stopping=True, early_stopping_patience=2))
    assert isinstance(trainer._create_optimizer(), torch.optim.AdamW)
    assert trainer._create_scheduler().optimizer is trainer.optimizer
    trainer.best_loss = 1.0
    assert [trainer._check_early_stopping(0.5), trainer._check_early_stopping(1.5)] == [False, False]
    assert (trainer.best_loss, trainer.patience_counter) == (1.0, 1)


@pytest.mark.slow
def test_steps_of_ones_own_go_on_from_a_checkpoint(short, tmp_path):
    trainer, out = short
    config = copy.deepcopy(trainer.config)
    config.training.max_steps, config.training.output_dir = 3, str(tmp_path)
    config.training.resume_from_checkpoint = str(out / "checkpoint-2")
    resumed = Counting(config)
    assert (resumed.global_step, resumed.best_loss) == (2, trainer.best_loss)
    assert torch.equal(resumed.model.norm.weight, trainer.model.norm.weight)
    resumed.train()
    assert (resumed.seen, resumed.global_step, resumed.scheduler.last_epoch) == (1, 3, 3)
    assert not resumed._compiled.in_torch
    assert resumed.optimizer.state[resumed.model.norm.weight]["step"] == 3
