"""Refuse a run that asks its task or its devices for what they do not offer."""

from typing import Any

from jaxtrain.errors import UserError
from jaxtrain.nn import float8, fused_attention
from jaxtrain.runtime.mesh import Layout
from jaxtrain.runtime.precision import POLICIES
from jaxtrain.task import Task


def check_tokens(task: Task, config: Any) -> None:
    """Raises UserError where `shard.sequence` is to split what the task does not split."""
    if config.shard.sequence == 1:
        return
    if task.splits_tokens is None:
        raise UserError(
            f"shard.sequence: {config.shard.sequence}, but this task does not split a sample's tokens over devices "
            "(Task.splits_tokens); set 1. The tasks of memory_lm do"
        )
    task.splits_tokens(config)


def check_precision(config: Any, layout: Layout) -> None:
    """Raises UserError where the devices have no products of the policy's."""
    if not POLICIES[config.precision.policy].float8:
        return
    device = layout.mesh.devices.flat[0]
    reason = float8.lacking(device.platform, fused_attention.capability() if device.platform == "gpu" else None)
    if reason is not None:
        raise UserError(f"precision.policy: fp8 {reason}, this is {device.device_kind}; take bf16")
