"""Golden cases of memory_lm: which recipe replays a case, by what its JSON holds."""

from tests.parity.memory_lm_decoding import replay_decoding, replay_generation
from tests.parity.memory_lm_models import replay_zero_memory
from tests.parity.memory_lm_parts import (
    replay_data,
    replay_early_stopping,
    replay_lora,
    replay_quantization,
    replay_router,
    replay_schedules,
)
from tests.parity.memory_lm_training import replay_lr_finder, replay_model, replay_trainer


def claims(name: str, case: dict) -> bool:
    return recipe_of(case) is not None


def recipe_of(case: dict):
    """The function that replays a case, by what its JSON holds."""
    config = case.get("config")
    whole = isinstance(config, dict) and {"model", "memory"} <= set(config)
    expects = case.get("expects", ())
    if whole and "strategies" in case:
        return replay_decoding
    if whole and "prompts" in case:
        return replay_generation
    if whole and any(key.startswith("out/vanilla_logits") for key in expects):
        return replay_zero_memory
    if whole and "min_lr" in case and "max_lr" in case:
        return replay_lr_finder
    if whole and any("micro_losses" in key for key in expects):
        return replay_trainer
    if whole and any(key.startswith(("out/eval_logits", "loss/train")) for key in expects):
        return replay_model
    if {"num_chapters", "top_k", "hidden_dim"} <= set(case):
        return replay_router
    if {"rank", "alpha", "in_features"} <= set(case):
        return replay_lora
    if any(key.endswith("dequantized") for key in expects):
        return replay_quantization
    if "tokenizer_json" in case:
        return replay_data
    cases = case.get("cases")
    if isinstance(cases, dict) and cases and all("min_lr_ratio" in one for one in cases.values()):
        return replay_schedules
    if isinstance(cases, list) and cases and all({"losses", "patience", "threshold"} <= set(one) for one in cases):
        return replay_early_stopping
    return None


def replay(name: str, case: dict, tensors: dict) -> dict:
    return recipe_of(case)(case, tensors)
