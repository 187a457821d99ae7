"""A user's session with the original's Trainer: construct, inspect, step, override, save, load, resume."""

import copy
import io
from unittest import mock

import pytest
import torch
import tqdm

from jaxtrain.errors import UserError
from jaxtrain.systems import fmri_autoencoder as giblet
from jaxtrain.systems.fmri_autoencoder.original import trainer as trainer_module
from tests.unit.fmri_autoencoder.test_facade_objects import GEN1, HEAD, batch

CALM = {**GEN1, "encoder_dropout": 0.0, "decoder_dropout": 0.0}


class Dataset(torch.utils.data.Dataset):
    """Random volumes."""

    def __init__(self, rows: int):
        self.columns = batch("gen1", rows)

    def __len__(self) -> int:
        return len(self.columns["fmri"])

    def __getitem__(self, i: int) -> dict:
        return {**{name: column[i] for name, column in self.columns.items()}, "subject_id": 1, "tr_index": i}


def make(folder, kind=giblet.Trainer, model=None, **settings):
    own = {"checkpoint_dir": str(folder), "log_dir": str(folder / "logs"), "batch_size": 8, "num_workers": 0}
    own |= {"learning_rate": 1e-3, "num_epochs": 2, "warmup_epochs": 1, "save_every": 1, "use_mixed_precision": False}
    overrides = {"tracking": {"tensorboard": False}, "shard": {"devices": 1}}
    torch.manual_seed(0)
    model = giblet.create_autoencoder(**CALM) if model is None else model
    return kind(model, Dataset(16), Dataset(5), giblet.TrainingConfig(**{**own, **settings}, overrides=overrides))


def test_a_new_trainer_has_what_its_users_touch(tmp_path):
    trainer = make(tmp_path / "run")
    assert isinstance(trainer.model, torch.nn.Module)
    assert isinstance(trainer.optimizer, torch.optim.AdamW)
    assert trainer.optimizer.param_groups[0]["weight_decay"] == 1e-5
    assert isinstance(trainer.scheduler, torch.optim.lr_scheduler.CosineAnnealingLR)
    assert (len(trainer.train_loader), len(trainer.val_loader), trainer.train_loader.batch_size) == (2, 1, 8)
    assert (trainer.current_epoch, trainer.global_step, trainer.epochs_without_improvement) == (0, 0, 0)
    assert (trainer.best_val_loss, trainer.train_history, trainer.val_history) == (float("inf"), [], [])
    assert (trainer.device, trainer.scaler, trainer.config.num_epochs) == (torch.device("cpu"), None, 2)
    assert isinstance(trainer.criterion, giblet.CombinedAutoEncoderLoss)
    assert trainer.checkpoint_dir.is_dir()
    assert trainer.log_dir.is_dir()


@pytest.mark.parametrize(("generation", "start"), [("gen1", 1e-4), ("head", 1e-5)])
def test_the_warm_up_starts_at_the_originals_rate(generation, start, tmp_path):
    model = giblet.create_autoencoder(**{"gen1": CALM, "head": HEAD}[generation])
    assert make(tmp_path / "run", model=model).optimizer.param_groups[0]["lr"] == pytest.approx(start)


@pytest.mark.slow
def test_without_a_validation_set_the_film_is_not_looked_for(tmp_path):
    config = make(tmp_path / "run", num_epochs=1).config
    trainer = giblet.Trainer(giblet.create_autoencoder(**CALM), Dataset(16), None, config)
    history = trainer.train()
    assert (len(history["train_history"]), history["val_history"], trainer.global_step) == (1, [], 2)
    assert (trainer.checkpoint_dir / "final_checkpoint.pt").is_file()


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained") / "run"
    model = giblet.create_autoencoder(**CALM)
    before = copy.deepcopy(model.state_dict())
    trainer = make(folder, model=model)
    return trainer, trainer.train(), before


def test_after_a_run_every_attribute_is_true(trained):
    trainer, history, before = trained
    assert (trainer.global_step, trainer.current_epoch, len(trainer.train_history)) == (4, 1, 2)
    assert history["best_val_loss"] == min(entry["total_loss"] for entry in history["val_history"])
    assert not torch.equal(trainer.model.state_dict()["decoder.layer11_text.bias"], before["decoder.layer11_text.bias"])
    state = trainer.optimizer.state_dict()
    assert len(state["state"]) == len(list(trainer.model.parameters()))
    assert state["state"][0]["step"] == 4
    assert trainer.optimizer.param_groups[0]["lr"] == pytest.approx(1e-6)
    assert trainer.scheduler.last_epoch == 4


