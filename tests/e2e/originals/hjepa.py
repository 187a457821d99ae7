"""A configs/default.yaml of a small model on scikit-learn's digits, and what the README's snippets take for granted."""

import pathlib

import torch

from jaxtrain.systems import hjepa

DEFAULT = """
model:
  encoder_type: vit_tiny_patch16_224
  vit: {patch_size: 2, embed_dim: 16, depth: 1, num_heads: 2, in_chans: 1}
  num_hierarchies: 2
  predictor: {depth: 1, num_heads: 2, mlp_ratio: 2.0}
  ema: {momentum: 0.99, momentum_end: 1.0}
data: {dataset: digits, image_size: 8, batch_size: 256, num_workers: 0, augmentation: {color_jitter: 0.0}}
training: {epochs: 1, warmup_epochs: 0, lr: 1.0e-3, weight_decay: 0.05, optimizer: adamw, use_amp: false}
masking: {num_masks: 2, mask_scale: [0.1, 0.3]}
loss: {type: smoothl1}
checkpoint: {checkpoint_dir: results/checkpoints}
logging: {tensorboard: {enabled: false}}
"""


def steps(namespace):
    namespace["total_steps"] = 3


def schedules(namespace):
    assert 0 < namespace["lr"] < 1.5e-4
    assert 0.996 <= namespace["ema_momentum"] < 1


def an_epoch(namespace):
    model = torch.nn.Linear(2, 2)
    namespace.update(model=model, optimizer=torch.optim.AdamW(model.parameters()), scheduler_state={"lr": 1e-4})
    namespace.update(scaler=torch.amp.GradScaler("cuda"), epoch=9, val_loss=0.5, is_best=True)


def restored(namespace):
    assert (namespace["metadata"]["epoch"], namespace["metadata"]["metrics"]["val_loss"]) == (9, 0.5)


def tensors(namespace):
    namespace.update(config={"a": 1}, image_tensor=torch.rand(3, 8, 8), grad_tensor=torch.randn(10))


def curves(namespace):
    namespace["logger"].finish()
    assert list(pathlib.Path("results/logs/tensorboard").iterdir())


def default_config(namespace):
    pathlib.Path("results").rename("snippets")
    pathlib.Path("configs").mkdir()
    pathlib.Path("configs/default.yaml").write_text(DEFAULT)


def trained(namespace):
    latest = pathlib.Path("results/checkpoints/checkpoint_latest.pth")
    state = torch.load(latest, weights_only=True)["model_state_dict"]
    assert torch.equal(state["predictor.head.weight"], namespace["model"].state_dict()["predictor.head.weight"])


def own_loss(namespace):
    trainer = namespace["trainer"]
    arguments = (namespace["model"], namespace["train_loader"])
    mean_square = lambda pairs: sum((a - b).square().mean() for a, b in pairs)
    namespace["compute_loss"] = lambda predictions, targets: mean_square(zip(predictions, targets, strict=True))
    assert namespace["CustomHJEPALoss"]()([torch.ones(2)], [torch.zeros(2)])[1] == {"loss": 1.0}
    own = hjepa.HJEPATrainer(*arguments, loss_fn=namespace["CustomHJEPALoss"](), config=trainer.config)
    assert own.train()["train_history"][0]["loss"] > 0


def own_step(namespace):
    own = namespace["CustomTrainer"](namespace["model"], namespace["train_loader"], config=namespace["config"])
    assert own.train()["train_history"][0]["loss"] > 0


BEFORE = {1: steps, 2: an_epoch, 3: tensors, 4: default_config}
AFTER = {1: schedules, 2: restored, 3: curves, 4: trained, 5: trained, 6: own_loss, 7: own_step}
