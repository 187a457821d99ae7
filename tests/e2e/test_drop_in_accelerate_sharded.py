"""FSDP and DeepSpeed by accelerate's own words: one process drives all devices, with one device's losses."""

import os
import subprocess
import sys
import textwrap

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from jaxtrain import UserError

accelerate = pytest.importorskip("accelerate")
from accelerate import DeepSpeedPlugin, FullyShardedDataParallelPlugin  # noqa: E402

import jaxtrain.accelerate as ours  # noqa: E402

DRAW = torch.Generator().manual_seed(0)
X, Y = torch.randn(64, 6, generator=DRAW), torch.randint(0, 8, (64,), generator=DRAW)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(6, 32, bias=False), nn.BatchNorm1d(32), nn.Tanh())
        self.head = nn.Linear(32, 8)

    def forward(self, x, labels=None):
        logits = self.head(self.body(x))
        return {"logits": logits, "loss": None if labels is None else F.cross_entropy(logits, labels)}


class InPieces(Net):
    def forward(self, x, labels=None):
        self.highest = float(x.max().item()) if x.sum() > 0 else 0.0
        return super().forward(x, labels)


def fresh(kind, **options):
    accelerate.state.AcceleratorState._reset_state(True)
    accelerate.state.GradientState._reset_state()
    return kind(cpu=True, **options)


def trained(accelerator, folder=None, model=Net, kind=torch.optim.AdamW, edit=lambda model: None):
    """Run a loop with accumulation, clipping, a schedule, evaluation and saved state; return the losses, the model."""
    model = model()
    optimizer = kind(model.parameters(), 1e-2)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 20)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, Y), 8)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    if folder is not None and folder.exists():
        accelerator.load_state(str(folder))
    seen = []
    for _ in range(2):
        model.train()
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = model(x, labels=y)["loss"]
                accelerator.backward(loss)
                edit(model)
                if accelerator.sync_gradients:
                    seen.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            seen.append(loss.item())
        model.eval()
        with torch.no_grad():
            seen.append(float(model(X, labels=Y)["loss"]))
    if folder is not None:
        accelerator.save_state(str(folder))
    return seen, accelerator.unwrap_model(model)


def assert_same(model, other, atol=1e-5):
    for (key, want), got in zip(other.state_dict().items(), model.state_dict().values(), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=atol, msg=lambda text, key=key: f"{key}: {text}")


def pieces(array) -> int:
    return array.size // array.addressable_shards[0].data.size


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plugin", "split"),
    [
        ({"fsdp_plugin": FullyShardedDataParallelPlugin()}, (8, 8)),
        ({"fsdp_plugin": FullyShardedDataParallelPlugin(sharding_strategy="SHARD_GRAD_OP")}, (1, 8)),
        ({"fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=2)}, (8, 8)),
        ({"deepspeed_plugin": DeepSpeedPlugin(zero_stage=2)}, (1, 8)),
        ({"deepspeed_plugin": DeepSpeedPlugin(zero_stage=3)}, (8, 8)),
    ],
)
def test_eight_devices_train_as_accelerate_on_one(plugin, split):
    want, theirs = trained(fresh(accelerate.Accelerator, gradient_accumulation_steps=2))
    accelerator = fresh(ours.Accelerator, gradient_accumulation_steps=2, **plugin)
    got, mine = trained(accelerator)
    assert got == pytest.approx(want, rel=1e-5)
    (step,) = accelerator._sharded._steps.values()
    weight, moment = step.weights.arrays["head.weight"], step.opt_state["head.weight"]["exp_avg"]
    assert (pieces(weight), pieces(moment)) == split
    assert_same(mine, theirs)


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [0, 1])
def test_each_side_goes_on_from_the_others_state(sharded, tmp_path):
    options = [{}, {"fsdp_plugin": FullyShardedDataParallelPlugin()}]
    kinds = [accelerate.Accelerator, ours.Accelerator]
    trained(fresh(kinds[0]), tmp_path / "whole")
    want, theirs = trained(fresh(kinds[0]), tmp_path / "whole")
    trained(fresh(kinds[sharded], **options[sharded]), tmp_path / "half")
    got, mine = trained(fresh(kinds[1 - sharded], **options[1 - sharded]), tmp_path / "half")
    assert got == pytest.approx(want, rel=1e-5)
    assert_same(mine, theirs)


def halve(model):
    for parameter in model.parameters():
        parameter.grad *= 0.5


def flipped(model):
    for parameter in model.parameters():
        parameter.grad.data.view(-1)[0].neg_()


@pytest.mark.parametrize("edit", [halve, flipped])
def test_a_loop_that_edits_gradients_trains_with_the_edited_ones(edit):
    want, theirs = trained(fresh(accelerate.Accelerator), edit=edit)
    got, mine = trained(fresh(ours.Accelerator, fsdp_plugin=FullyShardedDataParallelPlugin()), edit=edit)
    assert got == pytest.approx(want, rel=1e-5)
    assert_same(mine, theirs)


@pytest.mark.parametrize("options", [{"model": InPieces}, {"kind": torch.optim.Adafactor}])
def test_what_is_not_compiled_over_all_devices_is_told_and_exact(options, caplog):
    want, theirs = trained(fresh(accelerate.Accelerator), **options)
    got, mine = trained(fresh(ours.Accelerator, fsdp_plugin=FullyShardedDataParallelPlugin()), **options)
    assert got == pytest.approx(want, rel=1e-5)
    assert_same(mine, theirs)
    assert "on one device" in caplog.text


