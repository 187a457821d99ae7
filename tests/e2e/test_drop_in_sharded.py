"""FSDP by the libraries' own words: one process drives all devices, with the losses of the library on one."""

import logging

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from jaxtrain import UserError
from torch_bridge.torchvision_operators import declare_torchvision

declare_torchvision()
lightning = pytest.importorskip("lightning.pytorch")
transformers = pytest.importorskip("transformers")
from lightning.pytorch.strategies import FSDPStrategy  # noqa: E402
from torch.distributed.fsdp import CPUOffload  # noqa: E402

import jaxtrain.lightning  # noqa: E402
import jaxtrain.transformers  # noqa: E402

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
DATA = [
    {"x": torch.randn(6, generator=torch.Generator().manual_seed(index)), "labels": index % 8} for index in range(64)
]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(6, 64), nn.Linear(64, 8)

    def forward(self, x, labels=None):
        logits = self.last(torch.tanh(self.first(x)))
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net, self.seen = Net(), []

    def training_step(self, batch, batch_idx):
        return self.net(**batch)["loss"]

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.seen.append(float(outputs["loss"]))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-2)


def pieces(step) -> int:
    weight = step.weights.arrays[next(name for name in step.weights.arrays if name.endswith("first.weight"))]
    return weight.size // weight.addressable_shards[0].data.size


def by_lightning(engine, strategy):
    module, quiet = Module(), dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
    trainer = engine(max_epochs=2, accelerator="cpu", strategy=strategy, enable_model_summary=False, **quiet)
    trainer.fit(module, torch.utils.data.DataLoader(DATA, 8))
    return module.seen, trainer


def by_transformers(engine, folder, **options):
    arguments = transformers.TrainingArguments(
        str(folder), max_steps=12, per_device_train_batch_size=8, learning_rate=1e-2, report_to=[], logging_steps=1,
        use_cpu=True, save_steps=6, **options,
    )  # fmt: skip
    trainer = engine.Trainer(Net(), arguments, train_dataset=DATA)
    trainer.train()
    return [row["loss"] for row in trainer.state.log_history if "loss" in row], trainer


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "split"), [("fsdp", 8), (FSDPStrategy(), 8), ("deepspeed_stage_3", 8), ("deepspeed_stage_2", 1)]
)
def test_lightnings_strategies_split_over_eight_devices(strategy, split):
    want, _ = by_lightning(lightning.Trainer, "auto")
    got, trainer = by_lightning(jaxtrain.lightning.Trainer, strategy)
    assert got == pytest.approx(want, rel=1e-5)
    assert pieces(trainer.fit_loop.epoch_loop.automatic_optimization.step) == split


@pytest.mark.slow
@pytest.mark.parametrize(("fsdp", "split"), [(True, 8), ("full_shard", 8), ("shard_grad_op", 1)])
def test_transformers_fsdp_splits_over_eight_devices_and_resumes_without(fsdp, split, tmp_path, capsys):
    want, _ = by_transformers(transformers, tmp_path / "theirs")
    got, trainer = by_transformers(jaxtrain.transformers, tmp_path / "ours", fsdp=fsdp)
    assert got == pytest.approx(want, rel=1e-5)
    assert pieces(trainer._xla_step) == split
    assert "a step runs on 8 devices" in capsys.readouterr().out
    arguments = transformers.TrainingArguments(
        str(tmp_path / "more"), max_steps=12, per_device_train_batch_size=8, learning_rate=1e-2, report_to=[],
        logging_steps=1, use_cpu=True,
    )  # fmt: skip
    rest = transformers.Trainer(Net(), arguments, train_dataset=DATA)
    rest.train(resume_from_checkpoint=str(tmp_path / "ours" / "checkpoint-6"))
    assert [row["loss"] for row in rest.state.log_history if "loss" in row][6:] == pytest.approx(want[6:], rel=1e-5)


@pytest.mark.parametrize(
    ("strategy", "why"),
    [
        ("fsdp_cpu_offload", "'fsdp_cpu_offload' has no counterpart here; there are full_shard"),
        ("deepspeed_stage_3_offload", "'deepspeed_stage_3_offload' has no counterpart"),
        (FSDPStrategy(cpu_offload=CPUOffload(offload_params=True)), "cpu_offload has no counterpart"),
        (FSDPStrategy(state_dict_type="sharded"), "checkpoints are whole"),
    ],
)
def test_what_has_no_counterpart_in_lightnings_strategies_is_named(strategy, why):
    with pytest.raises(UserError, match=why):
        jaxtrain.lightning.Trainer(accelerator="cpu", strategy=strategy)


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"cpu_offload": True}, "'cpu_offload'.* stays on the devices"),
        ({"activation_checkpointing": True}, "set gradient_checkpointing=True instead"),
        ({"xla": True}, "torch_xla"),
    ],
)
def test_what_has_no_counterpart_in_transformers_fsdp_is_named(config, why, tmp_path):
    with pytest.raises(UserError, match=why):
        by_transformers(jaxtrain.transformers, tmp_path, fsdp=True, fsdp_config=config)
