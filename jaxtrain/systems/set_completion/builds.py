"""Legal builds (three mains of 10 points, nine subs of 3 points), and the search for one that reaches given tokens."""

import dataclasses
import itertools
from collections.abc import Iterable, Mapping

from jaxtrain.systems.set_completion.vocabulary import (
    MAIN_AP,
    MAIN_ONLY,
    NULL,
    PAD,
    SLOT_OF,
    SLOTS,
    SUB_AP,
    SUB_SLOTS,
    TOTAL_AP,
    thresholds_up_to,
)


@dataclasses.dataclass(frozen=True)
class AbilityToken:
    """Ability token: at least `min_ap` points of `family`. main_only: an ability of main slots, by its bare name."""

    name: str
    family: str
    min_ap: int
    main_only: bool

    @classmethod
    def from_vocab_entry(cls, token: str) -> "AbilityToken":
        """Read a token's name. Raises ValueError for <PAD> and <NULL>, and for a name without points."""
        if token in (PAD, NULL):
            raise ValueError(f"{token} asks for no ability")
        if token in MAIN_ONLY:
            return cls(token, token, MAIN_AP, True)
        family, _, points = token.rpartition("_")
        if not family or not points.isdigit():
            raise ValueError(f"{token!r} is no ability token: wanted a main-only ability, or a family and its points")
        return cls(token, family, int(points), False)


def read_token(token: str | AbilityToken) -> AbilityToken | None:
    """Return the meaning of a token, itself if it is an AbilityToken; None for <PAD> and <NULL>."""
    if isinstance(token, AbilityToken):
        return token
    return None if token in (PAD, NULL) else AbilityToken.from_vocab_entry(token)


@dataclasses.dataclass(eq=False)
class Build:
    """A build. mains: family or None for each of head, clothes and shoes. subs: number of subs by family.

    total_ap: computed from them, whatever is passed. Raises ValueError for other slots, a main-only ability on another
    slot or among the subs, more than 9 subs, or more than 57 points. Builds that differ only in the slots of standard
    mains are equal and have the same hash.
    """

    mains: Mapping[str, str | None]
    subs: Mapping[str, int]
    total_ap: int = 0

    def __post_init__(self) -> None:
        if set(self.mains) != set(SLOTS):
            raise ValueError(
                f"mains: got the slots {sorted(self.mains)}, wanted {sorted(SLOTS)}; None for an empty one"
            )
        for slot, main in self.mains.items():
            if SLOT_OF.get(main, slot) != slot:
                raise ValueError(f"mains[{slot!r}]: {main} belongs to {SLOT_OF[main]}")
        wrong = [family for family in self.subs if family in SLOT_OF]
        if wrong:
            raise ValueError(f"subs: {', '.join(wrong)} only fit main slots")
        negative = [family for family, count in self.subs.items() if count < 0]
        if negative:
            raise ValueError(f"subs: {', '.join(negative)}: a count is negative")
        count = sum(self.subs.values())
        if count > SUB_SLOTS:
            raise ValueError(f"subs: {count} of them, wanted at most {SUB_SLOTS}")
        self.total_ap = MAIN_AP * sum(main is not None for main in self.mains.values()) + SUB_AP * count
        if self.total_ap > TOTAL_AP:
            raise ValueError(f"a build has at most {TOTAL_AP} ability points, got {self.total_ap}")

    @property
    def achieved_ap(self) -> dict[str, int]:
        """Return the ability points by family."""
        points: dict[str, int] = {}
        for slot in ("head", "clothes", "shoes"):
            main = self.mains.get(slot)
            if main is not None:
                points[main] = points.get(main, 0) + MAIN_AP
        for family, count in self.subs.items():
            points[family] = points.get(family, 0) + SUB_AP * count
        return points

    def to_dict(self) -> dict:
        """Return {"mains", "subs", "total_ap"} of plain values, for JSON."""
        return {"mains": dict(self.mains), "subs": dict(self.subs), "total_ap": self.total_ap}

    @property
    def identity(self) -> tuple:
        """Return a key that is equal for builds that differ only in the slots of standard mains."""
        placed = tuple(sorted((slot, main) for slot, main in self.mains.items() if main in SLOT_OF))
        mains = tuple(sorted(main for main in self.mains.values() if main))
        return placed, mains, tuple(sorted(self.subs.items()))

    def __eq__(self, other: object) -> bool:
        return self.identity == other.identity if isinstance(other, Build) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.identity)


def allocate(
    tokens: Iterable[str | AbilityToken], priority: Mapping[str, float] | None = None
) -> tuple[Build, int] | tuple[None, None]:
    """Return the cheapest legal build that reaches every token, and its overshoot in points; else (None, None).

    tokens: names, or AbilityTokens, whose fields count.

    priority: family -> preference for a main slot. All ways to give 0 to 3 free mains to each standard family are
    ranked by fewest subs, then least overshoot, then largest priority on mains, then fewest points. Among equals the
    first one found wins, with families by descending (points, priority) and slots in alphabetical order.
    """
    priority = priority or {}
    mains: dict[str, str | None] = dict.fromkeys(("head", "clothes", "shoes"))
    tiers: dict[str, int] = {}
    for ability in filter(None, map(read_token, tokens)):
        if not ability.main_only:
            tiers[ability.family] = max(tiers.get(ability.family, 0), ability.min_ap)
        elif mains[SLOT_OF[ability.family]] not in (None, ability.family):
            return None, None
        else:
            mains[SLOT_OF[ability.family]] = ability.family
    families = sorted(tiers, key=lambda family: (-tiers[family], -priority.get(family, 0)))
    free = [slot for slot in SLOTS if mains[slot] is None]
    weight = {family: priority.get(family, tiers[family]) for family in families}

    best: tuple[tuple, dict, dict] | None = None
    for placed, subs in _placements(families, tiers, free, {}, {}):
        overshoot = sum(
            MAIN_AP * _count(placed, family) + SUB_AP * subs.get(family, 0) - tiers[family] for family in families
        )
        points = MAIN_AP * (len(placed) + 3 - len(free)) + SUB_AP * sum(subs.values())
        cost = (sum(subs.values()), overshoot, -sum(weight[family] for family in placed.values()), points)
        if best is None or cost < best[0]:
            best = cost, placed, subs
    if best is None:
        return None, None
    return Build({**mains, **best[1]}, best[2]), best[0][1]


def _count(placed: Mapping[str, str], family: str) -> int:
    return sum(main == family for main in placed.values())


def _placements(families, tiers, free, placed, subs):
    """Yield every way to cover the families with at most nine subs: (slot -> family, family -> subs)."""
    if not families:
        yield placed, subs
        return
    family, rest = families[0], families[1:]
    open_slots = [slot for slot in free if slot not in placed]
    for count in range(len(open_slots) + 1):
        needed = -(-max(0, tiers[family] - MAIN_AP * count) // SUB_AP)
        if sum(subs.values()) + needed > SUB_SLOTS:
            continue
        covered = {**subs, family: needed} if needed else subs
        for slots in itertools.combinations(open_slots, count):
            yield from _placements(rest, tiers, free, {**placed, **dict.fromkeys(slots, family)}, covered)


def expand(tokens: Iterable[str | AbilityToken]) -> list[str]:
    """Return the model's input tokens: each tier with all tiers below it; [<NULL>] for an empty build.

    A tier that is given twice appears twice, as in the original.
    """
    context = []
    for ability in filter(None, map(read_token, tokens)):
        context += [ability.name] if ability.main_only else thresholds_up_to(ability.family, ability.min_ap)
    return context or [NULL]
