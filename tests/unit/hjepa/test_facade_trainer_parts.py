"""HJEPATrainer with mocks for its parts, and what it reports to checkpoints, loggers and logging."""

import logging
from unittest import mock

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from jaxtrain.systems import hjepa
from tests.unit.hjepa.test_facade_trainer import TinyLoss, TinyModel, config_of, masks, real, tiny


@pytest.mark.filterwarnings("error")
def test_collapse_metrics_of_any_features(tmp_path):
    trainer = tiny(tmp_path, compiled=False)
    zeros = trainer._compute_collapse_metrics(torch.zeros(4, 6, 8), torch.ones(4, 6, 8))
    assert (zeros["context_std"], zeros["context_norm"], zeros["target_std"]) == (0.0, 0.0, 0.0)
    assert zeros["target_norm"] == pytest.approx(48**0.5)
    assert zeros["target_eff_rank"] == pytest.approx(1.0, abs=1e-5)
    assert np.isnan(zeros["context_eff_rank"])
    torch.manual_seed(0)
    many = trainer._compute_collapse_metrics(torch.randn(150, 200), torch.randn(1, 6, 8, dtype=torch.bfloat16))
    assert 60 < many["context_eff_rank"] < 100  # of the first 100 rows
    assert many["target_eff_rank"] == pytest.approx(1.0, abs=1e-5)


def test_features_that_are_not_finite_have_no_rank(tmp_path):
    found = tiny(tmp_path, compiled=False)._compute_collapse_metrics(torch.full((4, 8), torch.nan), torch.ones(4, 8))
    assert "context_eff_rank" not in found
    assert "target_eff_rank" in found


def test_a_run_with_a_mock_of_a_loss_calls_it_for_every_batch(tmp_path):
    trainer = tiny(tmp_path, compiled=False)
    trainer.loss_fn = mock.Mock(side_effect=TinyLoss().forward)
    trainer.train()
    assert trainer.loss_fn.call_count == 2 * (3 + 1)


def test_a_summary_takes_dicts_numbers_and_nothing(tmp_path, capsys):
    trainer = tiny(tmp_path, compiled=False)
    trainer._log_epoch_summary(0, {"loss": 1.0}, None)
    trainer._log_epoch_summary(1, 0.5, 0.25)
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("epoch 1/2, train loss 1.0000, 0")
    assert second.startswith("epoch 2/2, train loss 0.5000, val loss 0.2500")
    trainer.progress_tracker = mock.Mock()
    trainer._log_epoch_summary(1, 0.5)


def test_paths_in_a_config_do_not_keep_its_checkpoints_from_loading(tmp_path):
    trainer = tiny(tmp_path, compiled=False)
    trainer.config["checkpoint"]["checkpoint_dir"] = tmp_path / "checkpoints"
    path = trainer._save_checkpoint(1, 0.5)
    torch.load(path, weights_only=True)
    trainer._load_checkpoint(path)
    assert trainer.current_epoch == 2


def test_a_mock_of_a_model_moves_its_own_target(tmp_path):
    trainer, model = tiny(tmp_path, compiled=False), mock.Mock()
    context, target = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    model.context_encoder, model.target_encoder = context, target
    trainer.model = model
    trainer._update_target_encoder(0.0)
    assert torch.equal(target.weight, context.weight)


def test_it_is_constructed_of_mocks(tmp_path):
    model, loader, optimizer = mock.MagicMock(), mock.MagicMock(), mock.Mock()
    model.to.return_value = model
    loader.__len__.return_value = 10
    trainer = hjepa.HJEPATrainer(
        model, loader, None, optimizer, mock.Mock(), mock.Mock(), config_of(tmp_path), device="cpu"
    )
    assert (trainer.model, trainer.optimizer) == (model, optimizer)
    assert (trainer.steps_per_epoch, trainer.lr_scheduler(0)) == (10, 0.01)


def test_a_mock_of_an_optimizer_is_stepped_once_per_batch(tmp_path):
    trainer = tiny(tmp_path, compiled=False)
    trainer.optimizer = mock.Mock(param_groups=[{"lr": 0.5}])
    trainer.lr_scheduler = mock.Mock(return_value=0.125)
    trainer._train_epoch(0)
    assert (trainer.optimizer.step.call_count, trainer.optimizer.zero_grad.call_count) == (3, 3)
    assert trainer.optimizer.param_groups[0]["lr"] == 0.125
    assert [call.args for call in trainer.lr_scheduler.call_args_list] == [(0,), (1,), (2,)]


def test_the_masking_function_is_called_by_keyword(tmp_path):
    trainer = tiny(tmp_path, compiled=False)
    trainer.masking_fn = mock.Mock(side_effect=masks)
    trainer._train_step(trainer.train_loader[0], 0, 0)
    trainer.masking_fn.assert_called_once_with(batch_size=4, device="cpu")


