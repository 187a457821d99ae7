"""The original's functions for decoding into legal builds; the search itself is in builds.py and reconstruct.py."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from jaxtrain.errors import UserError
from jaxtrain.systems.set_completion import builds, reconstruct
from jaxtrain.systems.set_completion.builds import Build
from jaxtrain.systems.set_completion.reconstruct import State

Predict = Callable[[list[str], str], Mapping[str, float]]


@dataclasses.dataclass(frozen=True)
class AbilityToken:
    """Ability token: at least `min_ap` points of a family. Missing fields are read from the token's name.

    Raises UserError, a ValueError, for <PAD> and <NULL>.
    """

    name: str
    family: str | None = None
    min_ap: int | None = None
    main_only: bool | None = None

    def __post_init__(self) -> None:
        found = builds.read_token(self.name)
        if found is None:
            raise UserError(f"{self.name} asks for no ability")
        for field in ("family", "min_ap", "main_only"):
            if getattr(self, field) is None:
                object.__setattr__(self, field, getattr(found, field))


def names_of(capstones: Iterable[str | AbilityToken]) -> list[str]:
    """Return the token names of capstones: names, AbilityTokens, or a mapping with such keys."""
    return [one.name if isinstance(one, AbilityToken) else one for one in capstones]


class Allocator:
    """Search for the cheapest legal build that reaches given capstones."""

    def allocate(
        self, capstones: Iterable[str | AbilityToken], priority: Mapping[str, float] | None = None
    ) -> tuple[Build, int] | tuple[None, None]:
        """Return (build, overshoot in points), or (None, None). priority: family -> preference for a main slot."""
        return builds.allocate(names_of(capstones), priority)


def expand_capstones_to_context(capstones: Iterable[str | AbilityToken]) -> list[str]:
    """Return the model's input tokens: each tier with all tiers below it; ["<NULL>"] for no capstone."""
    return builds.expand(names_of(capstones))


def greedy_closure(
    predict: Predict, weapon_id: str, context: Sequence[str], threshold: float = 0.5
) -> tuple[list[AbilityToken], float, dict[str, float]]:
    """Add all tokens with a probability of at least `threshold`, until none adds information.

    Returns (capstones, score, best probability by family). predict: (tokens, weapon_id) -> {token: probability} in the
    vocabulary's order.
    """
    found: State = reconstruct.greedy_closure(_one_by_one(predict, weapon_id), context, threshold)
    return [AbilityToken(name) for name in found.tokens], found.score, dict(found.priority)


def reconstruct_build(
    predict: Predict,
    weapon_id: str,
    context: Sequence[str],
    *,
    beam_size: int = 5,
    max_steps: int | None = 6,
    top_k: int = 1,
    threshold: float = 0.5,
    alpha: Any = None,
    min_new_token_prob: Any = None,
) -> list[Build]:
    """Return the best `top_k` legal builds that contain the context's tokens.

    The beam search starts from the context and its greedy closure. max_steps=None means 30. alpha, min_new_token_prob:
    not used, as in the original.
    """
    found = reconstruct.reconstruct(_one_by_one(predict, weapon_id), context, beam_size, max_steps, top_k, threshold)
    return [candidate.build for candidate in found]


def _one_by_one(predict: Predict, weapon_id: str) -> reconstruct.Predict:
    return lambda contexts: [predict(context, weapon_id) for context in contexts]
