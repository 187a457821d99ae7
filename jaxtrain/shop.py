"""Compare kinds of GPU and strategies for a config: time, memory and price of an epoch (`jaxtrain.plan --shop`)."""

import argparse
import json
from collections.abc import Mapping
from typing import Any

from jaxtrain import commands, planned_step
from jaxtrain.errors import UserError
from jaxtrain.runtime.gpu_cards import GPUS
from torch_bridge.atomic_file import write_text

STRATEGIES = ("ddp", "fsdp")


def run(arguments: argparse.Namespace) -> int:
    """Print the table; return the exit code, 1 if nothing fits."""
    from jaxtrain import config_io
    from jaxtrain.runtime import topology

    prices = {} if arguments.prices is None else read_prices(arguments.prices)
    wanted = arguments.targets.split(",") if arguments.targets else list(prices or GPUS)
    for name in wanted:
        topology.gpu(name)
    topology.prepare()
    task, config = config_io.load(arguments.config, arguments.overrides)
    samples = arguments.samples
    if samples is None and prices:
        samples = _samples(task, config)
    rows = compare(task, config, wanted, arguments.devices, arguments.hosts, prices, samples)
    if arguments.json == "-":
        print(json.dumps(rows))
    else:
        print(describe(rows, arguments.devices))
        if arguments.json:
            write_text(arguments.json, json.dumps(rows, indent=1))
    return 0 if any(row["fits"] for row in rows) else commands.FAILED


def read_prices(path: str) -> dict[str, float]:
    """Read a price file: YAML, kind of GPU -> price of one for one hour, in any currency. Raises UserError for unknown
    kinds and for what is no price."""
    import pathlib

    from jaxtrain import config_io

    prices = config_io.read(pathlib.Path(path))
    if unknown := [name for name in prices if name not in GPUS]:
        raise UserError(f"{path}: {unknown[0]} is unknown; known here: {', '.join(GPUS)}")
    for name, price in prices.items():
        if isinstance(price, bool) or not isinstance(price, int | float) or price <= 0:
            raise UserError(f"{path}: {name}: {price!r}, wanted the price of one GPU for one hour, as 2.5")
    if not prices:
        raise UserError(f"{path}: no price; wanted lines as h100: 2.5")
    return {name: float(price) for name, price in prices.items()}


def _samples(task: Any, config: Any) -> int:
    """Return the number of training samples. Raises UserError if only the data know, and they are not here."""
    try:
        source = task.build_data(config, "train")
        return len(source)
    except (UserError, OSError, TypeError) as error:
        raise UserError(
            f"--samples: wanted for prices of an epoch; the training data are not read here ({error})"
        ) from None


def compare(
    task: Any,
    config: Any,
    targets: list[str],
    devices: int,
    hosts: int | None = None,
    prices: Mapping[str, float] | None = None,
    samples: int | None = None,
) -> list[dict]:
    """Return a row for every kind of GPU and strategy, the cheapest that fits first (without prices, the fastest).

    Each architecture is compiled for once per strategy; its kinds share the program and differ in peaks and memory.
    A row: target, strategy, ms of a step, peak_bytes, card_bytes, fits, samples_per_s, and per epoch hours and price
    (None without samples or a price); measured: whether predictions for this GPU were ever compared with it; note: why
    there is no figure.
    """
    from jaxtrain.nn import fused_attention
    from jaxtrain.runtime import topology

    rows: list[dict] = []
    kinds: dict[tuple, list[str]] = {}
    for target in targets:
        try:
            topology.check_products(target, config.precision.policy)
        except UserError as error:
            rows.append({"target": target, "strategy": "-", "fits": False, "note": str(error).partition(": ")[2]})
            continue
        kinds.setdefault((GPUS[target].capability, topology.machines(target, devices, hosts)), []).append(target)
    for (capability, machines), names in kinds.items():
        for strategy in STRATEGIES if devices > 1 else STRATEGIES[:1]:
            shard = config.shard.model_copy(update={"strategy": strategy})
            cards = {name: topology.card(name, machines) for name in names}
            try:
                with fused_attention.planned_for(capability):
                    described = topology.devices(names[0], devices, machines)
                    own = config.model_copy(update={"shard": shard})
                    plan = planned_step.compile_step(task, own, described, card=cards)
            except UserError as error:
                rows += [{"target": n, "strategy": strategy, "fits": False, "note": str(error)} for n in names]
                continue
            rows += [_row(name, strategy, plan, devices, prices or {}, samples) for name in names]
    order = lambda row: (not row["fits"], row.get("price") is None, row.get("price") or 0, row.get("ms", float("inf")))
    return sorted(rows, key=order)


def _row(name: str, strategy: str, plan: dict, devices: int, prices: Mapping[str, float], samples: int | None) -> dict:
    from jaxtrain.runtime import topology

    found, budget = plan["predicted"][name], topology.memory_bytes(name)
    hours = None if samples is None else samples / found["samples_per_s"] / 3600
    price = None if hours is None or name not in prices else hours * devices * prices[name]
    return {
        "target": name,
        "strategy": strategy,
        "ms": found["ms"],
        "peak_bytes": plan["peak_bytes"],
        "card_bytes": budget,
        "fits": plan["peak_bytes"] <= budget,
        "samples_per_s": found["samples_per_s"],
        "hours": hours,
        "price": price,
        "measured": GPUS[name].measured,
        "limits": GPUS[name].limits,
        "note": "",
    }


def describe(rows: list[dict], devices: int) -> str:
    """Return the rows as a table to print."""
    gib = lambda size: f"{size / 2**30:.2f}"
    head = [
        "GPU",
        "strategy",
        "ms/step",
        "GiB of",
        "",
        "fits",
        "samples/s",
        "h/epoch",
        "price/epoch",
        "measured",
        "has",
    ]
    lines = [head]
    for row in rows:
        if "ms" not in row:
            lines.append([row["target"], row["strategy"], *[""] * 3, "no", *[""] * 4, row["note"]])
            continue
        number = lambda value, form: "-" if value is None else format(value, form)
        lines.append(
            [row["target"], row["strategy"], f"{row['ms']:.2f}", gib(row["peak_bytes"]), gib(row["card_bytes"]),
             "yes" if row["fits"] else "no", f"{row['samples_per_s']:,.0f}", number(row["hours"], ".3g"),
             number(row["price"], ",.2f"), "yes" if row["measured"] else "no", row["limits"]]
        )  # fmt: skip
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    table = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    return "\n".join([f"{devices} devices of each kind; figures are predicted, not run:", *table])