def test_a_backward_pass_after_an_update_raises_as_torch_does():
    accelerator = fresh(ours.Accelerator, fsdp_plugin=FullyShardedDataParallelPlugin())
    model = Net()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    first, second = (model(X, labels=Y)["loss"] for _ in range(2))
    accelerator.backward(first)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        accelerator.backward(second)


FSDP, DEEPSPEED = FullyShardedDataParallelPlugin, DeepSpeedPlugin


@pytest.mark.parametrize(
    ("plugin", "why"),
    [
        (lambda: FSDP(cpu_offload=True), "cpu_offload has no counterpart here: the weights stay on the devices"),
        (lambda: FSDP(activation_checkpointing=True), "activation_checkpointing has.*gradient_checkpointing_enable"),
        (lambda: FSDP(ignored_modules="head"), "ignored_modules has no counterpart"),
        (lambda: FSDP(mixed_precision_policy="bf16"), "mixed_precision='bf16'"),
        (lambda: FSDP(state_dict_type="SHARDED_STATE_DICT"), "SHARDED_STATE_DICT has no.*take FULL_STATE_DICT"),
        (lambda: FSDP(sharding_strategy="HYBRID_SHARD_ZERO2"), "'_HYBRID_SHARD_ZERO2' has no counterpart here; there"),
        (lambda: DEEPSPEED(zero_stage=3, offload_param_device="cpu"), "zero_optimization.offload_param has no"),
        (lambda: DEEPSPEED(zero_stage=2, offload_optimizer_device="cpu"), "zero_optimization.offload_optimizer has no"),
        (lambda: DEEPSPEED(gradient_clipping=1.0), r"gradient_clipping has.*call accelerator.clip_grad_norm_"),
        (
            lambda: DEEPSPEED(hf_ds_config={"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}),
            "'bf16' has no",
        ),
        (
            lambda: DEEPSPEED(hf_ds_config={"zero_optimization": {"stage": 2}, "optimizer": {"type": "AdamW"}}),
            "'optimizer' has no counterpart here, only the stage",
        ),
        (lambda: DEEPSPEED(gradient_accumulation_steps=4), "gradient_accumulation_steps is 4 and Accelerator's 1"),
    ],
)
def test_what_has_no_counterpart_in_a_plugin_is_named(plugin, why):
    plugin = plugin()
    with pytest.raises(UserError, match=why):
        fresh(ours.Accelerator, **{"fsdp_plugin" if isinstance(plugin, FSDP) else "deepspeed_plugin": plugin})


SCRIPT = """
import torch
from jaxtrain.accelerate import Accelerator
accelerator, model = Accelerator(), torch.nn.Linear(16, 16)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
accelerator.backward(model(torch.ones(8, 16)).square().mean())
optimizer.step()
"""
CONFIGS = {
    "fsdp": "distributed_type: FSDP\nfsdp_config: {fsdp_version: 1, fsdp_sharding_strategy: FULL_SHARD, "
    "fsdp_state_dict_type: FULL_STATE_DICT, fsdp_cpu_ram_efficient_loading: true, fsdp_sync_module_states: true, "
    "fsdp_offload_params: false, fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP, fsdp_use_orig_params: true}\n",
    "fsdp2": "distributed_type: FSDP\nfsdp_config: {fsdp_version: 2, fsdp_reshard_after_forward: true, "
    "fsdp_state_dict_type: SHARDED_STATE_DICT, fsdp_cpu_ram_efficient_loading: true}\n",
    "offload": "distributed_type: FSDP\nfsdp_config: {fsdp_version: 1, fsdp_offload_params: true}\n",
}


def launched(tmp_path, config: str, processes: int = 1) -> subprocess.CompletedProcess:
    (tmp_path / "script.py").write_text(textwrap.dedent(SCRIPT))
    (tmp_path / "config.yaml").write_text(
        f"compute_environment: LOCAL_MACHINE\nnum_processes: {processes}\nnum_machines: 1\nmachine_rank: 0\n"
        f"mixed_precision: 'no'\nmain_training_function: main\nrdzv_backend: static\nsame_network: true\n{config}"
    )
    command = ["-m", "accelerate.commands.launch", "--config_file", "config.yaml", "script.py"]
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "PYTHONPATH": os.getcwd()}
    return subprocess.run(
        [sys.executable, *command], cwd=tmp_path, env=os.environ | flags, capture_output=True, text=True, timeout=300
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "processes", "said"),
    [
        ("fsdp", 1, "a step runs on 8 devices, fsdp: 100% of the weights' bytes are split"),
        ("fsdp2", 1, "a step runs on 8 devices, fsdp: 100% of the weights' bytes are split"),
        ("offload", 1, "cpu_offload has no counterpart here"),
        ("fsdp", 2, "2 processes were started, and one drives all devices here"),
    ],
)
def test_a_config_file_of_accelerate_launch_is_followed(config, processes, said, tmp_path):
    ended = launched(tmp_path, CONFIGS[config], processes)
    assert said in ended.stdout + ended.stderr
    assert (ended.returncode == 0) == said.startswith("a step")
