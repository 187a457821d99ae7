"""Golden cases of decoding: routing strategies with a cache, greedy generation."""

import numpy as np

from jaxtrain.systems.memory_lm import decoding
from jaxtrain.systems.memory_lm.config import Memory
from tests.parity.memory_lm_models import Settings, given_state, make_model


def replay_decoding(case: dict, tensors: dict) -> dict:
    out = {}
    ids, mask = (tensors[f"in/{name}"].astype(np.int32) for name in ("input_ids", "attention_mask"))
    for strategy in case["strategies"]:
        settings = Settings(case)
        settings.memory = Memory(**{**case["config"]["memory"], "routing_strategy_inference": strategy})
        model = make_model(settings, given_state(tensors))
        prefix = f"out/{strategy}"
        wanted = [key for key in case["expects"] if key.startswith(f"{prefix}/step")]
        steps = len(wanted)
        new = case["expects"].get(f"{prefix}/greedy_ids") if isinstance(case["expects"], dict) else None
        total = (new[-1] if new else ids.shape[1] + steps) - ids.shape[1]
        trace = decoding.greedy_trace(model, ids, mask, max(total, steps + 1))
        out[f"{prefix}/prefill_logits"] = trace.prefill_logits
        out |= {f"{prefix}/step{i}_logits": trace.step_logits[i] for i in range(steps)}
        out[f"{prefix}/greedy_ids"] = np.concatenate([ids, trace.tokens[:, :total]], axis=1).astype(np.int64)
        for key in case["expects"]:
            if key.startswith(f"{prefix}/nocache_full_logits_row"):
                row = int(key.rsplit("row", 1)[1])
                out[key] = model.logits(ids[row : row + 1], mask[row : row + 1])
        for layer, (keys, values) in enumerate(zip(trace.prefill_cache.keys, trace.prefill_cache.values, strict=True)):
            out.setdefault(f"out/kv_cache/{layer}/k", keys[:, : ids.shape[1]])
            out.setdefault(f"out/kv_cache/{layer}/v", values[:, : ids.shape[1]])
    return out


def replay_generation(case: dict, tensors: dict) -> dict:
    settings = Settings(case)
    model = make_model(settings, given_state(tensors))
    prompts = [[int(token) for token in prompt.split()] for prompt in case["prompts"]]
    options = {"eos_token_id": case["eos_token_id"], "pad_token_id": case["pad_token_id"]}
    new = case["max_new_tokens"]
    alone = decoding.generate_ids(model, prompts[:1], new, decoding.Sampling(do_sample=False), **options)
    first = [*prompts[0], *alone.tokens[0][: alone.lengths[0]]]
    together = decoding.generate_ids(model, prompts, new, decoding.Sampling(do_sample=False), **options)
    return {
        "out/generate_ids": np.array(first, np.int64),
        "out/generate_batch_ids": together.padded(case["pad_token_id"]).astype(np.int64),
    }
