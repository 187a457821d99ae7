"""The published sizes in timm and here with the same weights: `python -m tests.chaos.timm_vit_base [--names ...]`.

Largest relative difference of the features of two images, in float32, and whether this side's export loads strictly.
"""

import argparse
import sys

import numpy as np

LIMIT = 1e-5


def main(argv: list[str] | None = None) -> int:
    from tests.unit.hjepa.test_timm import both_features, pair
    from torch_bridge.datasets import to_torch
    from torch_bridge.state_dict import state_dict

    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--names", nargs="+", default=["vit_base_patch16_224"], metavar="NAME")
    worst = 0.0
    for name in p.parse_args(argv).names:
        theirs, ours = pair(name)
        got, wanted = both_features(theirs, ours, 224)
        difference = float(np.linalg.norm(got - wanted) / np.linalg.norm(wanted))
        theirs.load_state_dict({key: to_torch(value) for key, value in state_dict(ours).items()}, strict=True)
        worst = max(worst, difference)
        print(f"{name}: features differ by {difference:.1e}; the export loads strictly", flush=True)
    return 0 if worst < LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
