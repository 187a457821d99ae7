"""Turn raw match records into tagged builds: compute ability points, keep legal builds, write them as tokens."""

from collections.abc import Mapping, Sequence

from jaxtrain.systems.set_completion.vocabulary import MAIN_ONLY, STANDARD, TOTAL_AP, tokenize_build


def ability_points(abilities: Mapping[str, float]) -> dict[str, int]:
    """Convert values in units of 10 points (1.9) to whole points (19); leaves out abilities without points.

    The original truncates 10 * value; the small slack added here keeps rounding errors (as in 0.29 * 100) from losing a
    point.
    """
    return {name: int(10 * value + 1e-6) for name, value in abilities.items() if value}


def process_abilities(
    abilities: Sequence[Mapping[str, float]], weapon_ids: Sequence[str], original: bool = False
) -> tuple[list[int], list[str]]:
    """Return the positions of the builds that sum to 57 points, and their tag strings, like "comeback
    swim_speed_up_3 weapon_id_40".

    original: if some ability is in no record, also keep builds with another sum, without tokens, as the original does.
    """
    names = set().union(*(record.keys() for record in abilities)) if abilities else set()
    complete = names >= {*MAIN_ONLY, *STANDARD}
    main, tags = [], []
    for i, (record, weapon) in enumerate(zip(abilities, weapon_ids, strict=True)):
        points = ability_points(record)
        legal = sum(points.values()) == TOTAL_AP
        if legal or (original and not complete):
            main.append(i)
            tags.append(" ".join([" ".join(tokenize_build(points)) if legal else "", f"weapon_id_{weapon}"]))
    return main, tags
