"""The original's generate and generate_batch, in torch with a cache; jaxtrain.generate is the compiled version."""

from collections.abc import Sequence
from typing import Any

import torch

from jaxtrain.errors import UserError
from jaxtrain.systems.memory_lm.tokenizers import as_ids


def generate(
    model: torch.nn.Module,
    tokenizer: Any,
    prompt: str,
    max_new_tokens: int = 256,
    temperature: float = 0.7,
    top_p: float = 0.9,
    top_k: int = 50,
    do_sample: bool = True,
    device: str | torch.device | None = "cuda",
) -> str:
    """Return the prompt and its continuation, up to the end token or max_new_tokens.

    tokenizer: a transformers tokenizer. device: the CPU where torch lacks CUDA; None is the model's. Raises UserError,
    a ValueError, for settings out of range.
    """
    return generate_batch(
        model, tokenizer, [prompt], max_new_tokens, temperature, top_p, top_k, do_sample, device
    )[0]  # fmt: skip


@torch.no_grad()
def generate_batch(
    model: torch.nn.Module,
    tokenizer: Any,
    prompts: Sequence[str],
    max_new_tokens: int = 256,
    temperature: float = 0.7,
    top_p: float = 0.9,
    top_k: int = 50,
    do_sample: bool = True,
    device: str | torch.device | None = "cuda",
) -> list[str]:
    """Return prompts with their continuations, computed in one batch; ended rows continue with masked padding.

    Arguments and errors as in `generate`.
    """
    if max_new_tokens < 0:
        raise UserError(f"max_new_tokens: {max_new_tokens}, wanted 0 or more")
    if not temperature > 0:
        raise UserError(f"temperature: {temperature}, wanted more than 0 (greedy is do_sample=False)")
    if not 0 < top_p <= 1:
        raise UserError(f"top_p: {top_p}, wanted more than 0 and at most 1")
    if top_k < 0:
        raise UserError(f"top_k: {top_k}, wanted 0 (all tokens) or more")
    device = next(model.parameters()).device if device is None else torch.device(device)
    device = torch.device("cpu") if device.type == "cuda" and not torch.cuda.is_available() else device
    model.to(device)
    pad, eos = tokenizer.pad_token_id, tokenizer.eos_token_id
    pad = eos if pad is None else pad
    rows = [as_ids(tokenizer.encode(prompt)) or [eos] for prompt in prompts]
    if not rows:
        return []
    width = max(len(row) for row in rows)
    ids = torch.tensor([[*row, *[pad] * (width - len(row))] for row in rows], device=device)
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows], device=device)
    was = model.training
    model.eval()
    try:
        new = _continue(model, ids, mask, max_new_tokens, eos, pad, (temperature, top_p, top_k, do_sample))
    finally:
        model.train(was)
    return [
        tokenizer.decode([*row, *_until(tokens, eos)], skip_special_tokens=True)
        for row, tokens in zip(rows, new.tolist(), strict=True)
    ]


def _continue(model, ids, mask, count: int, eos, pad, sampling) -> torch.Tensor:
    """Return the new tokens, int [row, new]."""
    positions = ((mask.cumsum(1) - 1) * mask).clamp_min(0)
    out = model(ids, mask, position_ids=positions, use_cache=True)
    last = mask.sum(1) - 1
    logits = out["logits"][torch.arange(len(ids), device=ids.device), last]
    live, tokens = torch.ones(len(ids), dtype=torch.bool, device=ids.device), []
    for step in range(count):
        token = torch.where(live, next_token(logits, *sampling), pad)
        tokens.append(token)
        mask = torch.cat([mask, live[:, None].long()], 1)
        if eos is not None:
            live = live & (token != eos)
        if not live.any() or step + 1 == count:
            break
        places = (mask.sum(1) - 1)[:, None]
        out = model(
            token[:, None], mask, position_ids=places, past_key_values=out["past_key_values"], use_cache=True
        )  # fmt: skip
        logits = out["logits"][:, -1]
    return torch.stack(tokens, 1) if tokens else ids[:, :0]


def next_token(logits, temperature: float, top_p: float, top_k: int, do_sample: bool) -> torch.Tensor:
    """Choose the next tokens, int [row], from logits [row, vocabulary]: temperature, top-k, then top-p.

    Top-p always keeps the most likely token.
    """
    if not do_sample:
        return logits.argmax(-1)
    logits = logits.float() / temperature
    if top_k:
        logits = logits.masked_fill(logits < logits.topk(min(top_k, logits.shape[-1]), -1).values[:, -1:], -torch.inf)
    if top_p < 1:
        ordered, order = logits.sort(-1, descending=True)
        p = ordered.softmax(-1)
        drop = (p.cumsum(-1) - p > top_p).scatter(-1, order, p.cumsum(-1) - p > top_p)
        logits = logits.masked_fill(drop, -torch.inf)
    return torch.multinomial(logits.softmax(-1), 1)[:, 0]


def _until(tokens: list[int], eos: int | None) -> list[int]:
    return tokens[: tokens.index(eos) + 1] if eos in tokens else tokens
