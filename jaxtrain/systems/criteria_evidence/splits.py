"""Which rows are for training, validation and test."""

from collections.abc import Sequence

import numpy as np

from jaxtrain.errors import UserError

Split = dict[str, list[int]]
NAMES = ("train", "validation", "test")


def permutation(size: int, seed: int) -> list[int]:
    """torch.randperm(size) of a CPU generator with this seed: Fisher-Yates on 32-bit Mersenne-Twister numbers."""
    draw = np.random.MT19937()
    draw._legacy_seeding(seed & 0xFFFFFFFF)
    numbers = draw.random_raw(max(size - 1, 0)) if size > 1 else []
    order = list(range(size))
    for i, number in enumerate(numbers):
        j = i + int(number) % (size - i)
        order[i], order[j] = order[j], order[i]
    return order


def random_split(size: int, seed: int, ratios: Sequence[float] = (0.8, 0.1, 0.1)) -> Split:
    """Rows at random, the original's way: floors of the first two shares, the rest is test. Equals torch's
    random_split with a generator of that seed. Rows of one post may land in different splits."""
    order = permutation(size, seed)
    first = int(ratios[0] * size)
    second = first + int(ratios[1] * size)
    return dict(zip(NAMES, (order[:first], order[first:second], order[second:]), strict=True))


def group_split(groups: Sequence[str], seed: int = 42, ratios: Sequence[float] = (0.7, 0.15, 0.15)) -> Split:
    """Rows such that all of one group (post) are in one split; ratios count groups.

    Raises UserError where there are too few groups to fill every split.
    """
    unique = list(dict.fromkeys(groups))
    names = group_names_split(unique, seed, ratios)
    place = {group: name for name, members in names.items() for group in members}
    result: Split = {name: [] for name in NAMES}
    for row, group in enumerate(groups):
        result[place[group]].append(row)
    return result


def group_names_split(unique: Sequence[str], seed: int, ratios: Sequence[float]) -> dict[str, list[str]]:
    """The groups of each split, as two of scikit-learn's train_test_split give them."""
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
    """Raises UserError where one post is in two splits."""
    names = list(splits)
    for i, first in enumerate(names):
        for second in names[i + 1 :]:
            shared = set(splits[first]) & set(splits[second])
            if shared:
                shown = ", ".join(map(str, sorted(shared)[:5]))
                raise UserError(f"Data leakage: {len(shared)} posts are in both {first} and {second} ({shown})")