def test_managers_set_later_get_the_runs_calls(tmp_path):
    trainer = tiny(tmp_path, compiled=False)
    parts = {name: mock.MagicMock() for name in ("checkpoint_manager", "metrics_logger", "progress_tracker")}
    for name, part in parts.items():
        setattr(trainer, name, part)
    trainer.train()
    assert parts["checkpoint_manager"].save_checkpoint.call_count == 2
    assert parts["progress_tracker"].start_epoch.call_args_list == [mock.call(), mock.call()]
    logger = parts["metrics_logger"]
    assert logger.accumulate_metrics.call_count == 6
    assert logger.log_accumulated_metrics.call_args_list == [mock.call(3, "train_epoch/"), mock.call(6, "train_epoch/")]
    assert {call.args[2] for call in logger.log_metrics.call_args_list} == {"train/", "val/"}
    logger.finish.assert_called_once()


def test_patched_epochs_are_those_that_run(tmp_path):
    trainer = tiny(tmp_path, compiled=False)
    with (
        mock.patch.object(trainer, "_train_epoch", return_value={"loss": 1.0}) as trained,
        mock.patch.object(trainer, "_validate_epoch", return_value={"loss": 0.5}) as validated,
        mock.patch.object(trainer, "_save_checkpoint") as saved,
    ):
        trainer.train()
    assert (trained.call_count, validated.call_count, saved.call_count) == (2, 2, 2)
    assert saved.call_args_list[0] == mock.call(0, 0.5, True)


def test_without_validation_no_epoch_is_the_best(tmp_path):
    trainer = tiny(tmp_path, compiled=False)
    trainer.val_loader = None
    trainer.train()
    folder = tmp_path / "checkpoints"
    assert (trainer.best_val_loss, (folder / "checkpoint_best.pth").exists()) == (float("inf"), False)
    saved = torch.load(folder / "checkpoint_latest.pth", weights_only=True)
    assert saved["metrics"] == {"epoch": 1.0}


def test_amp_without_cuda_is_warned_about(tmp_path, caplog):
    trainer = tiny(tmp_path, compiled=False, use_amp=True)
    assert (trainer.use_amp, trainer.scaler) == (False, None)
    (record,) = caplog.records
    assert (record.levelno, "mixed precision" in record.getMessage()) == (logging.WARNING, True)


def test_lines_go_to_the_modules_logger_where_logging_listens(tmp_path, caplog, capsys):
    trainer = tiny(tmp_path, compiled=False, epochs=1)
    with caplog.at_level(logging.INFO):
        trainer.train()
    assert any(record.getMessage().startswith("epoch 1/1, train loss") for record in caplog.records)
    assert "train loss" not in capsys.readouterr().out
    with mock.patch("jaxtrain.systems.hjepa.original.trainer.logger") as logger:
        tiny(tmp_path, compiled=False, epochs=1).train()
    assert logger.info.called


def test_online_neighbours_vote_on_the_validation_rows(tmp_path):
    trainer = tiny(tmp_path, compiled=False, epochs=4, online_eval={"enabled": True, "frequency": 2, "k": 3})
    labels = torch.arange(12) % 3
    images = torch.eye(3)[labels][..., None, None].expand(-1, -1, 8, 8) + 0.01 * torch.randn(12, 3, 8, 8)
    data = torch.utils.data.TensorDataset(images, labels)
    trainer.model.extract_features = lambda images, level: images.mean((2, 3))[:, None].expand(-1, 4, -1)  # its colour
    trainer.train_loader = trainer.val_loader = torch.utils.data.DataLoader(data, 4)
    history = trainer.train()
    assert [entry.get("knn_accuracy") for entry in history["val_history"]] == [None, 1.0, None, 1.0]
    trainer.val_loader = [images]
    with pytest.raises(ValueError, match="images without labels"):
        trainer._online_evaluation(1)
    del trainer.model.extract_features
    with pytest.raises(ValueError, match="TinyModel has no extract_features"):
        trainer.train()


@pytest.mark.parametrize("validated", [True, False])
def test_early_stopping_ends_a_run_and_keeps_its_count(validated, tmp_path):
    stopping = {"enabled": True, "patience": 1, "min_delta": 1e9}
    trainer = tiny(tmp_path, compiled=False, epochs=9, early_stopping=stopping)
    trainer.val_loader = trainer.val_loader if validated else None
    trainer.train()
    assert (trainer.current_epoch, trainer.global_step) == (1, 6)
    assert (trainer.early_stopping.counter, trainer.early_stopping.should_stop) == (1, True)


def test_a_resumed_run_knows_the_best_epoch_of_the_first(tmp_path):
    first = tiny(tmp_path, compiled=False)
    first.train()
    again = tiny(tmp_path, compiled=False, epochs=3)
    again._load_checkpoint(first.checkpoint_manager.checkpoint_dir / "checkpoint_latest.pth")
    assert again.best_val_loss == again.checkpoint_manager.best_metric == first.best_val_loss
    again.train()
    assert again.global_step == 9
    assert again.best_val_loss <= first.best_val_loss


