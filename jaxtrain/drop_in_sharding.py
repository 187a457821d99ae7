"""Translate a library's own words for sharding into a strategy of `jaxtrain.compile(shard=...)`.

JAX drives all devices, of one process or of several that join, so nothing of the library's own sharding is started.
"""

import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import Any

from jaxtrain.errors import UserError

STRATEGIES = {
    "FULL_SHARD": "fsdp",
    "SHARD_GRAD_OP": "shard_grad_op",
    "HYBRID_SHARD": "hsdp",
    "NO_SHARD": "ddp",
    "DEEPSPEED_STAGE_0": "ddp",
    "DEEPSPEED_STAGE_1": "shard_grad_op",  # its gradients are whole until they are reduced, which XLA decides itself
    "DEEPSPEED_STAGE_2": "shard_grad_op",
    "DEEPSPEED_STAGE_3": "fsdp",
    "FSDP": "fsdp",
    "TRUE": "fsdp",  # FSDP2's reshard_after_forward
    "FALSE": "shard_grad_op",
}


def of_transformers(args: Any) -> str:
    """Return what TrainingArguments(fsdp=, fsdp_config=) means, and clear them. Raises UserError for a part that has no
    counterpart."""
    if not args.fsdp:
        return "ddp"
    config = args.fsdp_config or {}
    refused = {
        "cpu_offload": "the optimizer's state stays on the devices",
        "activation_checkpointing": "set gradient_checkpointing=True instead",
        "xla": "it is torch_xla's",
    }
    for name, advice in refused.items():
        if str(config.get(name, False)).lower() not in ("false", "0", "none"):
            raise UserError(f"TrainingArguments.fsdp_config[{name!r}] has no counterpart here: {advice}")
    shard = _strategy(
        "TrainingArguments.fsdp_config['reshard_after_forward']", config.get("reshard_after_forward", True)
    )
    args.fsdp, args.fsdp_plugin_args = False, None
    return shard


def of_lightning(strategy: Any) -> tuple[str, Any]:
    """Return what Trainer(strategy=...) means, and the strategy that Lightning takes. Raises UserError for a part
    that has no counterpart."""
    if isinstance(strategy, str) and strategy.partition("_")[0] in ("fsdp", "deepspeed"):
        return _strategy("Trainer(strategy=...)", strategy), "auto"
    if type(strategy).__name__ != "FSDPStrategy":
        return "ddp", strategy
    for name in ("cpu_offload", "_activation_checkpointing_kwargs"):
        value = getattr(strategy, name, None)
        if getattr(value, "offload_params", value):
            raise UserError(f"FSDPStrategy: {name.strip('_').removesuffix('_kwargs')} has no counterpart here")
    if getattr(strategy, "_state_dict_type", "full") != "full":
        raise UserError("FSDPStrategy(state_dict_type='sharded') has no counterpart here: checkpoints are whole")
    return _strategy("FSDPStrategy(sharding_strategy=...)", getattr(strategy.sharding_strategy, "name", "")), "auto"


PLUGINS = {"fsdp_plugin": "ACCELERATE_USE_FSDP", "deepspeed_plugin": "ACCELERATE_USE_DEEPSPEED"}
YES = ("true", "1", "yes", "on")
DEEPSPEED_KEYS = {  # sizes, which the loop decides, and what only says how DeepSpeed prints and communicates
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "zero_optimization",
    "steps_per_print", "wall_clock_breakdown", "prescale_gradients", "communication_data_type", "comms_logger",
    "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "gradient_clipping",
}  # fmt: skip


