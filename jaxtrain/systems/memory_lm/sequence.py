"""Check the settings of `shard.sequence`, which spreads the tokens of a row over several devices."""

from jaxtrain.errors import UserError
from jaxtrain.nn.ring_attention import check_tokens


def scratch(config) -> None:
    """Raise UserError if the settings of a MemoryTransformer do not allow `shard.sequence`."""
    _check(config, dropout=config.model.attention_dropout)


def adapter(config) -> None:
    """Raise UserError if a MemoryAdapter's settings or its base model's windows do not allow `shard.sequence`."""
    from jaxtrain.systems.memory_lm.adapter import backbone_config

    reach = min((window for window in backbone_config(config.model).windows if window is not None), default=None)
    if reach is not None:
        raise UserError(
            f"shard.sequence: {config.shard.sequence}, but the base model's attention reaches {reach} tokens back, "
            "which is not offered where a row's tokens lie on several devices; set shard.sequence=1"
        )
    _check(config)


def _check(config, dropout: float = 0.0) -> None:
    refusals = {
        "data.packing": config.data.packing and config.compat != "original",
        "model.attention_dropout": dropout > 0,
        "compat: original": config.compat == "original",
    }
    for setting, is_set in refusals.items():
        if is_set:
            raise UserError(
                f"shard.sequence: {config.shard.sequence} does not go with {setting}: attention over several "
                "devices has no mask and no dropout; set data.packing=false, model.attention_dropout=0, compat=correct"
            )
    check_tokens(config.data.max_length, config.shard.sequence, "data.max_length")
