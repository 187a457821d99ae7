"""Assign parameters to groups with their own learning rates, and decide which are trained."""

MEMORY_PARTS = ("routers.", ".memory_attn.", ".memory_layernorm.", ".post_memory_layernorm.", ".post_memory_mlp.")


def param_group(key: str, config) -> str:
    """Return the name in `optim.groups`: memory (routers, memory layers), memory_bank, lora or base_model."""
    name = "." + key
    if key.startswith("memory_banks."):
        return "memory_bank"
    if key.endswith((".lora_A", ".lora_B")):
        return "lora"
    if key.startswith(("routers.", "memory_adapters.")) or any(part in name for part in MEMORY_PARTS[1:]):
        return "memory"
    return "base_model"


def trainable(key: str, config) -> bool:
    """Return False for a frozen parameter, which has no optimizer state."""
    if key.startswith("base_model.") and param_group(key, config) == "base_model":
        # The weight of a Linear with LoRA stays frozen even if the rest of the base model is trained.
        return not (config.model.freeze_base_model or has_lora(key, config))
    if key.startswith("memory_banks."):
        return not config.memory.freeze_memory_bank
    if key.startswith("routers."):
        return not config.memory.freeze_router
    return True


def has_lora(key: str, config) -> bool:
    """Return True if `base_model.<name>.weight` belongs to a Linear that LoRA replaces."""
    name = key.removeprefix("base_model.").rsplit(".", 1)[0]
    linear = not name.endswith(("norm", "embed_tokens"))
    return config.memory.lora and linear and any(target in name for target in config.memory.lora_targets)
