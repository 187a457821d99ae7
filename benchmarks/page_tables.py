"""Tables of results that stand on pages of their subject: for `python -m benchmarks.page`."""

import json
import pathlib
from collections.abc import Iterable, Sequence

RESULTS = pathlib.Path(__file__).parent / "results"


def tables() -> dict[str, str]:
    """Each table by the name that its page's comments give it."""
    return {"chunked_loss": _chunked_loss(), "decoder": _decoder(), "sherlock": _sherlock()}


def table(heads: str, rows: Iterable[Sequence[str]]) -> list[str]:
    """A table in Markdown and an empty line. heads: separated by |."""
    names = heads.split("|")
    lines = [f"| {' | '.join(name.strip() for name in names)} |", "|---" * len(names) + "|"]
    return [*lines, *(f"| {' | '.join(row)} |" for row in rows), ""]


def _newest(pattern: str) -> tuple[str, list[dict]]:
    """The day of the newest results of a kind, and what that day's files hold."""
    paths = sorted(RESULTS.glob(pattern))
    day = max(str(path.relative_to(RESULTS))[:10] for path in paths)
    return day, [json.loads(path.read_text()) for path in paths if str(path.relative_to(RESULTS)).startswith(day)]


def _chunked_loss() -> str:
    _, found = _newest("*_chunked_loss.json")
    rows, heads = [], ""
    for result in found:
        shown = result["head trained"]
        heads = " | ".join(f"MB as {count} tokens" for count in shown["chunked_mb"])
        size = f"{result['tokens']:,} tokens, {result['vocabulary']:,} entries, {result['width']:,} wide"
        chunks = (f"{size:,.0f}" for size in shown["chunked_mb"].values())
        largest = f"{max(result['gradient_difference'].values()):.0e}"
        rows.append((size, f"{shown['plain_mb']:,.0f}", *chunks, largest))
    return "\n".join(table(f"size | MB, plain | {heads} | gradients differ by", rows)[:-1])


def _decoder() -> str:
    _, found = _newest("*_plans/decoder_*.json")
    rows = []
    for plan in sorted(found, key=lambda plan: plan["devices"]):
        gathered, scattered = (_sent(plan, kind) for kind in ("all-gather", "reduce-scatter"))
        other = "none" if "all-to-all" not in plan["collectives"] else _sent(plan, "all-to-all")
        rows.append((str(plan["devices"]), _bytes(plan["state_bytes"]), gathered, scattered, other))
    heads = "H200s | state per device | all-gather per step (ceiling: twice every weight)"
    return "\n".join(table(f"{heads} | reduce-scatter (minimum) | all-to-all", rows)[:-1])


def _sherlock() -> str:
    _, found = _newest("*_plans/sherlock_*.json")
    rows = []
    for plan in sorted(found, key=lambda plan: plan["devices"]):
        devices = f"{plan['devices']} x {plan['target']}, {plan['strategy']}"
        sizes = (_bytes(plan[f"{name}_bytes"]) for name in ("state", "temporary", "peak", "card"))
        rows.append((devices, *sizes))
    return "\n".join(table("devices | state | temporaries | peak | of", rows)[:-1])


def _sent(plan: dict, kind: str) -> str:
    sent, least = plan["collectives"].get(kind, {"bytes": 0})["bytes"], plan["minimum_bytes"].get(kind, 0)
    return f"{_bytes(sent)} ({_bytes(least)})"


def _bytes(count: float) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 1 << 28 else f"{count / 2**20:.2f} MiB"