def test_the_histories_have_the_originals_keys(trained):
    _, history, _ = trained
    terms = {f"{name}_loss" for name in ("total", "reconstruction", "video", "audio", "text", "fmri")}
    assert [set(entry) for entry in history["train_history"]] == [terms | {"lr"}] * 2
    assert all(terms | {"fmri_correlation", "fmri_r2"} <= set(entry) for entry in history["val_history"])


@pytest.mark.slow
def test_validation_by_itself_gives_the_runs_numbers(trained):
    trainer, history, _ = trained
    evaluated = trainer.validate()
    assert evaluated["total_loss"] == pytest.approx(history["val_history"][-1]["total_loss"], rel=1e-5)
    assert evaluated["fmri_correlation"] == pytest.approx(history["val_history"][-1]["fmri_correlation"], abs=1e-5)


def test_files_and_lines_are_the_originals(trained):
    trainer, history, _ = trained
    names = {path.name for path in trainer.checkpoint_dir.glob("*.pt")}
    assert names == {"checkpoint_epoch_0.pt", "checkpoint_epoch_1.pt", "best_checkpoint.pt", "final_checkpoint.pt"}
    saved = torch.load(trainer.checkpoint_dir / "checkpoint_epoch_1.pt", weights_only=True)
    assert (saved["epoch"], saved["global_step"], saved["config"]["learning_rate"]) == (1, 4, 1e-3)
    assert saved["val_loss"] == history["val_history"][1]["total_loss"]
    assert {"scheduler_state_dict", "train_history", "val_history", "best_val_loss"} <= set(saved)
    giblet.create_autoencoder(**CALM).load_state_dict(saved["model_state_dict"], strict=True)
    best = torch.load(trainer.checkpoint_dir / "best_checkpoint.pt", weights_only=True)
    assert best["val_loss"] == history["best_val_loss"]
    log = (trainer.log_dir / "training.log").read_text()
    assert "Starting training" in log
    assert f"Model parameters: {sum(p.numel() for p in trainer.model.parameters()):,}" in log
    first = history["train_history"][0], history["val_history"][0]
    assert f"Epoch 1/2 | Train Loss: {first[0]['total_loss']:.4f} | Val Loss: {first[1]['total_loss']:.4f} | " in log


def test_every_second_epoch_is_validated_from_the_first_on(tmp_path):
    trainer = make(tmp_path / "run", num_epochs=4, validate_every=2)
    assert len(trainer.train()["val_history"]) == 2
    lines = [line for line in (trainer.log_dir / "training.log").read_text().splitlines() if line.startswith("Epoch ")]
    assert ["Val Loss" in line for line in lines] == [True, False, True, False]


def test_a_second_run_in_a_folder_trains_anew_and_replaces_the_files(tmp_path):
    for rate in (1e-3, 1e-2):
        trainer = make(tmp_path / "run", num_epochs=1, learning_rate=rate)
        assert len(trainer.train()["train_history"]) == 1
    final = torch.load(tmp_path / "run" / "final_checkpoint.pt", weights_only=True)
    assert (trainer.global_step, final["config"]["learning_rate"]) == (2, 1e-2)


def test_a_run_folder_is_gone_on_with(tmp_path):
    first = make(tmp_path / "run", num_epochs=1)
    first.train()
    second = make(tmp_path / "run", num_epochs=2, resume_from=str(tmp_path / "run"))
    assert (len(second.train()["train_history"]), second.global_step) == (2, 4)
    assert not (tmp_path / "run" / "run_2").exists()


@pytest.mark.slow
def test_a_resumed_run_is_the_uninterrupted_one(trained, tmp_path):
    trainer, history, _ = trained
    resumed = make(tmp_path / "run", resume_from=str(trainer.checkpoint_dir / "checkpoint_epoch_0.pt"))
    assert (resumed.current_epoch, resumed.global_step, len(resumed.train_history)) == (0, 2, 1)
    assert resumed.train()["val_history"] == history["val_history"]
    other = resumed.model.state_dict()
    assert all(torch.equal(value, other[key]) for key, value in trainer.model.state_dict().items())


class Own(giblet.Trainer):
    """A step of the user's own around the original's."""

    seen = 0

    def train_step(self, batch):
        self.seen += len(batch["fmri"])
        return super().train_step(batch)


def ordered(trainer):
    """The trainer with its batches in the dataset's order, as torch's own loop below takes them."""
    trainer.train_loader = torch.utils.data.DataLoader(trainer.train_dataset, batch_size=8)
    return trainer