def of_accelerate(options: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return what Accelerator(fsdp_plugin=, deepspeed_plugin=) mean, or the environment of `accelerate launch`, and the
    options that accelerate takes. Raises UserError for a part that has no counterpart."""
    options = dict(options)
    plugins = {name: options.pop(name, None) for name in PLUGINS}
    plugins["deepspeed_plugin"] = plugins["deepspeed_plugin"] or options.pop("deepspeed_plugins", None)
    asked = {name for name, variable in PLUGINS.items() if os.environ.get(variable, "").lower() in YES}
    used = [name for name in PLUGINS if plugins[name] is not None or name in asked]
    if not used:
        return "ddp", options
    _one_process(f"Accelerator({used[0]}=...)", int(os.environ.get("WORLD_SIZE", "1")))
    if used[0] == "fsdp_plugin":
        return _of_fsdp_plugin(plugins["fsdp_plugin"]), options
    return _of_deepspeed_plugin(plugins["deepspeed_plugin"], options), options


@contextlib.contextmanager
def without_plugins() -> Iterator[None]:
    """Hide the environment that `accelerate launch` sets for FSDP and DeepSpeed, so that accelerate starts neither."""
    hidden = {variable: os.environ.pop(variable) for variable in PLUGINS.values() if variable in os.environ}
    try:
        yield
    finally:
        os.environ.update(hidden)


def _of_fsdp_plugin(plugin: Any) -> str:
    """Return the strategy of a FullyShardedDataParallelPlugin; None: of the environment's. How FSDP wraps, fetches and
    loads parameters changes no result, and XLA decides it."""
    if plugin is None:
        from accelerate import FullyShardedDataParallelPlugin

        second = os.environ.get("FSDP_VERSION", "1") == "2"
        plugin = FullyShardedDataParallelPlugin(
            sync_module_states=None if second else False, cpu_ram_efficient_loading=False
        )  # both are of several processes
    refused = {
        "cpu_offload": "the weights stay on the devices",
        "activation_checkpointing": "call model.gradient_checkpointing_enable() instead",
        "ignored_modules": "every weight that the devices divide is split",
        "mixed_precision_policy": "take Accelerator(mixed_precision='bf16')",
        "param_init_fn": "hand over a model with its weights",
    }
    for name, advice in refused.items():
        value = getattr(plugin, name, None)
        if getattr(value, "offload_params", value) and type(value).__name__ != "OffloadPolicy":
            raise UserError(f"FullyShardedDataParallelPlugin.{name} has no counterpart here: {advice}")
    kind = getattr(plugin.state_dict_type, "name", "")
    if kind == "LOCAL_STATE_DICT" or (kind == "SHARDED_STATE_DICT" and plugin.fsdp_version == 1):
        raise UserError(
            f"FullyShardedDataParallelPlugin.state_dict_type={kind} has no counterpart here: checkpoints are whole, "
            "take FULL_STATE_DICT"
        )
    word = plugin.reshard_after_forward if plugin.fsdp_version == 2 else plugin.sharding_strategy
    return _strategy("FullyShardedDataParallelPlugin.sharding_strategy", getattr(word, "name", word))


def _of_deepspeed_plugin(plugin: Any, options: Mapping[str, Any]) -> str:
    """Return the strategy of a DeepSpeedPlugin, or of a dict or list of one; None: of the environment's."""
    if isinstance(plugin, Mapping):
        plugin = list(plugin.values())
    if isinstance(plugin, list | tuple):
        if len(plugin) != 1:
            raise UserError(f"Accelerator(deepspeed_plugins=...): {len(plugin)} plugins, wanted one")
        plugin = plugin[0]
    if plugin is None:
        from accelerate import DeepSpeedPlugin

        plugin = DeepSpeedPlugin()
    config = plugin.hf_ds_config.config
    for key, value in config.items():
        if key in ("bf16", "fp16") and str(value.get("enabled", False)).lower() != "true":
            continue
        if key not in DEEPSPEED_KEYS:
            advice = "; take Accelerator(mixed_precision='bf16')" if key in ("bf16", "fp16") else ""
            raise UserError(
                f"DeepSpeed's {key!r} has no counterpart here, only the stage of its zero_optimization{advice}"
            )
    zero = config.get("zero_optimization", {})
    for name in ("offload_optimizer", "offload_param"):
        if (zero.get(name) or {}).get("device", "none") not in ("none", None):
            raise UserError(
                f"DeepSpeed's zero_optimization.{name} has no counterpart here: the state stays on the devices"
            )
    if str(config.get("gradient_clipping", "auto")) not in ("auto", "0", "0.0", "None"):
        raise UserError(
            "DeepSpeed's gradient_clipping has no counterpart here: call accelerator.clip_grad_norm_(parameters, norm)"
        )
    steps = str(config.get("gradient_accumulation_steps", "auto"))
    wanted = str(
        options.get("gradient_accumulation_steps", os.environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", 1))
    )
    if steps not in ("auto", "1", wanted):
        raise UserError(
            f"DeepSpeed's gradient_accumulation_steps is {steps} and Accelerator's {wanted}: give Accelerator the same"
        )
    return _strategy("DeepSpeed's zero_optimization.stage", f"deepspeed_stage_{zero.get('stage', plugin.zero_stage)}")


def _strategy(what: str, word: Any) -> str:
    shard = STRATEGIES.get(str(word).upper())
    if shard is None:
        known = ", ".join(name.lower() for name in STRATEGIES if name not in ("TRUE", "FALSE"))
        raise UserError(f"{what}: {word!r} has no counterpart here; there are {known}")
    return shard


def _one_process(what: str, processes: int) -> None:
    if processes > 1:
        raise UserError(f"{what}: {processes} processes were started, and one drives all devices here: start it alone")