def test_a_resumed_trainer_of_plain_parts_knows_its_epoch(tmp_path):
    first = tiny(tmp_path, compiled=False)
    path = first._save_checkpoint(0, 0.5, is_best=True)
    model = TinyModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    parts = (model, first.train_loader, first.val_loader, optimizer, TinyLoss(), masks, config_of(tmp_path), "cpu")
    again = hjepa.HJEPATrainer(*parts, resume_checkpoint=str(path))
    assert again.current_epoch == 1
    assert torch.equal(model.predictor.weight, first.model.predictor.weight)


@pytest.mark.parametrize("batch", [lambda x: x, lambda x: [x, 0], lambda x: (x,), lambda x: {"images": x}])
def test_images_are_found_in_every_form_of_batch(batch, tmp_path):
    trainer = tiny(tmp_path, compiled=False)
    assert trainer._images(batch(trainer.train_loader[0])).shape == (4, 3, 8, 8)


@pytest.mark.parametrize("name", ["_train_epoch", "_validate_epoch"])
def test_a_step_patched_on_the_class_is_the_one_that_runs(name, tmp_path):
    with mock.patch.object(hjepa.HJEPATrainer, name, autospec=True, return_value={"loss": 0.5}) as patched:
        tiny(tmp_path, compiled=False).train()
    assert patched.call_count == 2


def test_a_forward_patched_on_the_class_is_called_for_every_batch(tmp_path):
    trainer = real(tmp_path, loss_fn=hjepa.HJEPALoss("mse", num_hierarchies=2))
    own = type(trainer.loss_fn).forward
    with mock.patch.object(type(trainer.loss_fn), "forward", autospec=True, side_effect=own) as patched:
        trainer.train()
    assert patched.call_count == 2 * (len(trainer.train_loader) + len(trainer.val_loader))


def test_a_config_of_any_kind_is_kept_in_a_file_that_torch_loads(tmp_path):
    own = {"list": [1, 2.5], "path": tmp_path, "none": None, "function": masks, "mock": mock.Mock(name="stand-in")}
    config = {**config_of(tmp_path), "training": OmegaConf.create(config_of(tmp_path)["training"]), "own": own}
    trainer = tiny(tmp_path, compiled=False)
    trainer.config = config
    found = torch.load(trainer._save_checkpoint(0, 0.5), weights_only=True)["config"]
    assert found["training"] == config_of(tmp_path)["training"]
    assert found["own"]["list"] == [1, 2.5]
    assert found["own"]["path"] == str(tmp_path)
    assert "masks" in found["own"]["function"]
    assert "stand-in" in found["own"]["mock"]


def epoch_files(trainer):
    return sorted(path.name for path in trainer.checkpoint_manager.checkpoint_dir.glob("checkpoint_epoch_*"))


@pytest.mark.parametrize("name", ["model", "loss_fn"])
def test_a_forward_that_is_spied_on_is_called_once_per_batch(name, tmp_path):
    trainer = real(tmp_path, batches=3)
    spied = getattr(trainer, name)
    with mock.patch.object(spied, "forward", wraps=spied.forward) as forward:
        trainer._train_epoch(0)
    assert forward.call_count == 3


@pytest.mark.parametrize("kind", [real, tiny])
def test_a_run_of_no_epochs_does_nothing(kind, tmp_path):
    options = {"training": {"epochs": 0}} if kind is real else {"epochs": 0}
    trainer = kind(tmp_path, **options)
    before = [parameter.clone() for parameter in trainer.model.parameters()]
    assert trainer.train()["train_history"] == []
    assert trainer.global_step == 0
    assert all(map(torch.equal, before, trainer.model.parameters()))


def test_a_checkpoint_has_the_rate_and_momentum_of_its_step(tmp_path):
    trainer = tiny(tmp_path, compiled=False, epochs=4)
    trainer._train_epoch(0)
    saved = torch.load(trainer._save_checkpoint(0, 0.5), weights_only=True)["scheduler_state_dict"]
    assert saved == {"lr": trainer.lr_scheduler(3), "ema_momentum": trainer.ema_scheduler(3)}


def test_the_last_epoch_is_saved_where_its_turn_comes(tmp_path):
    trainer = tiny(tmp_path, compiled=False, epochs=3)
    trainer.val_loader, trainer.checkpoint_manager.save_frequency = None, 2
    trainer.train()
    assert epoch_files(trainer) == ["checkpoint_epoch_0001.pth"]


def test_a_second_trainer_in_a_folder_begins_with_its_own_model(tmp_path):
    first = tiny(tmp_path, compiled=False)
    first.train()
    second = tiny(tmp_path, compiled=False)
    with torch.no_grad():
        second.model.predictor.weight.add_(1.0)
    second.train()
    assert second.global_step == 6
    torch.testing.assert_close(second.model.predictor.weight, first.model.predictor.weight + 1, atol=0.3, rtol=0)


@pytest.mark.parametrize("name", ["step", "zero_grad"])
def test_an_optimizer_that_is_spied_on_is_called_once_per_batch(name, tmp_path):
    trainer = tiny(tmp_path, compiled=False)
    with mock.patch.object(trainer.optimizer, name, wraps=getattr(trainer.optimizer, name)) as called:
        trainer.train()
    assert called.call_count == 6
