"""Step rate of H-JEPA with masked patches dropped against zeroed: `python -m benchmarks.drop_masked`.

The same compiled step, batches and weights; the two sides alternate, and the ratio is that of their medians.
"""

import statistics
import tempfile

from benchmarks import parser, save
from benchmarks.loop_overhead import Bare, make

SIDES = {"zeroed": "false", "dropped": "true"}


def main() -> None:
    p = parser(__doc__)
    p.add_argument("--config", default="configs/hjepa_digits.yaml")
    p.add_argument("--ratio", type=float, default=0.75, help="masked share of the patches (default 0.75)")
    p.add_argument("--steps", type=int, default=60)
    p.add_argument("--rounds", type=int, default=7)
    p.add_argument("overrides", nargs="*")
    arguments = p.parse_args()
    rates: dict[str, list[float]] = {name: [] for name in SIDES}
    with tempfile.TemporaryDirectory() as folder:
        common = [f"masking.ratio={arguments.ratio}", *arguments.overrides]
        sides = {
            name: Bare(make(arguments.config, f"{folder}/{name}", [f"model.drop_masked={drop}", *common]))
            for name, drop in SIDES.items()
        }
        for _ in range(arguments.rounds):
            for name, side in sides.items():
                rates[name].append(side.steps_per_s(arguments.steps))
    for name, values in rates.items():
        spread = f"{min(values):.2f} to {max(values):.2f}"
        print(f"{name}: {statistics.median(values):.2f} steps/s (median of {len(values)}, {spread})")
    ratio = statistics.median(rates["dropped"]) / statistics.median(rates["zeroed"])
    print(f"dropped / zeroed at {arguments.ratio:.0%} masking: {ratio:.2f}")
    save({**rates, "ratio": ratio}, arguments.json)


if __name__ == "__main__":
    main()