@pytest.mark.slow
def test_an_overridden_step_gives_torchs_own_numbers(tmp_path):
    trainer = ordered(make(tmp_path / "run", Own, scheduler_type="none"))
    twin = copy.deepcopy(trainer.model)
    history = trainer.train()
    assert trainer.seen == 32
    optimizer = torch.optim.AdamW(twin.parameters(), lr=1e-3, weight_decay=1e-5)
    losses = []
    for _ in range(2):
        for data in torch.utils.data.DataLoader(Dataset(16), batch_size=8):
            outputs = twin(data["video"], data["audio"], data["text"])
            loss, _ = trainer.criterion(outputs, data["video"], data["audio"], data["text"], data["fmri"])
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.item())
    got = [entry["total_loss"] for entry in history["train_history"]]
    assert got == pytest.approx([sum(losses[:2]) / 2, sum(losses[2:]) / 2], rel=1e-4)
    key = "decoder.layer11_text.weight"
    torch.testing.assert_close(trainer.model.state_dict()[key], twin.state_dict()[key], atol=2e-5, rtol=1e-4)


class OwnLoss(Own):
    def compute_loss(self, outputs, batch):
        total, parts = super().compute_loss(outputs, batch)
        return 2 * total, parts


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Own, OwnLoss])
def test_an_overridden_step_is_recorded_once_while_rates_and_histories_change(kind, tmp_path):
    trainer = ordered(make(tmp_path / "run", kind, num_epochs=10))
    trainer.train()
    compiled = trainer._step().compiled
    assert (trainer.global_step, compiled.torch, len(compiled.capture.graphs)) == (20, None, 1)


class Voxels(torch.nn.Module):
    def forward(self, outputs, video, audio, text, fmri):
        return (outputs["predicted_fmri"] - fmri).abs().mean()


class Branching(Voxels):
    def forward(self, *given):
        loss = super().forward(*given)
        return loss if loss < 1e6 else loss.log()


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Voxels, Branching])
def test_a_criterion_of_the_users_own_trains(kind, tmp_path, capsys):
    trainer = make(tmp_path / "run")
    trainer.criterion = kind()
    before = trainer.validate()
    assert set(before) == {"total_loss", "fmri_correlation", "fmri_r2"}
    trainer.train()
    assert trainer.validate()["total_loss"] != before["total_loss"]
    assert ("training runs in torch, not compiled" in capsys.readouterr().out) == (kind is Branching)


def test_save_and_load_by_hand(tmp_path):
    trainer = make(tmp_path / "run")
    path = trainer.save_checkpoint(3, val_loss=0.5)
    assert path == tmp_path / "run" / "checkpoint_epoch_3.pt"
    assert (tmp_path / "run" / "best_checkpoint.pt").is_file()
    other = make(tmp_path / "other")
    torch.nn.init.zeros_(other.model.decoder.layer11_text.bias)
    other.load_checkpoint(path)
    assert other.current_epoch == 3
    weight = "decoder.layer11_text.weight"
    assert torch.equal(other.model.state_dict()[weight], trainer.model.state_dict()[weight])
    assert trainer.save_checkpoint(tmp_path / "mine.pt") == tmp_path / "mine.pt"
    with pytest.raises(FileNotFoundError, match="no such checkpoint"):
        other.load_checkpoint(tmp_path / "none.pt")


def test_a_checkpoint_of_another_model_is_a_runtime_error(tmp_path):
    path = make(tmp_path / "run").save_checkpoint(0)
    other = make(tmp_path / "other", model=giblet.create_autoencoder(**{**CALM, "n_voxels": 9}))
    with pytest.raises(RuntimeError, match="size mismatch"):
        other.load_checkpoint(path)


def test_early_stopping_counts_as_the_original_says(tmp_path):
    trainer = make(tmp_path / "run", early_stopping_patience=2, early_stopping_delta=0.1)
    assert [trainer.check_early_stopping(loss) for loss in (1.0, 0.95, 0.8, 0.75, float("nan"))] == [False] * 4 + [True]
    assert (trainer.best_val_loss, trainer.epochs_without_improvement) == (0.8, 2)


def test_the_best_file_is_the_least_loss_even_within_the_delta(tmp_path):
    trainer = make(tmp_path / "run", early_stopping_delta=0.1)
    for epoch, loss in enumerate((0.8, 0.75, 0.77)):
        trainer.end_epoch(epoch, {"total_loss": 1.0}, {"total_loss": loss})
    assert torch.load(tmp_path / "run" / "best_checkpoint.pt", weights_only=True)["val_loss"] == 0.75


def test_the_final_file_has_the_configs_epochs_after_early_stopping_too(tmp_path):
    trainer = make(tmp_path / "run", num_epochs=5, early_stopping_patience=1, early_stopping_delta=1e9)
    assert len(trainer.train()["train_history"]) == 2
    assert torch.load(tmp_path / "run" / "final_checkpoint.pt", weights_only=True)["epoch"] == 5


