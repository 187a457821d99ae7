"""How far two files of weights are apart: `python examples/continuation/distance.py A.pt B.pt`."""

import argparse

import numpy as np

from torch_bridge import files


def distance(first: str, second: str) -> float:
    """Relative L2 over all arrays together. Raises KeyError where the names differ."""
    ours, theirs = files.load(first), files.load(second)
    size = sum(float(np.square(value.astype(np.float64)).sum()) for value in theirs.values())
    difference = sum(float(np.square(ours.pop(key).astype(np.float64) - value).sum()) for key, value in theirs.items())
    if ours:
        raise KeyError(f"{second} lacks {', '.join(ours)}")
    return (difference / size) ** 0.5


if __name__ == "__main__":
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("first")
    p.add_argument("second")
    arguments = p.parse_args()
    print(f"{distance(arguments.first, arguments.second):.2g}")
