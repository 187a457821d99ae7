"""Refuse settings that the task or the devices do not support."""

from typing import Any

from jaxtrain.errors import UserError
from jaxtrain.nn import float8, fused_attention
from jaxtrain.runtime.mesh import Layout
from jaxtrain.runtime.precision import POLICIES
from jaxtrain.task import Task


def check_tokens(task: Task, config: Any) -> None:
    """Raise UserError if `shard.sequence` is set and the task cannot split a sample's tokens over devices."""
    if config.shard.sequence == 1:
        return
    if task.splits_tokens is None:
        raise UserError(
            f"shard.sequence: {config.shard.sequence}, but this task does not split a sample's tokens over devices "
            "(Task.splits_tokens); set 1. The tasks of memory_lm do"
        )
    task.splits_tokens(config)


def check_precision(config: Any, layout: Layout) -> None:
    """Raise UserError if the devices do not support the matrix products of the precision policy."""
    if not POLICIES[config.precision.policy].float8:
        return
    device = layout.mesh.devices.flat[0]
    reason = float8.lacking(device.platform, fused_attention.capability() if device.platform == "gpu" else None)
    if reason is not None:
        raise UserError(f"precision.policy: fp8 {reason}, this is {device.device_kind}; take bf16")