def test_the_cosine_lasts_from_the_warm_up_to_the_end(tmp_path):
    assert make(tmp_path / "run", num_epochs=3, warmup_epochs=1).scheduler.T_max == 4


@pytest.mark.slow
def test_a_model_on_the_meta_device_is_drawn_where_it_belongs(tmp_path):
    with torch.device("meta"):
        model = giblet.create_autoencoder(**CALM)
    trainer = make(tmp_path / "run", model=model, num_epochs=1)
    trainer.train()
    assert all(torch.isfinite(value).all() and not value.is_meta for value in trainer.model.state_dict().values())
    assert trainer.model is model
    assert len(trainer.optimizer.state) == len(list(model.parameters()))


def test_an_epoch_has_its_progress_bar(tmp_path, monkeypatch):
    made = []

    def bar(batches, desc, **options):
        made.append(tqdm.tqdm(batches, desc=desc, file=io.StringIO()))
        return made[-1]

    monkeypatch.setattr(trainer_module, "tqdm", bar)
    trainer = make(tmp_path / "run")
    trainer.train_step = lambda batch: {"total_loss": 1.0}
    assert trainer.train_epoch(1)["total_loss"] == 1.0
    assert [(one.desc, one.n, one.total) for one in made] == [("Epoch 2", 2, 2)]


@pytest.mark.parametrize("overrides", [{"optim": {}}, {"tracking": {"wandb": True}}, {"run": {}}])
def test_overrides_that_the_loop_does_not_follow_are_refused(overrides, tmp_path):
    config = giblet.TrainingConfig(checkpoint_dir=str(tmp_path), log_dir=str(tmp_path), overrides=overrides)
    with pytest.raises(UserError, match=f"overrides: {next(iter(overrides))}: .* jaxtrain.run"):
        giblet.Trainer(giblet.create_autoencoder(**CALM), Dataset(16), None, config)


def test_a_model_that_is_no_module_is_refused(tmp_path):
    with pytest.raises(UserError, match="the model is str, wanted a torch.nn.Module"):
        make(tmp_path, model="autoencoder")


def test_batches_of_one_raise_as_batch_norm_does(tmp_path):
    with pytest.raises(ValueError, match="expects more than 1 value per channel when training"):
        make(tmp_path / "run", batch_size=1).train()


def test_a_batch_of_more_than_all_samples_is_told(tmp_path, capsys):
    trainer = make(tmp_path / "run", batch_size=64)
    trainer._say_banner()
    assert "Batch size: 64 (one batch of all samples in training)" in capsys.readouterr().out
    assert (trainer.train_loader.batch_size, trainer.val_loader.batch_size) == (16, 64)


def test_workers_leave_a_dataset_of_a_local_class_to_this_process(tmp_path, capsys):
    class Local(Dataset):
        pass

    config = giblet.TrainingConfig(checkpoint_dir=str(tmp_path), log_dir=str(tmp_path), batch_size=8, num_workers=2)
    trainer = giblet.Trainer(giblet.create_autoencoder(**CALM), Local(16), Dataset(5), config)
    assert "not by 2 workers: Can't pickle local object" in capsys.readouterr().out
    assert (trainer.train_loader.num_workers, trainer.val_loader.num_workers) == (0, 2)
    assert len(next(iter(trainer.train_loader))["fmri"]) == 8


@pytest.mark.parametrize("epochs", [0, 1])
def test_a_finished_run_trains_no_further(epochs, tmp_path, capsys):
    trainer = make(tmp_path / "run", num_epochs=epochs, warmup_epochs=0)
    trainer.global_step = 2 * epochs
    before = copy.deepcopy(trainer.model.state_dict())
    assert trainer.train() == {"train_history": [], "val_history": [], "best_val_loss": float("inf")}
    assert "nothing is left to train" in capsys.readouterr().out
    assert (tmp_path / "run" / "final_checkpoint.pt").is_file()
    assert all(torch.equal(before[name], value) for name, value in trainer.model.state_dict().items())


def test_an_optimizer_that_is_spied_on_is_stepped_for_every_batch(tmp_path):
    trainer = make(tmp_path / "run", num_epochs=1)
    with mock.patch.object(trainer.optimizer, "step", wraps=trainer.optimizer.step) as spied:
        trainer.train()
    assert spied.call_count == len(trainer.train_loader)


def test_a_step_patched_on_the_class_is_the_one_that_runs(tmp_path):
    found = {"total_loss": 0.5, "lr": 1e-3}
    with mock.patch.object(giblet.Trainer, "train_epoch", autospec=True, return_value=found) as patched:
        trainer = make(tmp_path / "run")
        assert trainer.train()["train_history"] == [found, found]
    assert patched.call_count == 2
