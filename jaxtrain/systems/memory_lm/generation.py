"""Generate text from prompts."""

from collections.abc import Sequence

from jaxtrain.systems.memory_lm import decoding
from jaxtrain.systems.memory_lm.decoding import Sampling


def generate(
    model,
    tokenizer,
    prompt: str,
    max_new_tokens: int = 256,
    temperature: float = 0.7,
    top_p: float = 0.9,
    top_k: int = 50,
    do_sample: bool = True,
    seed: int = 0,
) -> str:
    """Return the prompt and its continuation, up to the end token or max_new_tokens."""
    sampling = Sampling(temperature, top_p, top_k, do_sample)
    return generate_batch(model, tokenizer, [prompt], max_new_tokens, sampling=sampling, seed=seed)[0]


def generate_batch(
    model,
    tokenizer,
    prompts: Sequence[str],
    max_new_tokens: int = 256,
    *,
    sampling: Sampling | None = None,
    seed: int = 0,
    decoder: decoding.Decoder | None = None,
) -> list[str]:
    """Return prompts with their continuations, computed in one batch.

    An empty prompt starts from the begin token, or the end token if the tokenizer has none.
    """
    ids = [prompt_ids(tokenizer, prompt) for prompt in prompts]
    result = decoding.generate_ids(
        model,
        ids,
        max_new_tokens,
        sampling,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        seed=seed,
        decoder=decoder,
    )
    rows = zip(ids, result.tokens, result.lengths, strict=True)
    return [tokenizer.decode([*prompt, *new[:length].tolist()]) for prompt, new, length in rows]


def prompt_ids(tokenizer, prompt: str) -> list[int]:
    ids = tokenizer.encode(prompt).ids
    start = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    return ids or [tokenizer.pad_token_id if start is None else start]
