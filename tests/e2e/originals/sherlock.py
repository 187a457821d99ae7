"""A cache file of the original instead of the film and the scans, a narrow model, runs of two epochs."""

import functools
import pathlib
import pickle

import numpy as np
import torch

from jaxtrain.systems.fmri_autoencoder.original import legacy_config, torch_compat
from jaxtrain.systems.fmri_autoencoder.original.datasets import KINDS, SherlockDataset

SIZES = {"video_height": 9, "video_width": 16, "audio_mels": 8, "text_dim": 6, "n_voxels": 7, "bottleneck_dim": 12}
NARROW = {"widths": {16384: 16, 4096: 12, 512: 8}, "channel_widths": {32: 2, 64: 2, 128: 3, 256: 3}}
FEATURES = {"video_features": 6, "audio_features": 5, "text_features": 4, "decoder_hidden_dim": 8}


def plant(namespace):
    rng, widths = np.random.default_rng(0), {"video": 9 * 16 * 3, "audio": 8, "text": 6, "fmri": 7}
    found = {f"{kind}_features": rng.random((2, 10, widths[kind]), np.float32) for kind in KINDS}
    metadata = {"subject_ids": [1, 2], "n_subjects": 2, "n_trs": 10, "n_samples": 20, "feature_dims": widths}
    metadata |= {"tr": 1.5, "apply_hrf": True, "mode": "per_subject"}
    folder = pathlib.Path("data/cache")
    folder.mkdir(parents=True)
    (folder / "sherlock_all_hrf_per_subject.pkl").write_bytes(pickle.dumps({**found, "metadata": metadata}))
    SherlockDataset._frame = lambda self, recording: (9, 16)  # the film's would be 90 x 160
    make = torch_compat.create_autoencoder
    torch_compat.create_autoencoder = functools.partial(make, **SIZES, **NARROW, **FEATURES)
    start = legacy_config.TrainingConfig.__init__

    def short(self, *arguments, **options):
        start(self, *arguments, **options)
        self.num_epochs = 2

    legacy_config.TrainingConfig.__init__ = short


def outputs(namespace):
    """The trained model's outputs and their targets."""
    assert namespace["history"]["best_val_loss"] > 0
    batch = namespace["val_dataset"].get_batch([0, 1, 2])
    found = namespace["model"].eval()(batch["video"], batch["audio"], batch["text"])
    namespace["outputs"], namespace["predicted_fmri"] = found, found["predicted_fmri"]
    for kind in ("video", "audio", "text"):
        namespace[f"{kind}_recon"], namespace[f"{kind}_target"] = found[f"{kind}_recon"], batch[kind]
    namespace["target_fmri"] = namespace["fmri_target"] = batch["fmri"]


def finite(namespace):
    assert torch.isfinite(namespace["loss"])
    namespace["loss"].backward(retain_graph=True)


def ranks(namespace):
    namespace.update(local_rank=0, world_size=1)


def checkpoint(namespace):
    """The file of a run that was stopped after its first epoch, in a folder of its own."""
    pathlib.Path("checkpoints").rename("earlier")
    pathlib.Path("checkpoints").mkdir()
    saved = torch.load("earlier/final_checkpoint.pt", weights_only=True)
    torch.save(saved | {"epoch": 1, "global_step": 1}, "checkpoints/checkpoint_epoch_50.pt")


def went_on(namespace):
    assert namespace["trainer"].global_step == 2
    log = pathlib.Path("logs/training.log").read_text()
    assert "went on from checkpoints/checkpoint_epoch_50.pt at step 1 of 2" in log


def losses(namespace):
    namespace.update(train_loss=1.0, val_loss=1.0)


BEFORE = {1: plant, 2: outputs, 6: ranks, 7: checkpoint, 8: losses}
AFTER = {2: finite, 3: finite, 4: finite, 7: went_on}
