"""Scripts written for the original run after changing their imports."""

import os
import pickle

import numpy as np
import pytest
import torch

from jaxtrain.errors import UserError
from jaxtrain.runtime import launch
from jaxtrain.systems import fmri_autoencoder
from jaxtrain.systems.fmri_autoencoder.original.datasets import KINDS
from jaxtrain.systems.fmri_autoencoder.torch_gen1 import SherlockAutoencoder
from jaxtrain.systems.fmri_autoencoder.torch_head import MultimodalAutoencoder
from tests.unit.fmri_autoencoder import tiny

pytestmark = pytest.mark.slow

SIZES = {"video_height": 90, "video_width": 160, "audio_mels": 8, "text_dim": 6, "n_voxels": 7, "bottleneck_dim": 12}
NARROW = {"widths": {16384: 16, 4096: 12, 512: 8}, "channel_widths": {32: 2, 64: 2, 128: 3, 256: 3}}
GEN1 = {**SIZES, **NARROW, "video_features": 6, "audio_features": 5, "text_features": 4, "decoder_hidden_dim": 8}


def write_cache(folder, subjects=(1, 3), volumes=20, suffix="_hrf_per_subject", **widths):
    """The original's own cache file, under its name."""
    rng = np.random.default_rng(0)
    widths = {"video": 90 * 160 * 3, "audio": 8, "text": 6, "fmri": 7} | widths
    found = {f"{kind}_features": rng.random((len(subjects), volumes, widths[kind]), np.float32) for kind in KINDS}
    ids = {"subject_ids": list(subjects), "n_subjects": len(subjects), "n_trs": volumes, "feature_dims": widths}
    sizes = {"n_samples": len(subjects) * volumes, "tr": 1.5, "apply_hrf": True, "mode": "per_subject"}
    folder.mkdir()
    name = f"sherlock_s{'_'.join(map(str, subjects))}{suffix}.pkl"
    (folder / name).write_bytes(pickle.dumps({**found, "metadata": {**ids, **sizes}}))
    return found


def settings(folder, **more):
    config = {"checkpoint_dir": str(folder), "log_dir": str(folder / "logs"), "num_workers": 0}
    config |= {"learning_rate": 1e-3, "batch_size": 8, "warmup_epochs": 0}
    overrides = {"tracking": {"tensorboard": False}, "shard": {"devices": 1}}
    return fmri_autoencoder.TrainingConfig(**config, **{"num_epochs": 2, "save_every": 1, **more}, overrides=overrides)


def test_the_readmes_script_trains(tmp_path):
    from jaxtrain.systems.fmri_autoencoder import SherlockDataset, Trainer, create_autoencoder

    write_cache(tmp_path / "cache")
    model = create_autoencoder(**GEN1)
    train_dataset = SherlockDataset(tmp_path, subjects=[1, 3], split="train")
    val_dataset = SherlockDataset(tmp_path, subjects=[1, 3], split="val")
    assert (len(train_dataset), len(val_dataset)) == (32, 8)
    history = Trainer(model, train_dataset, val_dataset, settings(tmp_path / "checkpoints")).train()
    assert history["best_val_loss"] == min(epoch["total_loss"] for epoch in history["val_history"])
    assert {"total_loss", "video_loss", "audio_loss", "text_loss", "fmri_loss", "lr"} <= set(
        history["train_history"][0]
    )
    assert {"fmri_correlation", "fmri_r2"} <= set(history["val_history"][0])
    saved = torch.load(tmp_path / "checkpoints" / "final_checkpoint.pt", weights_only=True)
    assert (saved["epoch"], saved["global_step"], saved["config"]["learning_rate"]) == (2, 8, 1e-3)
    twin = SherlockAutoencoder.of(model.options)
    twin.load_state_dict(saved["model_state_dict"], strict=True)
    torch.optim.AdamW(twin.parameters()).load_state_dict(saved["optimizer_state_dict"])
    np.testing.assert_array_equal(
        saved["model_state_dict"]["decoder.layer11_text.bias"], model.state_dict()["decoder.layer11_text.bias"]
    )
    assert (tmp_path / "checkpoints" / "best_checkpoint.pt").exists()

    more = settings(tmp_path / "more", resume_from=str(tmp_path / "checkpoints" / "final_checkpoint.pt"))
    resumed = create_autoencoder(**GEN1)
    Trainer(resumed, train_dataset, val_dataset, more).train()  # no epoch is left: only the weights are taken
    for name, value in model.state_dict().items():
        torch.testing.assert_close(resumed.state_dict()[name], value, rtol=0, atol=0)


