"""Split rows into training, validation and test."""

from collections.abc import Sequence

import numpy as np

from jaxtrain.errors import UserError

Split = dict[str, list[int]]
NAMES = ("train", "validation", "test")


def permutation(size: int, seed: int) -> list[int]:
    """Return torch.randperm(size) of a CPU generator with this seed, without torch: Fisher-Yates on 32-bit
    Mersenne-Twister numbers."""
    draw = np.random.MT19937()
    draw._legacy_seeding(seed & 0xFFFFFFFF)
    numbers = draw.random_raw(max(size - 1, 0)) if size > 1 else []
    order = list(range(size))
    for i, number in enumerate(numbers):
        j = i + int(number) % (size - i)
        order[i], order[j] = order[j], order[i]
    return order


def random_split(size: int, seed: int, ratios: Sequence[float] = (0.8, 0.1, 0.1)) -> Split:
    """Split rows at random as the original does: floors of the first two shares, the rest is test.

    Equals torch's random_split with a generator of that seed. Rows of one post may land in different splits.
    """
    order = permutation(size, seed)
    first = int(ratios[0] * size)
    second = first + int(ratios[1] * size)
    return dict(zip(NAMES, (order[:first], order[first:second], order[second:]), strict=True))


def group_split(groups: Sequence[str], seed: int = 42, ratios: Sequence[float] = (0.7, 0.15, 0.15)) -> Split:
    """Split rows so that all rows of a group (post) are in one split; the ratios count groups.

    Raises UserError if there are too few groups to fill every split.
    """
    unique = list(dict.fromkeys(groups))
    names = group_names_split(unique, seed, ratios)
    part_of = {group: name for name, members in names.items() for group in members}
    result: Split = {name: [] for name in NAMES}
    for row, group in enumerate(groups):
        result[part_of[group]].append(row)
    return result


def group_names_split(unique: Sequence[str], seed: int, ratios: Sequence[float]) -> dict[str, list[str]]:
    """Return the groups of each split, by two calls of scikit-learn's train_test_split.

    Raises UserError if there are too few groups.
    """
    from sklearn.model_selection import train_test_split

    held_out, test = ratios[1] + ratios[2], ratios[2]
    try:
        train, rest = train_test_split(list(unique), test_size=held_out, random_state=seed)
        validation, tested = (
            (rest, []) if not test else train_test_split(rest, test_size=test / held_out, random_state=seed)
        )
    except ValueError as error:
        raise UserError(f"cannot split {len(unique)} posts {list(ratios)}: {error}") from None
    return dict(zip(NAMES, (train, validation, tested), strict=True))


def check_disjoint(splits: dict[str, Sequence]) -> None:
    """Raise UserError if a post is in two splits."""
    names = list(splits)
    for i, first in enumerate(names):
        for second in names[i + 1 :]:
            shared = set(splits[first]) & set(splits[second])
            if shared:
                shown = ", ".join(map(str, sorted(shared)[:5]))
                raise UserError(f"Data leakage: {len(shared)} posts are in both {first} and {second} ({shown})")
