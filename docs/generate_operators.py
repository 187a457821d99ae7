"""Write docs/operators.md, what of torch runs in JAX: `python docs/generate_operators.py`.

Operators come from the table of lowerings, figures from benchmarks/results/architectures.json
(`python -m benchmarks.architectures`).
"""

import json
import pathlib
import sys

from torch_bridge.lowering.operators import TABLE

PAGE = pathlib.Path(__file__).with_name("operators.md")
DATABASE = pathlib.Path(__file__).parents[1] / "benchmarks/results/operators.json"
FIGURES = pathlib.Path(__file__).parents[1] / "benchmarks/results/architectures.json"


def page() -> str:
    figures = json.loads(FIGURES.read_text())
    return "\n".join([*_models(figures), *_database(), *_operators(figures)])


def _models(figures: dict) -> list[str]:
    sources = sorted({model["source"] for model in figures.values()})
    worst = {what: max(model[what] for model in figures.values()) for what in ("outputs", "gradients")}
    lines = [
        "# What runs in JAX",
        "",
        "`python docs/generate_operators.py` writes this page.",
        "",
        "## Models",
        "",
        f"{len(figures)} small models with random weights, float32, on a CPU: relative L2 distance from torch "
        "(`python -m benchmarks.architectures`; `tests/e2e/test_from_torch_*.py` hold all of them to 1e-5 and 1e-4).",
        f'The worst output is {worst["outputs"]:.1e}, the worst gradient {worst["gradients"]:.1e}. "training" compares '
        "the training graph, with batch statistics.",
    ]
    for source in sources:
        lines += [
            "",
            f"### {source}",
            "",
            "| model | mode | outputs | gradients | operators |",
            "|---|---|---|---|---|",
        ]
        for name, model in figures.items():
            if model["source"] == source:
                mode = "training" if model["training"] else "evaluation"
                distances = f"{model['outputs']:.1e} | {model['gradients']:.1e}"
                lines.append(f"| {name} | {mode} | {distances} | {len(model['operators'])} |")
    return lines


def _database() -> list[str]:
    lines = [
        "",
        "## torch's own operator database",
        "",
        "`python -m benchmarks.operators` calls every operator of torch's OpInfo database in float32, the first three "
        "samples of each, values and gradients, with drawn numbers, zeros, and whole numbers from -1 to 2 (corners, "
        "ties, poles). On the same database and machine torchax has 616 equal and 13 wrong forward. "
        "`tests/unit/lowering/test_corners.py`, `test_further.py` and `test_special.py` hold single operators to it.",
        "",
        "Of equal elements torch's CPU kernels for `sort`, `argsort`, `topk` and `kthvalue` take some, by an order "
        "that hangs on the processor; here the first ones are taken, as torch's stable sort does. The gradient goes "
        "to those. `bernoulli` draws, and nobody says what `empty` leaves in memory: they are among the wrong ones.",
        "",
        "Integers are computed in 64 bits where 32 may not hold them (hashes of ids, products, long sums) and are "
        "refused by name where an operator has no such form. Such an output is an int64 array.",
    ]
    if not DATABASE.exists():
        return lines
    lines += ["", "| pass | equal | refused | wrong | crashed | wrong or crashed |", "|---|---|---|---|---|---|"]
    for name, found in json.loads(DATABASE.read_text()).items():
        counts = [sum(kind == wanted for kind in found.values()) for wanted in ("equal", "refused", "wrong", "crashed")]
        bad = ", ".join(f"`{operator}`" for operator, kind in found.items() if kind in ("wrong", "crashed"))
        lines.append(f"| {name} | {' | '.join(map(str, counts))} | {bad} |")
    return lines


def _operators(figures: dict) -> list[str]:
    used: dict[str, int] = {}
    for model in figures.values():
        for name in {_base(operator) for operator in model["operators"]}:
            used[name] = used.get(name, 0) + 1
    rooms: dict[str, dict[str, list[str]]] = {}
    for operator, lower in TABLE.items():
        room = rooms.setdefault(lower.__module__.rpartition(".")[2], {})
        room.setdefault(_base(operator), []).append(operator.rpartition(".")[2])
    bases = sum(map(len, rooms.values()))
    lines = [
        "",
        "## Operators",
        "",
        f"{len(TABLE)} overloads of {bases} operators have a lowering, each compared with torch over random shapes, "
        "dtypes and negative dimensions (`tests/unit/lowering/`). Others are taken apart by torch into these where it "
        "can. `torch_bridge.lowering.register` adds one. The number says how many of the models above use it.",
    ]
    for room in sorted(rooms):
        lines += ["", f"### {room}", "", "| operator | overloads | models |", "|---|---|---|"]
        for base, overloads in sorted(rooms[room].items()):
            shown = base.removeprefix("aten.")
            lines.append(f"| `{shown}` | {', '.join(sorted(overloads))} | {used.get(base, '')} |")
    return [*lines, ""]


def _base(operator: str) -> str:
    return operator.rpartition(".")[0]


if __name__ == "__main__":
    text = page()
    if "--check" in sys.argv:
        sys.exit(PAGE.read_text() != text)
    PAGE.write_text(text)
