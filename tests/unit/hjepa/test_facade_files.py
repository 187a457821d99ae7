"""`checkpoint.torch: original`: the original's files from a run, loaded by torch and gone on from."""

import pathlib

import pytest
import torch
import yaml

from jaxtrain import config_io, run
from jaxtrain.nn.vit import overrides
from jaxtrain.systems import hjepa
from jaxtrain.systems.hjepa.original.checkpoint_files import parameter_names
from jaxtrain.systems.hjepa.original.legacy_config import ORIGINAL

TINY = pathlib.Path(__file__).parents[3] / "configs" / "hjepa_tiny.yaml"
OPTIONS = ["checkpoint.torch=original", "checkpoint.every_epochs=1", "checkpoint.keep_best=3", "shard.devices=1"]


@pytest.mark.slow
def test_a_run_writes_files_that_torch_goes_on_from_and_so_does_another_run(tmp_path, capsys):
    folder = tmp_path / "run"
    command = ["--config", str(TINY), *OPTIONS]
    assert run.main([*command, f"run.dir={folder}", "train.epochs=2"]) == 0
    names = {path.name for path in folder.glob("*.pth")}
    assert {"checkpoint_epoch_0001.pth", "checkpoint_latest.pth", "checkpoint_best.pth"} <= names
    latest = folder / "checkpoint_latest.pth"
    saved = torch.load(latest, weights_only=True)
    assert (saved["epoch"], set(saved["scheduler_state_dict"])) == (1, {"lr", "ema_momentum"})
    assert saved["metrics"]["val_loss"] > 0
    _, config = config_io.load(TINY, OPTIONS)
    encoder, predictor, size = config.model.encoder_type, config.model.predictor, config.data.image_size
    depth, heads, ratio = predictor.depth, predictor.num_heads, predictor.mlp_ratio
    levels, vit = config.model.num_hierarchies, overrides(config.model.vit)
    module = hjepa.HJEPA(encoder, size, config.model.embed_dim, depth, heads, ratio, num_hierarchies=levels, vit=vit)
    optimizer = torch.optim.AdamW(module.parameters())
    found = hjepa.load_checkpoint(latest, module, optimizer)
    assert found["global_step"] == saved["global_step"] > 0
    assert [name for name, _ in module.named_parameters()] == parameter_names(config)
    parameters = dict(module.named_parameters())
    assert optimizer.state[parameters["predictor.head.weight"]]["step"] == found["global_step"]
    assert parameters["target_encoder.vit.pos_embed"] not in optimizer.state
    own = [*command, f"run.dir={folder}", "train.epochs=3", "--resume", str(latest)]  # as the original's README has it
    assert run.main(own) == 0
    assert f"at step {found['global_step']} of" in (folder / "train.log").read_text()
    latest = folder / "checkpoint_epoch_0001.pth"
    again = [*command, f"run.dir={tmp_path / 'again'}", "train.epochs=3", f"init_from={latest}"]
    assert run.main(again) == 0
    step = found["global_step"]
    assert (
        f"went on from {latest} at step {step} of {step * 3 // 2}: weights, optimizer and schedule"
        in (tmp_path / "again" / "train.log").read_text()
    )


ORIGINALS_FILE = """
experiment: {name: x, seed: 1, output_dir: results}
device: cuda
model: {encoder_type: vit_tiny_patch16_224, embed_dim: 192, num_hierarchies: 3, patch_size: 16,
  predictor: {depth: 4, num_heads: 6, dropout: 0.0}, ema: {momentum: 0.99}}
data: {dataset: cifar10, data_path: ./data, image_size: 224, batch_size: 32, persistent_workers: true,
  augmentation: {color_jitter: 0.4, horizontal_flip: false, crop_scale: [0.5, 1.0]}}
training: {epochs: 20, lr: 5.0e-5, optimizer: adamw, early_stopping: {enabled: false, patience: 10},
  online_eval: {enabled: true, k: 20}, ema_momentum_schedule: {start: 0.996, end: 1.0, warmup_steps: 100}}
masking: {num_target_masks: 4, mask_scale: [0.15, 0.2], context_scale: [0.85, 1.0], num_context_masks: 1}
loss: {type: combined, hierarchy_weights: [1.0, 0.7, 0.5]}
checkpoint: {save_frequency: 5}
logging: {experiment_name: x, wandb: {enabled: false, tags: [a]}}
evaluation: {eval_frequency: 5, linear_probe: {epochs: 100}, knn: {k: 20}}
distributed: {enabled: false, backend: nccl}
compile: {enabled: true}
"""


def test_an_originals_file_is_known_by_all_its_keys_and_each_is_read_or_explained(tmp_path):
    path = tmp_path / "cpu_cifar10.yaml"
    path.write_text(ORIGINALS_FILE)
    translation = config_io.translated(path, [])
    assert translation.original == "hjepa"
    assert translation.unknown == []
    assert "evaluation.knn.k" in translation.replaced
    assert translation.replaced["model.ema.momentum"] == "training.ema_momentum_schedule decides"
    augmentation = config_io.load(path, [])[1].data.augmentation
    assert (augmentation.horizontal_flip, augmentation.crop_scale) == (0.0, (0.5, 1.0))


@pytest.mark.parametrize(
    ("given", "wanted"),
    [({"horizontal_flip": True}, {"horizontal_flip": 0.5}), ({"random_crop": False}, {"crop_scale": (1.0, 1.0)})],
)
def test_augmentation_that_the_original_does_not_read_counts(given, wanted):
    got = ORIGINAL.convert(yaml.safe_load(ORIGINALS_FILE) | {"data": {"augmentation": given}})
    assert got["data"]["augmentation"] == wanted
