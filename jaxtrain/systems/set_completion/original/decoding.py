"""The original's functions for decoding into legal builds; the search itself is in builds.py and reconstruct.py."""

import json
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from jaxtrain.systems.set_completion import builds, reconstruct
from jaxtrain.systems.set_completion.builds import AbilityToken, Build, read_token
from jaxtrain.systems.set_completion.reconstruct import BONUS, Candidate

Predict = Callable[[list[str], str], Mapping[str, float]]
PredictBatch = Callable[[list[list[str]], list[str]], Sequence[Mapping[str, float]]]
Capstones = Mapping[str, AbilityToken] | Iterable[str | AbilityToken]
TOKEN_BONUS = BONUS


def load_json(path: str | pathlib.Path) -> Any:
    """Return the content of a JSON file, such as vocab.json. Raises FileNotFoundError."""
    return json.loads(pathlib.Path(path).read_text())


def tokens_of(capstones: Capstones) -> list[str | AbilityToken]:
    """Return the capstones in order: the values of a mapping, else the names and AbilityTokens themselves."""
    return list(capstones.values() if isinstance(capstones, Mapping) else capstones)


class Allocator:
    """Search for the cheapest legal build that reaches given capstones.

    main_only_slots_override: raises ValueError unless None, because the slots of main-only abilities are the game's.
    """

    def __init__(self, main_only_slots_override: Mapping[str, str] | None = None):
        if main_only_slots_override is not None:
            raise ValueError("main_only_slots_override: other slots are not supported; pass None for the game's")

    def allocate(
        self, capstones: Capstones, priority: Mapping[str, float] | None = None
    ) -> tuple[Build, int] | tuple[None, None]:
        """Return (build, overshoot in points), or (None, None). priority: family -> preference for a main slot."""
        return builds.allocate(tokens_of(capstones), priority)


def expand_capstones_to_context(capstones: Capstones) -> list[str]:
    """Return the model's input tokens: each tier with all tiers below it; ["<NULL>"] for no capstone."""
    return builds.expand(tokens_of(capstones))


def greedy_closure(
    predict_fn: Predict,
    weapon_id: str,
    capstones: Capstones,
    allocator: Allocator,
    threshold: float = 0.5,
    token_bonus: float = TOKEN_BONUS,
    *,
    record_traces: bool = False,
    start_step: int = 0,
) -> tuple[dict[str, AbilityToken], float, dict[str, float]]:
    """Add all tokens with a probability of at least `threshold`, until none adds information.

    Returns (capstones by name, score, best probability by family). predict_fn: (tokens, weapon_id) -> {token:
    probability} in the vocabulary's order. token_bonus: added to the score for each token. allocator: not used, as no
    build is made here. Raises ValueError for record_traces and start_step, which are not supported.
    """
    _no_traces(record_traces or start_step)
    state = reconstruct.greedy_closure(_each(predict_fn, weapon_id), _names(capstones), threshold, token_bonus)
    return {name: AbilityToken.from_vocab_entry(name) for name in state.tokens}, state.score, dict(state.priority)


def reconstruct_build(
    predict_fn: Predict,
    weapon_id: str,
    initial_context: Sequence[str],
    allocator: Allocator,
    beam_size: int = 5,
    max_steps: int | None = 6,
    token_bonus: float = TOKEN_BONUS,
    alpha: float = 0.1,
    top_k: int = 1,
    record_traces: bool = False,
    min_new_token_prob: float = 0.01,
    predict_batch_fn: PredictBatch | None = None,
    greedy_threshold: float = 0.5,
) -> list[Build]:
    """Return the best `top_k` legal builds that contain the context's tokens.

    The beam search starts from the context and its greedy closure. max_steps=None means 30. predict_batch_fn:
    (contexts, weapon ids) -> a mapping per context, called once per step instead of predict_fn. alpha,
    min_new_token_prob: not used, as in the original. Raises ValueError for record_traces.
    """
    _no_traces(record_traces)
    predict = _each(predict_fn, weapon_id)
    if predict_batch_fn is not None:
        predict = lambda contexts: predict_batch_fn(contexts, [weapon_id] * len(contexts))
    return _search(predict, initial_context, allocator, beam_size, max_steps, token_bonus, top_k, greedy_threshold)


def reconstruct_builds_batched(
    predict_batch_fn: PredictBatch,
    weapon_ids: Sequence[str],
    initial_contexts: Sequence[Sequence[str]],
    allocator: Allocator,
    beam_size: int = 5,
    max_steps: int | None = 6,
    token_bonus: float = TOKEN_BONUS,
    greedy_threshold: float = 0.5,
    alpha: float = 0.1,
    top_k: int = 1,
    min_new_token_prob: float = 0.01,
) -> list[list[Build]]:
    """Return what `reconstruct_build` returns, for each weapon and its context.

    predict_batch_fn: (contexts, weapon ids) -> a mapping per context. Raises ValueError for different counts.
    """
    if len(weapon_ids) != len(initial_contexts):
        raise ValueError(f"{len(weapon_ids)} weapon_ids for {len(initial_contexts)} initial_contexts")
    builds = []
    for weapon, context in zip(weapon_ids, initial_contexts, strict=True):
        predict = lambda contexts, weapon=weapon: predict_batch_fn(contexts, [weapon] * len(contexts))
        builds.append(_search(predict, context, allocator, beam_size, max_steps, token_bonus, top_k, greedy_threshold))
    return builds


def _search(predict, context, allocator, beam_size, max_steps, token_bonus, top_k, threshold) -> list[Build]:
    if not hasattr(allocator, "allocate"):
        raise TypeError(f"allocator: got {type(allocator).__name__}, wanted an Allocator")
    candidates: list[Candidate] = reconstruct.reconstruct(
        predict, context, beam_size, max_steps, top_k, threshold, token_bonus, allocator.allocate
    )
    return [candidate.build for candidate in candidates]


def _names(capstones: Capstones) -> list[str]:
    return [token if isinstance(token, str) else token.name for token in tokens_of(capstones) if read_token(token)]


def _no_traces(asked: Any) -> None:
    if asked:
        raise ValueError("record_traces, start_step: traces of the search are not recorded; leave them out")


def _each(predict: Predict, weapon_id: str) -> reconstruct.Predict:
    return lambda contexts: [predict(context, weapon_id) for context in contexts]
