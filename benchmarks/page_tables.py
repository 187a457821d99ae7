"""Tables of results that stand on pages of their subject: for `python -m benchmarks.page`."""

import json
import pathlib
from collections.abc import Iterable, Sequence

RESULTS = pathlib.Path(__file__).parent / "results"


def tables() -> dict[str, str]:
    """Each table by the name that its page's comments give it."""
    return {"chunked_loss": _chunked_loss(), "decoder": _decoder(), "sherlock": _sherlock()}


def _with_source(lines: list[str], pattern: str) -> str:
    """A table and the files that it was read from."""
    paths = sorted(RESULTS.glob(f"{_day(pattern)}{pattern}"))
    return "\n".join(
        [*lines, "From " + ", ".join(f"`benchmarks/results/{path.relative_to(RESULTS)}`" for path in paths) + "."]
    )


def _day(pattern: str) -> str:
    """The day of the newest results of a kind."""
    return max(str(path.relative_to(RESULTS))[:10] for path in RESULTS.glob(f"*{pattern}"))


def table(heads: str, rows: Iterable[Sequence[str]]) -> list[str]:
    """A table in Markdown and an empty line. heads: separated by |."""
    names = heads.split("|")
    lines = [f"| {' | '.join(name.strip() for name in names)} |", "|---" * len(names) + "|"]
    return [*lines, *(f"| {' | '.join(row)} |" for row in rows), ""]


def _newest(pattern: str) -> list[dict]:
    """The newest results of a kind: all files of one day."""
    return [json.loads(path.read_text()) for path in sorted(RESULTS.glob(f"{_day(pattern)}{pattern}"))]


def _chunked_loss() -> str:
    pattern = "_chunked_loss.json"
    found = _newest(pattern)
    rows, heads = [], ""
    for result in found:
        shown = result["head trained"]
        heads = " | ".join(f"MB as {count} tokens" for count in shown["chunked_mb"])
        size = f"{result['tokens']:,} tokens, {result['vocabulary']:,} entries, {result['width']:,} wide"
        chunks = (f"{size:,.0f}" for size in shown["chunked_mb"].values())
        largest = f"{max(result['gradient_difference'].values()):.0e}"
        rows.append((size, f"{shown['plain_mb']:,.0f}", *chunks, largest))
    return _with_source(table(f"size | MB, plain | {heads} | gradients differ by", rows), pattern)


def _decoder() -> str:
    pattern = "_plans/decoder_*.json"
    found = _newest(pattern)
    rows = []
    for plan in sorted(found, key=lambda plan: plan["devices"]):
        gathered, scattered = (_sent(plan, kind) for kind in ("all-gather", "reduce-scatter"))
        other = "none" if "all-to-all" not in plan["collectives"] else _sent(plan, "all-to-all")
        rows.append((str(plan["devices"]), _bytes(plan["state_bytes"]), gathered, scattered, other))
    heads = "H200s | state per device | all-gather per step (ceiling: twice every weight)"
    return _with_source(table(f"{heads} | reduce-scatter (minimum) | all-to-all", rows), pattern)


def _sherlock() -> str:
    pattern = "_plans/sherlock_*.json"
    found = _newest(pattern)
    rows = []
    for plan in sorted(found, key=lambda plan: plan["devices"]):
        devices = f"{plan['devices']} x {plan['target']}, {plan['strategy']}"
        sizes = (_bytes(plan[f"{name}_bytes"]) for name in ("state", "temporary", "peak", "card"))
        rows.append((devices, *sizes))
    return _with_source(table("devices | state | temporaries | peak | of", rows), pattern)


def _sent(plan: dict, kind: str) -> str:
    sent, least = plan["collectives"].get(kind, {"bytes": 0})["bytes"], plan["minimum_bytes"].get(kind, 0)
    return f"{_bytes(sent)} ({_bytes(least)})"


def _bytes(count: float) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 1 << 28 else f"{count / 2**20:.2f} MiB"
