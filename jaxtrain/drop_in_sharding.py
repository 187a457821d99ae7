"""Translate a library's own words for sharding into a strategy of `jaxtrain.compile(shard=...)`.

One process drives all devices, so nothing of the library's own sharding is started.
"""

from typing import Any

from jaxtrain.errors import UserError

STRATEGIES = {
    "FULL_SHARD": "fsdp",
    "SHARD_GRAD_OP": "shard_grad_op",
    "HYBRID_SHARD": "hsdp",
    "NO_SHARD": "ddp",
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
    _one_process("TrainingArguments.fsdp", args.world_size)
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


def _strategy(what: str, word: Any) -> str:
    shard = STRATEGIES.get(str(word).upper())
    if shard is None:
        known = ", ".join(name.lower() for name in STRATEGIES if name not in ("TRUE", "FALSE"))
        raise UserError(f"{what}: {word!r} has no counterpart here; there are {known}")
    return shard


def _one_process(what: str, processes: int) -> None:
    if processes > 1:
        raise UserError(f"{what}: {processes} processes were started, and one drives all devices here: start it alone")
