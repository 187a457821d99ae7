"""Vocabulary of builds: gear slots, ability names, cumulative tokens, and the vocabulary files."""

import json
import pathlib
from collections.abc import Mapping, Sequence

from jaxtrain.errors import UserError

PAD, NULL, MASK = "<PAD>", "<NULL>", "<MASK>"
MAIN_AP, SUB_AP, TOTAL_AP, SUB_SLOTS = 10, 3, 57, 9
SLOTS = ("clothes", "head", "shoes")  # in the order in which the allocator fills them

HEAD_ONLY = ("comeback", "last_ditch_effort", "opening_gambit", "tenacity")
CLOTHES_ONLY = ("ability_doubler", "haunt", "ninja_squid", "respawn_punisher", "thermal_ink")
SHOES_ONLY = ("drop_roller", "object_shredder", "stealth_jump")
MAIN_ONLY = HEAD_ONLY + CLOTHES_ONLY + SHOES_ONLY
SLOT_OF = {
    **dict.fromkeys(HEAD_ONLY, "head"),
    **dict.fromkeys(CLOTHES_ONLY, "clothes"),
    **dict.fromkeys(SHOES_ONLY, "shoes"),
}
STANDARD = (
    "ink_recovery_up",
    "ink_resistance_up",
    "ink_saver_main",
    "ink_saver_sub",
    "intensify_action",
    "quick_respawn",
    "quick_super_jump",
    "run_speed_up",
    "special_charge_up",
    "special_power_up",
    "special_saver",
    "sub_power_up",
    "sub_resistance_up",
    "swim_speed_up",
)
THRESHOLDS = (3, 6, 12, 15, 21, 29, 38, 51, 57)  # ability points from which on a standard ability has the next token
TOKENS = MAIN_ONLY + tuple(f"{name}_{ap}" for name in STANDARD for ap in THRESHOLDS)


def default_vocabulary() -> dict[str, int]:
    """Return the published vocabulary of 140 tokens: 12 main-only, 126 standard, <NULL>, <PAD>."""
    return {token: i for i, token in enumerate((*TOKENS, NULL, PAD))}


def thresholds_up_to(family: str, ap: int) -> list[str]:
    """Return the tokens of `ap` points, which are cumulative: 13 of swim speed are swim_speed_up_3, _6 and _12."""
    return [f"{family}_{threshold}" for threshold in THRESHOLDS if threshold <= ap]


def tokenize_build(build: Mapping[str, int]) -> list[str]:
    """Return the tokens of a build {ability: points}; ["<NULL>"] for an empty build.

    A main-only ability gets its token for any number of points; unknown names are ignored. Raises ValueError for more
    than 57 points or a float value.
    """
    if not build:
        return [NULL]
    if any(isinstance(value, float) for value in build.values()):
        raise ValueError(f"a build's ability points are integers, got {dict(build)}")
    if sum(build.values()) > TOTAL_AP:
        raise ValueError(f"a build has at most {TOTAL_AP} ability points, got {sum(build.values())}")
    tokens = [name for name in MAIN_ONLY if name in build]
    return tokens + [token for name in STANDARD for token in thresholds_up_to(name, build.get(name, 0))]


def tokenize(
    ability_tags: Sequence[str],
    weapon_ids: Sequence[str],
    ability_to_id: Mapping[str, int] | None = None,
    weapon_to_id: Mapping[str, int] | None = None,
) -> tuple[list[list[int]], list[int], dict[str, int], dict[str, int]]:
    """Convert tag strings ("comeback swim_speed_up_3 weapon_id_40") to ids.

    Returns token ids per row, weapon ids and both vocabularies. A new ability takes the next free id; <PAD> is removed
    first and appended last, so extending a vocabulary moves <PAD> and reuses its id: do it only before training.
    """
    abilities = {token: i for token, i in (ability_to_id or {}).items() if token != PAD}
    weapons = {name.rsplit("_", 1)[-1]: i for name, i in (weapon_to_id or {}).items()}
    rows = []
    for tags in ability_tags:
        rows.append([abilities.setdefault(tag, len(abilities)) for tag in tags.split(" ")[:-1]])
    ids = [weapons.setdefault(str(weapon), len(weapons)) for weapon in weapon_ids]
    abilities[PAD] = len(abilities)
    return rows, ids, abilities, {f"weapon_id_{key}": i for key, i in weapons.items()}


def read_vocabulary(path: str | pathlib.Path, needs: Sequence[str] = ()) -> dict[str, int]:
    """Read a JSON object token -> id with the ids 0 .. V-1.

    Raises UserError for a missing file, other content, or a missing token of `needs`.
    """
    path = pathlib.Path(path)
    if not path.is_file():
        raise UserError(
            f"{path}: no such vocabulary file; data.vocab_path and data.weapon_vocab_path name JSON objects"
        )
    vocabulary = json.loads(path.read_text())
    if not isinstance(vocabulary, dict) or sorted(vocabulary.values()) != list(range(len(vocabulary))):
        raise UserError(f"{path}: wanted a JSON object that numbers its tokens 0 .. V-1, each number once")
    absent = [token for token in needs if token not in vocabulary]
    if absent:
        raise UserError(f"{path}: lacks {', '.join(absent)}, which padding needs")
    return vocabulary
