"""HJEPATrainer on the engine as the original's users know it: what is counted, logged, written and begun anew."""

from unittest import mock

import pytest
import torch

from jaxtrain.systems import hjepa
from jaxtrain.systems.hjepa.original.native_run import obstacles, settings
from tests.unit.hjepa.test_facade_trainer import real, tiny


def real_of_two_levels(tmp_path, **options):
    """`real` with a loss that the host loop takes too."""
    config = {"loss": {"type": "mse"}, "model": {"num_hierarchies": 2}}
    return real(tmp_path, loss_fn=hjepa.create_loss_from_config(config), **options)


def epoch_files(trainer):
    return sorted(path.name for path in trainer.checkpoint_manager.checkpoint_dir.glob("checkpoint_epoch_*"))


@pytest.mark.parametrize("name", ["model", "loss_fn"])
def test_a_forward_that_is_spied_on_is_called_once_per_batch(name, tmp_path):
    trainer = real_of_two_levels(tmp_path, batches=3)
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


def test_the_loaders_data_and_not_the_configs_is_what_the_engine_reads(tmp_path):
    trainer = real(tmp_path)
    trainer.config["data"] = {"dataset": "synthetic", "use_multi_dataset": True, "datasets": [{"name": "mine"}]}
    assert list(obstacles(trainer)) == []
    assert settings(trainer).data.datasets == []


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


@pytest.mark.slow
def test_the_engine_saves_as_often_and_tells_the_same_parts(tmp_path):
    trainer = real(tmp_path, training={"epochs": 3}, val=None)
    trainer.checkpoint_manager.save_frequency = 2
    assert list(obstacles(trainer)) == []
    progress, logger = trainer.progress_tracker, trainer.metrics_logger
    with (
        mock.patch.object(progress, "start_epoch", wraps=progress.start_epoch) as started,
        mock.patch.object(progress, "end_epoch", wraps=progress.end_epoch) as ended,
        mock.patch.object(logger, "accumulate_metrics", wraps=logger.accumulate_metrics) as accumulated,
        mock.patch.object(logger, "log_accumulated_metrics", wraps=logger.log_accumulated_metrics) as logged,
    ):
        trainer.train()
    assert epoch_files(trainer) == ["checkpoint_epoch_0001.pth"]
    assert started.call_count == 3
    assert (ended.call_count, accumulated.call_count) == (3, 6)
    assert [call.args for call in logged.call_args_list] == [(step, "train_epoch/") for step in (2, 4, 6)]


@pytest.mark.slow
def test_a_second_trainer_in_a_folder_begins_with_its_own_model(tmp_path):
    first = real(tmp_path)
    first.train()
    second = real(tmp_path)
    with torch.no_grad():
        second.model.predictor.head.weight.add_(1.0)
    second.train()
    assert second.global_step == 4
    torch.testing.assert_close(
        second.model.predictor.head.weight, first.model.predictor.head.weight + 1, atol=0.3, rtol=0
    )
    again = real(tmp_path, training={"epochs": 3}, resume_checkpoint=tmp_path / "checkpoints/checkpoint_latest.pth")
    assert (again.global_step, again.engine_folder) == (4, "run_2")
    again.train()
    assert again.global_step == 6
    torch.testing.assert_close(again.model.predictor.head.weight, second.model.predictor.head.weight, atol=0.3, rtol=0)


@pytest.mark.parametrize("name", ["step", pytest.param("zero_grad", marks=pytest.mark.slow)])
def test_an_optimizer_that_is_spied_on_is_called_by_the_host_loop(name, tmp_path):
    trainer = real_of_two_levels(tmp_path)
    with mock.patch.object(trainer.optimizer, name, wraps=getattr(trainer.optimizer, name)) as called:
        assert list(obstacles(trainer)) == ["the optimizer is AdamW in a form of your own"]
        trainer.train()
    assert called.call_count == 4
    assert list(obstacles(trainer)) == ["steps were made before train()"]