def test_items_and_methods_of_the_datasets_are_the_originals(tmp_path):
    found = write_cache(tmp_path / "cache", suffix="_hrf_per_subject_encodec_12khz_3.0kbps_skip2", video=72, audio=24)
    everything = fmri_autoencoder.MultimodalDataset(tmp_path, subjects=[1, 3])
    val = fmri_autoencoder.MultimodalDataset(
        tmp_path, subjects=[1, 3], split="val", shared_data=everything.get_data_dict()
    )
    assert (val.subjects, val.cache_dir, val.frame_skip, val.use_encodec) == ([1, 3], tmp_path / "cache", 2, True)
    item = val[5]
    assert isinstance(val, torch.utils.data.Dataset)
    assert (item["video"].dtype, item["fmri"].shape, val.n_trs) == (torch.float32, (7,), 4)
    assert next(iter(torch.utils.data.DataLoader(val, batch_size=3)))["text"].shape == (3, 6)
    assert (item["subject_id"], item["tr_index"]) == (3, 1)
    np.testing.assert_array_equal(item["video"], found["video_features"][1, 17])
    np.testing.assert_array_equal(val.get_subject_data(3)["fmri"], found["fmri_features"][1, 16:])
    assert everything.get_feature_stats()["fmri"]["mean"] == pytest.approx(found["fmri_features"].mean(), rel=1e-6)
    with pytest.raises(UserError, match="subject 2 is not among"):
        val.get_subject_data(2)


def test_a_cache_that_runs_code_is_refused(tmp_path):
    class Bomb:
        def __reduce__(self):
            return eval, ("1 + 1",)

    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "sherlock_s1_hrf_per_subject.pkl").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(UserError, match=r"builtins\.eval"):
        fmri_autoencoder.SherlockDataset(tmp_path, subjects=1)


@pytest.mark.parametrize(("kind", "generation"), [(SherlockAutoencoder, "gen1"), (MultimodalAutoencoder, "head")])
def test_a_checkpoint_goes_out_and_in_with_its_architecture(kind, generation, tmp_path):
    options = tiny.config(generation).model
    model = kind.of(options)
    model.save_checkpoint(tmp_path / "m.pt", epoch=3, loss=0.5, metadata={"note": "a"})
    saved = torch.load(tmp_path / "m.pt", weights_only=True)
    assert saved["architecture"]["n_voxels"] == options.n_voxels
    assert len(saved["architecture"]) == {"gen1": 8, "head": 11}[generation]
    unsaved = options.model_dump(exclude=set(saved["architecture"]))
    again, found = kind.load_checkpoint(tmp_path / "m.pt", **unsaved)
    assert (found["epoch"], found["loss"], again.training) == (3, 0.5, False)
    state = again.state_dict()
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())


def test_a_file_without_weights_is_refused(tmp_path):
    torch.save({"epoch": 1}, tmp_path / "m.pt")
    with pytest.raises(UserError, match="has no model_state_dict; it holds epoch"):
        SherlockAutoencoder.load_checkpoint(tmp_path / "m.pt")


@pytest.fixture
def no_launcher(monkeypatch):
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")  # so that it is restored, whatever the test sets
        monkeypatch.delenv(name)


def test_setting_up_a_single_process_names_the_originals_address(no_launcher):
    fmri_autoencoder.setup_distributed(rank=0, world_size=1, backend="nccl")
    fmri_autoencoder.cleanup_distributed()
    assert (os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]) == ("localhost", "12355")


def test_processes_without_a_launcher_join_by_rank_and_number(no_launcher, monkeypatch):
    joined = []
    monkeypatch.setattr(launch, "setup_distributed", joined.append)
    fmri_autoencoder.setup_distributed(1, 2)
    (found,) = joined
    assert (found.process, found.processes, found.local, found.locals) == (1, 2, 1, 2)
    assert found.coordinator == "localhost:12356"


def test_an_unknown_scheduler_is_named(tmp_path):
    with pytest.raises(UserError, match="scheduler_type is 'linear', wanted one of cosine, step, none"):
        settings(tmp_path, scheduler_type="linear").settings({}, False)
