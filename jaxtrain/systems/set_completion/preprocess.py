"""From raw match records to tagged builds: points of each ability, the legal ones kept, written as tokens."""

from collections.abc import Mapping, Sequence

from jaxtrain.systems.set_completion.vocabulary import MAIN_ONLY, STANDARD, TOTAL_AP, tokenize_build


def ability_points(abilities: Mapping[str, float]) -> dict[str, int]:
    """Fractions of 10 points (1.9) to whole points (19), of the abilities that are there.

    The original truncates 10 * value; the tiny slack keeps 0.29 * 100-like products from losing a point.
    """
    return {name: int(10 * value + 1e-6) for name, value in abilities.items() if value}


def process_abilities(
    abilities: Sequence[Mapping[str, float]], weapon_ids: Sequence[str], original: bool = False
) -> tuple[list[int], list[str]]:
    """Tag strings ("comeback swim_speed_up_3 weapon_id_40") of the builds that sum to 57 points, and their positions.

    original: keep builds of another sum, without tokens, as soon as any ability is missing from every record.
    """
    names = set().union(*(record.keys() for record in abilities)) if abilities else set()
    complete = names >= {*MAIN_ONLY, *STANDARD}
    kept, tags = [], []
    for i, (record, weapon) in enumerate(zip(abilities, weapon_ids, strict=True)):
        points = ability_points(record)
        legal = sum(points.values()) == TOTAL_AP
        if legal or (original and not complete):
            kept.append(i)
            tags.append(" ".join([" ".join(tokenize_build(points)) if legal else "", f"weapon_id_{weapon}"]))
    return kept, tags
