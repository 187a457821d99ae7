"""Predict memory and communication on GPUs: `python -m jaxtrain.plan --config F --devices 64 --target h200`."""

import argparse
import json

from jaxtrain import commands, planned_step, shop
from jaxtrain.errors import UserError
from jaxtrain.runtime.gpu_cards import GPUS
from torch_bridge.atomic_file import write_text

TARGETS = (*GPUS, "v5e", "v5p", "v6e")


def main(argv: commands.Arguments = None) -> int:
    p = commands.parser(
        "plan",
        "Compile the real training step for N GPUs with none present; print bytes and collectives per device.",
        "python -m jaxtrain.plan --config configs/memory_lm_paper.yaml --devices 64 --target h200 shard.strategy=fsdp",
    )
    p.add_argument("--config", required=True, metavar="F", help="YAML config")
    p.add_argument(
        "--devices", type=commands.count(1, 1_000_000), required=True, metavar="N", help="total number of devices"
    )
    p.add_argument(
        "--hosts",
        type=commands.count(1, 1_000_000),
        metavar="H",
        help="number of machines (default: 8 GPUs per machine)",
    )
    p.add_argument("--target", default="h200", help=f"{', '.join(TARGETS)} (default h200)")
    p.add_argument("--predict", action="store_true", help="also print the step's milliseconds and dearest kernels")
    p.add_argument("--price", type=float, metavar="P", help="of one GPU for one hour: print what samples cost, too")
    p.add_argument("--shop", action="store_true", help="compare kinds of GPU and strategies: time, memory, price")
    p.add_argument("--prices", metavar="F", help="with --shop: YAML, kind of GPU -> price of one for one hour")
    p.add_argument("--targets", metavar="A,B", help="with --shop: kinds to compare (default: the price file's)")
    p.add_argument("--samples", type=commands.count(1, 10**15), metavar="N", help="with --shop: samples of an epoch")
    p.add_argument("--no-fit", action="store_true", help="skip the search for the largest batch that fits")
    p.add_argument("--json", metavar="F", help="also write the plan as JSON; -: print only the JSON")
    p.add_argument("overrides", nargs="*", metavar="a.b=c", help="settings that override the file")
    return commands.main(run, p.parse_intermixed_args(argv))


def run(arguments: argparse.Namespace) -> int:
    from jaxtrain.nn import fused_attention
    from jaxtrain.runtime import topology, tpu_topology

    if arguments.shop:
        return shop.run(arguments)
    if unused := [name for name in ("prices", "targets", "samples") if getattr(arguments, name) is not None]:
        raise UserError(f"--{unused[0]}: belongs to --shop")
    if arguments.target not in TARGETS:
        raise UserError(f"--target {arguments.target}: unknown; known here: {', '.join(TARGETS)}")
    counts = arguments.devices, arguments.hosts
    predicts = bool(arguments.predict or arguments.price)
    of, fit = (arguments.config, arguments.overrides, arguments.target), not arguments.no_fit
    if arguments.target in tpu_topology.TPUS:
        if arguments.hosts is not None:
            raise UserError("--hosts: a TPU's slice has the hosts of its chips; leave it out")
        tpu_topology.prepare()
        devices = tpu_topology.devices(arguments.target, arguments.devices)
        plan = planned_step.make_plan(*of, devices, fit, tpu_topology.TPUS[arguments.target] if predicts else None)
        measured = False
    else:
        gpu = topology.gpu(arguments.target)
        topology.prepare()
        devices = topology.devices(arguments.target, arguments.devices, arguments.hosts)
        card = topology.card(arguments.target, topology.machines(arguments.target, *counts)) if predicts else None
        with fused_attention.planned_for(gpu.capability):
            plan = planned_step.make_plan(*of, devices, fit, card)
        measured = gpu.measured
    plan = {"target": arguments.target, "measured": measured, "devices": arguments.devices, **plan}
    if arguments.price:
        plan["predicted"] |= planned_step.cost(plan, arguments.price)
    if arguments.json == "-":
        print(json.dumps(plan))
    else:
        print(describe(plan))
        if arguments.json:
            write_text(arguments.json, json.dumps(plan, indent=1))
    return 0 if plan["fits"] else commands.FAILED


def describe(plan: dict) -> str:
    """Return the plan as lines to print."""
    size = lambda n: f"{n / (1 << 30):8.2f} GiB" if n >= 1 << 28 else f"{n / (1 << 20):8.2f} MiB"
    lines = [
        f"{plan['parameters']:,} parameters ({plan['frozen_parameters']:,} frozen) on {plan['devices']} x "
        f"{plan['target']} ({plan['strategy']}), batch {plan['batch_size']}; per device:",
        f"  parameters       {size(plan['parameter_bytes'])}",
        f"  optimizer        {size(plan['optimizer_bytes'])}",
        f"  state in all     {size(plan['state_bytes'])}",
        f"  temporaries      {size(plan['temporary_bytes'])}",
        f"  peak             {size(plan['peak_bytes'])}  of {size(plan['card_bytes']).strip()}: "
        + ("fits" if plan["fits"] else "DOES NOT FIT"),
        "  sent per step:",
    ]
    kinds = {**dict.fromkeys(plan["minimum_bytes"]), **dict.fromkeys(plan["collectives"])}
    for kind in kinds:
        got = plan["collectives"].get(kind, {"count": 0, "bytes": 0})
        least = plan["minimum_bytes"].get(kind, 0)
        lines.append(f"    {kind:18} {size(got['bytes'])} in {got['count']:4} (minimum {size(least).strip()})")
    if not plan["collectives"]:
        lines.append("    nothing")
    lines += _describe_prediction(plan["predicted"], plan["measured"]) if "predicted" in plan else []
    for how, found in plan.get("largest_batch", {}).items():
        lines.append(
            f"  largest batch with {how}: {found['samples']:,} ({size(found['bytes_per_sample']).strip()} each)"
        )
    if not plan["fits"]:
        lines.append(
            "  try shard.strategy=fsdp, train.remat=full, train.accumulate_steps, or a smaller data.batch_size"
        )
    return "\n".join(lines)


def _describe_prediction(found: dict, measured: bool) -> list[str]:
    good = found.get("words") or ("good to a quarter" if measured else "from data sheets, never run on one")
    kernels = f"{found['kernels']:,} kernels" if "kernels" in found else "computing"
    lines = [
        f"  predicted        {found['ms']:8.2f} ms a step ({good}): {kernels} "
        f"{found['compute_ms']:.2f} ms, sending {found['sending_ms']:.2f} ms beside them",
        f"                   {found['samples_per_s']:,.0f} samples/s, MFU {found['mfu']:.3f}",
    ]
    if "price" in found:
        lines.append(
            f"                   {found['per_million_samples']:,.2f} per million samples at {found['price']:g} an hour"
        )
    lines += ["  dearest kernels:"] if "dearest" in found else []
    for row in found.get("dearest", ()):
        place = f"{row['launches']:6g}x {row['kind']} {row['shape']}"
        lines.append(f"    {row['ms']:8.3f} ms {place}  {row['source']}")
    return lines


if __name__ == "__main__":
    commands.start(main)
