"""The original's checkpoints, logger, progress and schedules in a user's hands."""

import json
import pathlib
import sys
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn

from jaxtrain.systems import hjepa

GOLDEN = pathlib.Path(__file__).parents[2] / "golden" / "hjepa"


# ---- checkpoints


def trained():
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(model(torch.ones(1, 3)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    scheduler.step()
    return model, optimizer, scheduler, scaler


def test_the_complete_training_state_comes_back(tmp_path):
    model, optimizer, scheduler, scaler = trained()
    manager = hjepa.CheckpointManager(tmp_path)
    manager.update_best_metric(0.5)
    path = manager.save_checkpoint(
        3, model, optimizer, scheduler, scaler, {"val_loss": 0.5}, is_best=True, extra_state={"global_step": 7}
    )
    assert path.name == "checkpoint_epoch_0003.pth"
    fresh, optimizer2, scheduler2, scaler2 = trained()
    found = hjepa.CheckpointManager(tmp_path).load_checkpoint(
        path, fresh, optimizer2, scheduler=scheduler2, scaler=scaler2, device="cuda"
    )
    assert (found["epoch"], found["metrics"], found["best_metric"], found["global_step"]) == (
        3,
        {"val_loss": 0.5},
        0.5,
        7,
    )
    assert torch.equal(fresh.weight, model.weight)
    assert optimizer2.param_groups[0]["lr"] == 0.05
    assert torch.equal(optimizer2.state[fresh.weight]["exp_avg"], optimizer.state[model.weight]["exp_avg"])
    assert scheduler2.state_dict() == scheduler.state_dict()
    assert scaler2.get_scale() == scaler.get_scale()


def test_a_wrapped_model_is_saved_without_its_wrapper_and_loaded_into_one(tmp_path):
    model = nn.DataParallel(nn.Linear(3, 2))
    path = hjepa.CheckpointManager(tmp_path).save_checkpoint(0, model)
    assert list(torch.load(path, weights_only=True)["model_state_dict"]) == ["weight", "bias"]
    other = nn.DataParallel(nn.Linear(3, 2))
    hjepa.CheckpointManager(tmp_path).load_checkpoint(path, other)
    assert torch.equal(other.module.weight, model.module.weight)


def test_better_is_strict_in_both_modes(tmp_path):
    low = hjepa.CheckpointManager(tmp_path, mode="min")
    assert [low.update_best_metric(x) for x in (1.0, 1.0, 0.5)] == [True, False, True]
    high = hjepa.CheckpointManager(tmp_path, mode="max")
    assert (high.best_metric, high.is_better_metric(0.0)) == (float("-inf"), True)
    with pytest.raises(ValueError, match="mode='median'"):
        hjepa.CheckpointManager(tmp_path, mode="median")
    with pytest.raises(FileNotFoundError):
        low.load_checkpoint(tmp_path / "none.pth", nn.Linear(1, 1))


def test_metrics_may_hold_text_and_a_schedule_without_state_leaves_none(tmp_path):
    schedule = hjepa.CosineScheduler(1e-3, 1e-6, 10, 5)
    metrics = {"val_loss": torch.tensor(0.5), "note": "first"}
    path = hjepa.CheckpointManager(tmp_path).save_checkpoint(0, nn.Linear(1, 1), scheduler=schedule, metrics=metrics)
    saved = torch.load(path, weights_only=True)
    assert (saved["metrics"], saved["scheduler_state_dict"]) == ({"val_loss": 0.5, "note": "first"}, None)


@pytest.mark.parametrize("kind", [mock.Mock, mock.MagicMock])
def test_a_mock_of_a_schedule_leaves_none(kind, tmp_path):
    module = torch.nn.Linear(2, 2)
    path = hjepa.CheckpointManager(tmp_path).save_checkpoint(0, module, scheduler=kind())
    assert torch.load(path, weights_only=True)["scheduler_state_dict"] is None


def test_a_file_without_a_best_metric_leaves_the_managers(tmp_path):
    content = {"epoch": 3, "model_state_dict": torch.nn.Linear(2, 2).state_dict(), "best_metric": None}
    torch.save(content, tmp_path / "x.pth")
    manager = hjepa.CheckpointManager(tmp_path, mode="max")
    assert manager.load_checkpoint(tmp_path / "x.pth", torch.nn.Linear(2, 2))["epoch"] == 3
    assert manager.best_metric == float("-inf")


def test_a_part_called_module_is_saved_with_the_rest(tmp_path):
    model = nn.ModuleDict({"module": nn.Linear(3, 2), "head": nn.Linear(2, 1)})
    path = hjepa.CheckpointManager(tmp_path).save_checkpoint(0, model)
    assert "head.weight" in torch.load(path, weights_only=True)["model_state_dict"]
    hjepa.CheckpointManager(tmp_path).load_checkpoint(path, model)


def test_a_compiled_models_file_loads_with_and_without_compiling(tmp_path):
    model = torch.compile(nn.Linear(3, 2))
    path = hjepa.CheckpointManager(tmp_path).save_checkpoint(0, model)
    for other in (nn.Linear(3, 2), torch.compile(nn.Linear(3, 2))):
        hjepa.CheckpointManager(tmp_path).load_checkpoint(path, other)
        assert torch.equal(other.weight, model.weight)


def test_any_object_with_a_state_is_saved_and_filled(tmp_path):
    model = mock.Mock(spec=["state_dict", "load_state_dict"])
    model.state_dict.return_value = {"weight": torch.ones(2)}
    path = hjepa.CheckpointManager(tmp_path).save_checkpoint(0, model)
    hjepa.CheckpointManager(tmp_path).load_checkpoint(path, model)
    assert torch.equal(model.load_state_dict.call_args.args[0]["weight"], torch.ones(2))


def test_torch_loads_a_file_with_paths_and_numpys_numbers_without_trust(tmp_path):
    extra = {"best": [np.float64(0.5)], "picture": torch.ones(2)}
    metrics = {"val_loss": np.float32(0.25), "levels": {"h0": np.int64(3)}}
    path = hjepa.CheckpointManager(tmp_path).save_checkpoint(
        0, nn.Linear(1, 1), metrics=metrics, extra_state=extra, config={"data": {"path": tmp_path}}
    )
    saved = torch.load(path, weights_only=True)
    assert (saved["metrics"], saved["best"]) == ({"val_loss": 0.25, "levels": {"h0": 3}}, [0.5])
    assert saved["config"] == {"data": {"path": str(tmp_path)}}
    assert torch.equal(hjepa.load_checkpoint(path)["picture"], torch.ones(2))


def test_a_file_of_weights_alone_has_no_metrics(tmp_path):
    torch.save({"epoch": 2, "model_state_dict": nn.Linear(1, 1).state_dict()}, tmp_path / "w.pth")
    found = hjepa.CheckpointManager(tmp_path).load_checkpoint(tmp_path / "w.pth", nn.Linear(1, 1))
    assert found == {"epoch": 2, "metrics": {}, "best_metric": float("inf")}


def test_a_checkpoint_that_is_not_there_leaves_no_folder(tmp_path):
    with pytest.raises(FileNotFoundError):
        hjepa.load_checkpoint(filepath=tmp_path / "none" / "x.pth", model=nn.Linear(1, 1))
    assert not (tmp_path / "none").exists()


def test_a_config_that_is_not_there_is_a_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"none\.yaml: no such config file"):
        hjepa.load_config(tmp_path / "none.yaml")


# ---- logger


@pytest.fixture
def writer():
    with mock.patch("jaxtrain.systems.hjepa.original.metrics_logger.SummaryWriter") as made:
        yield made.return_value


def test_scalars_levels_and_buffers(writer, tmp_path):
    with hjepa.MetricsLogger("x", tmp_path / "logs", {"a": 1}, use_wandb=False) as logger:
        logger.log_metrics({"loss": torch.tensor(0.5)}, prefix="train/")
        logger.log_metrics({"loss": 0.25}, prefix="train/")
        logger.log_hierarchical_losses({"loss": 1.0, "loss_h0": 0.5, "loss_h1": torch.tensor(0.25)}, step=4)
        logger.accumulate_metrics({"acc": torch.tensor(1.0, requires_grad=True)})
        logger.accumulate_metrics({"acc": 3.0})
        assert logger.metrics_buffer["acc"] == [1.0, 3.0]
        assert logger.log_accumulated_metrics(step=5, prefix="epoch/") == {"acc": 2.0}
        assert not logger.metrics_buffer
    scalars = [call.args for call in writer.add_scalar.call_args_list]
    assert scalars == [
        ("train/loss", 0.5, 0),
        ("train/loss", 0.25, 1),
        ("train/hierarchy/level_0", 0.5, 4),
        ("train/hierarchy/level_1", 0.25, 4),
        ("epoch/acc", 2.0, 5),
    ]
    writer.close.assert_called_once()
    assert (logger.log_dir, logger.wandb_run, logger.use_tensorboard) == (tmp_path / "logs", None, True)


def test_gradients_weights_embeddings_and_comparisons(writer, tmp_path):
    logger = hjepa.MetricsLogger("x", tmp_path, use_wandb=False)
    model = nn.Linear(2, 2)
    logger.log_model_gradients(model, step=1)
    assert not writer.add_histogram.called
    model(torch.ones(1, 2)).sum().backward()
    logger.log_model_gradients(model, step=1)
    logger.log_model_weights(model, step=1)
    names = [call.args[0] for call in writer.add_histogram.call_args_list]
    assert names == ["gradients/weight", "gradients/bias", "weights/weight", "weights/bias"]
    logger.log_embeddings(torch.randn(3, 4), [0, 1, 2], "features", 2)
    assert writer.add_embedding.call_args.args[0].shape == (3, 4)
    x = torch.randn(3, 2, 4, dtype=torch.bfloat16)
    masks = torch.tensor([[1, 0], [1, 1]])
    logger.log_prediction_comparison(torch.rand(3, 3, 4, 4), [x, x], [x, -x], masks, 2, max_images=2)
    found = dict(call.args[:2] for call in writer.add_scalar.call_args_list)
    assert found["predictions/mask_ratio"] == 0.75
    assert writer.add_image.call_args.args[0] == "predictions/images"
    assert found["predictions/cosine_similarity_level_0"] == pytest.approx(1.0)
    assert found["predictions/cosine_similarity_level_1"] == pytest.approx(-1.0)
    logger.log_system_metrics(step=2)
    assert writer.add_scalar.call_args_list[-1].args[0].startswith("system/")
    logger.log_image("mask", np.zeros((5, 6), np.uint8))
    assert writer.add_image.call_args.args[1].shape == (1, 5, 6)


def test_numbers_are_found_in_whatever_holds_them(writer, tmp_path):
    logger = hjepa.MetricsLogger("x", tmp_path, use_wandb=False)
    one = [torch.ones(1, 1, requires_grad=True), np.ones(1), True, torch.tensor(1.0, dtype=torch.bfloat16)]
    other = ["text", None, {"a": 1}, torch.ones(2), [1.0, 2.0]]
    metrics = {f"m{i}": value for i, value in enumerate([*one, *other])}
    logger.log_metrics(metrics, step=0)
    assert [call.args[1] for call in writer.add_scalar.call_args_list] == [1.0] * 4
    logger.accumulate_metrics(metrics)
    assert logger.log_accumulated_metrics() == {f"m{i}": 1.0 for i in range(4)}


def test_a_grid_takes_images_with_channels_last(writer, tmp_path):
    logger = hjepa.MetricsLogger("x", tmp_path, use_wandb=False)
    logger.log_images("grid", [np.zeros((5, 6, 3))] * 3, nrow=2)
    assert writer.add_image.call_args.args[1].shape == (3, 10, 12)


def test_system_metrics_have_torchs_memory_too(writer, tmp_path):
    logger = hjepa.MetricsLogger("x", tmp_path, use_wandb=False)
    on = {"is_available": True, "device_count": 1, "memory_allocated": 2e9, "max_memory_allocated": 3e9}
    with mock.patch.multiple(torch.cuda, **{name: mock.Mock(return_value=value) for name, value in on.items()}):
        logger.log_system_metrics(step=1)
    found = dict(call.args[:2] for call in writer.add_scalar.call_args_list)
    assert found["system/gpu0_memory_allocated_gb"] >= 2


def test_without_an_api_key_wandb_is_left_out_in_one_line(tmp_path, caplog, monkeypatch):
    fake = mock.MagicMock()
    fake.init.side_effect = RuntimeError("No API key configured.")
    monkeypatch.setitem(sys.modules, "wandb", fake)
    logger = hjepa.MetricsLogger("x", tmp_path, use_tensorboard=False)
    logger.log_metrics({"loss": 1.0})
    logger.finish()
    assert (logger.use_wandb, logger.wandb_run, fake.log.called) == (False, None, False)
    (record,) = caplog.records
    assert record.getMessage() == "W&B gets no metrics, it does not start: No API key configured."


def test_wandb_gets_all_of_it(writer, tmp_path):
    fake = mock.MagicMock()
    with mock.patch.dict(sys.modules, {"wandb": fake}):
        logger = hjepa.MetricsLogger("x", tmp_path, {"a": 1}, use_tensorboard=False, wandb_tags=["t"])
        assert fake.init.call_args.kwargs["tags"] == ["t"]
        logger.log_metrics({"loss": 1.0, "note": "text"}, step=3, commit=False)
        fake.log.assert_called_with({"loss": 1.0, "note": "text"}, step=3, commit=False)
        logger.log_image("i", torch.rand(3, 4, 4), step=3, caption="one")
        assert fake.Image.call_args.kwargs == {"caption": "one"}
        logger.log_images("g", torch.rand(2, 3, 4, 4), captions=["a", "b"])
        logger.log_histogram("h", torch.rand(4))
        logger.log_embeddings(torch.rand(2, 3))
        logger.watch_model(nn.Linear(1, 1), 5)
        assert fake.watch.call_args.kwargs == {"log": "all", "log_freq": 5}
        logger.finish()
    fake.finish.assert_called_once()
    assert not writer.add_scalar.called


# ---- progress, early stopping, schedules


def test_progress_counts_and_names_the_time_left():
    tracker = hjepa.ProgressTracker(total_epochs=2, steps_per_epoch=4)
    assert (tracker.get_eta(0, 0), tracker.total_steps) == ("N/A", 8)
    tracker.start_epoch()
    tracker.step_times = []
    tracker._last -= 10
    tracker.step()
    assert tracker.get_eta(1, 1) == "0:00:30"
    assert tracker.get_eta(3, 0) == "0:00:00"
    tracker.start_time -= 3600
    assert tracker.get_elapsed_time() == "1:00:00"
    assert tracker.end_epoch() >= 0
    assert tracker.format_time(3723) == "1:02:03"


@pytest.mark.parametrize("case", json.loads((GOLDEN / "schedules.json").read_text())["early_stopping"])
def test_early_stopping_is_the_originals(case):
    stopping = hjepa.EarlyStopping(**case["kwargs"])
    assert [stopping(value) for value in case["metric"]] == case["stop"]
    assert (stopping.best_value, stopping.counter) == (case["best_after"], case["counter_after"])


def test_schedules_have_their_numbers_as_attributes():
    cosine = hjepa.CosineScheduler(1e-3, 1e-6, epochs=10, steps_per_epoch=5, warmup_epochs=2)
    assert not isinstance(hjepa.create_lr_scheduler(schedule_type="linear"), hjepa.CosineScheduler)
    assert (cosine.base_value, cosine.warmup_steps, cosine.total_steps) == (1e-3, 10, 50)
    ema = hjepa.EMAScheduler(0.99, 1.0, epochs=10, steps_per_epoch=5, warmup_epochs=2)
    assert (ema.warmup_steps, ema.total_steps, ema.get_epoch_value(10)) == (10, 50, 1.0)
    levels = hjepa.HierarchicalScheduler([cosine, ema])
    assert (levels.num_levels, levels(10)) == (2, [1e-3, 0.99])
