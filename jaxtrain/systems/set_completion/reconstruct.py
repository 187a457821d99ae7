"""Find legal builds from token probabilities: greedy closure and beam search.

predict: contexts (lists of tokens) -> one {token: probability} per context, tokens in vocabulary order. It is called
once per step of the search with all states of the beam.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from jaxtrain.systems.set_completion.builds import Build, allocate, expand, read_token

Predict = Callable[[list[list[str]]], Sequence[Mapping[str, float]]]
BONUS = math.log(2)  # added to the score for every added token
MOST_STEPS = 30


class State(NamedTuple):
    """State of the search. tokens: chosen so far, in order. priority: highest probability seen, by family."""

    tokens: tuple[str, ...]
    score: float
    priority: Mapping[str, float]


class Candidate(NamedTuple):
    build: Build
    overshoot: int  # points beyond those that the tokens require
    score: float


def greedy_closure(predict: Predict, context: Sequence[str], threshold: float = 0.5, bonus: float = BONUS) -> State:
    """Add all tokens with a probability of at least `threshold` that add information, until there are none."""
    tokens = [token for token in context if read_token(token)]
    priority: dict[str, float] = {}
    score = 0.0
    while True:
        probabilities = predict([expand(tokens)])[0]
        added = []
        for token, p in probabilities.items():
            ability = read_token(token)
            if ability is not None and p >= threshold and _says_more(token, tokens):
                added.append((token, ability.family, p))
        if not added:
            return State(tuple(tokens), score, priority)
        for token, family, p in added:
            tokens = _add(tokens, token)
            score += p + bonus
            priority[family] = max(priority.get(family, 0.0), p)


def reconstruct(
    predict: Predict,
    context: Sequence[str],
    beam_size: int = 5,
    max_steps: int | None = 6,
    top_k: int = 1,
    threshold: float = 0.5,
    bonus: float = BONUS,
    allocate: Callable[..., tuple[Build, int] | tuple[None, None]] = allocate,
) -> list[Candidate]:
    """Return the best `top_k` legal builds that contain the context's tokens.

    The beam starts from the context and from its greedy closure; as in the original, it may hold the same set of tokens
    in several orders. Candidates are the builds of all visited states, ranked by total points, then least overshoot,
    then score. max_steps=None means 30. bonus: added to the score for every added token. allocate: (tokens, priority)
    -> (build, overshoot) or (None, None).
    """
    start = State(tuple(token for token in context if read_token(token)), 0.0, {})
    candidates: dict[tuple, Candidate] = {}
    greedy = greedy_closure(predict, context, threshold, bonus)
    for state in (start, greedy):
        _collect(candidates, state, allocate)
    beam = [start, greedy]
    seen = {frozenset(state.tokens) for state in beam}
    for _ in range(MOST_STEPS if max_steps is None else max_steps):
        predictions = predict([expand(state.tokens) for state in beam])
        extended = [new for state, p in zip(beam, predictions, strict=True) for new in _extensions(state, p, bonus)]
        unique = {state.tokens: state for state in sorted(extended, key=lambda state: state.score)}
        beam = sorted(unique.values(), key=lambda state: -state.score)[:beam_size]
        for state in beam:
            _collect(candidates, state, allocate)
        keys = {frozenset(state.tokens) for state in beam}
        if keys <= seen:
            break
        seen |= keys
    ranked = sorted(candidates.values(), key=lambda c: (-c.build.total_ap, c.overshoot, -c.score))
    return ranked[:top_k]


def _collect(candidates: dict[tuple, Candidate], state: State, allocate: Callable) -> None:
    build, overshoot = allocate(state.tokens, state.priority)
    if build is not None:
        new = Candidate(build, overshoot, state.score)
        old = candidates.get(build.identity)
        if old is None or (new.overshoot, -new.score) < (old.overshoot, -old.score):
            candidates[build.identity] = new


def _extensions(state: State, probabilities: Mapping[str, float], bonus: float) -> list[State]:
    """Return the state extended by each token that adds information, most probable first, and the state itself."""
    extended = []
    for token, p in sorted(probabilities.items(), key=lambda item: -item[1]):
        ability = read_token(token)
        if ability is not None and _says_more(token, state.tokens):
            priority = {**state.priority, ability.family: max(state.priority.get(ability.family, 0.0), p)}
            extended.append(State(tuple(_add(state.tokens, token)), state.score + p + bonus, priority))
    return [*extended, state]


def _says_more(token: str, tokens: Sequence[str]) -> bool:
    """Return True if `token` adds information: a new family, or a higher tier than the lowest one present."""
    ability = read_token(token)
    tiers = [have.min_ap for have in map(read_token, tokens) if have and have.family == ability.family]
    return not tiers or (not ability.main_only and ability.min_ap > min(tiers))


def _add(tokens: Sequence[str], token: str) -> list[str]:
    """Return the tokens with `token` added and lower tiers of its family removed."""
    ability = read_token(token)
    keep = [t for t in tokens if ability.main_only or _keeps(read_token(t), ability)]
    return [*keep, token] if token not in keep else keep


def _keeps(have, ability) -> bool:
    return have.family != ability.family or have.min_ap >= ability.min_ap
