"""Predict memory and communication on GPUs: `python -m jaxtrain.plan --config F --devices 64 --target h200`."""

import argparse
import json
from typing import Any

from jaxtrain import commands
from jaxtrain.errors import UserError
from torch_bridge.atomic_file import write_text


def main(argv: commands.Arguments = None) -> int:
    p = commands.parser(
        "plan",
        "Compile the real training step for N GPUs with none present; print bytes and collectives per device.",
        "python -m jaxtrain.plan --config configs/memory_lm_paper.yaml --devices 64 --target h200 shard.strategy=fsdp",
    )
    p.add_argument("--config", required=True, metavar="F", help="YAML config")
    p.add_argument(
        "--devices", type=commands.count(1, 1_000_000), required=True, metavar="N", help="total number of GPUs"
    )
    p.add_argument(
        "--hosts",
        type=commands.count(1, 1_000_000),
        metavar="H",
        help="number of machines (default: 8 GPUs per machine)",
    )
    p.add_argument("--target", default="h200", help="h200, h100, a100, a6000 or l40s (default h200)")
    p.add_argument("--predict", action="store_true", help="also print the step's milliseconds and dearest kernels")
    p.add_argument("--price", type=float, metavar="P", help="of one GPU for one hour: print what samples cost, too")
    p.add_argument("--no-fit", action="store_true", help="skip the search for the largest batch that fits")
    p.add_argument("--json", metavar="F", help="also write the plan as JSON; -: print only the JSON")
    p.add_argument("overrides", nargs="*", metavar="a.b=c", help="settings that override the file")
    return commands.main(run, p.parse_intermixed_args(argv))


def run(arguments: argparse.Namespace) -> int:
    from jaxtrain.nn import fused_attention
    from jaxtrain.runtime import topology

    topology.prepare()
    devices = topology.devices(arguments.target, arguments.devices, arguments.hosts)
    budget = topology.memory_bytes(arguments.target)
    hosts = arguments.hosts or -(-arguments.devices // 8)
    card = topology.card(arguments.target, hosts) if arguments.predict or arguments.price else None
    with fused_attention.planned_for(topology.TARGETS[arguments.target][0]):
        plan = make_plan(arguments.config, arguments.overrides, devices, budget, not arguments.no_fit, card)
    plan = {"target": arguments.target, "devices": arguments.devices, **plan}
    if arguments.price:
        plan["predicted"] |= cost(plan, arguments.price)
    if arguments.json == "-":
        print(json.dumps(plan))
    else:
        print(describe(plan))
        if arguments.json:
            write_text(arguments.json, json.dumps(plan, indent=1))
    return 0 if plan["fits"] else commands.FAILED


def make_plan(
    config_file: str, overrides: list[str], devices: list, budget: int, fit: bool = True, card: Any = None
) -> dict:
    """Compile the step for these devices and return its costs. Bytes are per device. card: the GPU to predict the
    step's time for (runtime.kernel_cost.Card)."""
    from jaxtrain import config_io

    task, config = config_io.load(config_file, overrides)
    plan = compile_step(task, config, devices, card=card)
    plan |= {"batch_size": config.data.batch_size, "card_bytes": budget, "fits": plan["peak_bytes"] <= budget}
    if fit:
        plan["largest_batch"] = {}
        for remat in dict.fromkeys((config.train.remat, "none", "full")):
            found = _largest_batch(task, config, devices, budget, remat)
            if found is not None:
                plan["largest_batch"][f"remat {remat}"] = found
    return plan


def compile_step(task, config, devices, data=None, card=None, keep: list | None = None) -> dict:
    """Plan one step on these devices. data: used instead of the task's example or first sample. keep: a list to which
    the compiled program is appended."""
    from jaxtrain.runtime import topology
    from jaxtrain.runtime.collectives import collectives, summary
    from jaxtrain.train.trainer import Trainer

    if data is None and task.example is not None:
        config = config.model_copy(update={"data": config.data.model_copy(update={"placement": "host"})})
        data = task.example(config)
    trainer = Trainer(train_dataset=data, config=config, task=task, devices=devices, abstract=True)
    steps = config.train.steps_per_call
    arguments = trainer.program.abstract_arguments(steps)
    with topology.lowering_for(devices):
        traced = trainer.program.train_step(steps).jitted.trace(*arguments)
        compiled = traced.lower().compile()
    if keep is not None:
        keep.append(compiled)
    memory, text = compiled.memory_analysis(), compiled.as_text()
    found = collectives(text)
    state = memory.argument_size_in_bytes - _local_bytes(arguments[1:])
    parameters = _local_bytes((trainer.state.params, trainer.state.frozen))
    moments = _local_bytes(trainer.state.opt_state)
    peak = (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
        + memory.temp_size_in_bytes
    )
    return {
        "parameters": sum(p.size for p in trainer.state.params.values()),
        "frozen_parameters": sum(p.size for p in trainer.state.frozen.values()),
        "strategy": config.shard.strategy,
        "parameter_bytes": parameters,
        "optimizer_bytes": moments,
        "state_bytes": state,
        "temporary_bytes": memory.temp_size_in_bytes,
        "peak_bytes": peak,
        "collectives": _per_step(summary(found), steps),
        "minimum_bytes": minimum_traffic(trainer),
        **({} if card is None else {"predicted": _predicted(trainer, traced, text, found, card)}),
    }


def _per_step(found: dict, steps: int) -> dict:
    return {kind: {name: value // steps for name, value in entry.items()} for kind, entry in found.items()}


def _predicted(trainer, traced, text: str, found, card) -> dict:
    """Predict milliseconds per optimizer step, MFU (model FLOPs per second over the card's peak) and samples/s."""
    from jaxtrain.runtime.kernel_cost import predict
    from jaxtrain.train.compilation import flops

    devices, config = trainer.layout.mesh.size, trainer.config
    steps = config.train.steps_per_call
    step = predict(text, card, sum(collective.sent for collective in found), steps)
    model_flops = flops.model_flops(flops.count(traced.jaxpr.jaxpr), config.train.remat) / devices / steps
    peak = card.half if trainer.program.precision.compute.itemsize == 2 else card.single
    return {
        "ms": step.step_s * 1e3,
        "compute_ms": step.compute_s * 1e3,
        "sending_ms": step.sending_s * 1e3,
        "kernels": step.launches,
        "mfu": model_flops / step.step_s / peak,
        "samples_per_s": config.data.batch_size / step.step_s,
        "dearest": step.dearest,
    }


def cost(plan: dict, price: float) -> dict:
    """Compute the cost of a million samples at a price per GPU and hour."""
    hours = 1e6 / plan["predicted"]["samples_per_s"] / 3600
    return {"price": price, "per_million_samples": hours * plan["devices"] * price}


def minimum_traffic(trainer) -> dict[str, int]:
    """Return the least bytes that one device must send per optimizer step, by kind of collective.

    fsdp: every weight is gathered once forward and once backward in the compute dtype, its gradient scattered once.
    ddp: every gradient is reduced once, 2 (N - 1) / N of its bytes.
    """
    layout, micro_batches = trainer.layout, trainer.config.train.accumulate_steps
    compute = trainer.program.precision.compute.itemsize
    sizes = {
        key: value.size * (compute if value.ndim > 1 else value.dtype.itemsize)
        for key, value in {**trainer.state.params, **trainer.state.frozen}.items()
    }
    trained = {key: sizes[key] for key in trainer.state.params}
    shards = layout.shards
    if layout.gathers:
        split = {key for key, value in trainer.state.params.items() if layout.is_split(key, value.shape)}
        share = (shards - 1) / shards
        gathered = sum(size for key, size in sizes.items() if key in split or key in trainer.state.frozen)
        scattered = sum(size for key, size in trained.items() if key in split)
        return {
            "all-gather": round(2 * gathered * share * micro_batches),
            "reduce-scatter": round(scattered * share * micro_batches),
        }
    devices = layout.batch_devices * layout.mesh.shape["sequence"]
    return {"all-reduce": round(2 * sum(trained.values()) * (devices - 1) / devices)}


def _largest_batch(task, config, devices, budget: int, remat: str) -> dict | None:
    """Return the largest batch that fits, from two compilations that determine bytes = a + b x batch; None if the model
    marks no blocks to recompute."""
    sizes, peaks = [], []
    unit = len(devices) * config.train.accumulate_steps // (config.shard.tensor * config.shard.sequence)
    for factor in (1, 2):
        data = config.data.model_copy(update={"batch_size": unit * factor})
        train = config.train.model_copy(update={"remat": remat})
        try:
            plan = compile_step(task, config.model_copy(update={"data": data, "train": train}), devices)
        except UserError as error:
            if "remat" in str(error):
                return None
            raise
        sizes.append(unit * factor)
        peaks.append(plan["peak_bytes"])
    slope = max(1.0, (peaks[1] - peaks[0]) / (sizes[1] - sizes[0]))
    fixed = peaks[0] - slope * sizes[0]
    largest = int((budget - fixed) / slope) // unit * unit
    return {"samples": max(0, largest), "fixed_bytes": round(fixed), "bytes_per_sample": round(slope)}


def _local_bytes(tree) -> int:
    """Return the bytes of a tree of arrays on one device."""
    import math

    import jax

    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


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
    lines += _describe_prediction(plan["predicted"]) if "predicted" in plan else []
    for how, found in plan.get("largest_batch", {}).items():
        lines.append(
            f"  largest batch with {how}: {found['samples']:,} ({size(found['bytes_per_sample']).strip()} each)"
        )
    if not plan["fits"]:
        lines.append(
            "  try shard.strategy=fsdp, train.remat=full, train.accumulate_steps, or a smaller data.batch_size"
        )
    return "\n".join(lines)


def _describe_prediction(found: dict) -> list[str]:
    lines = [
        f"  predicted        {found['ms']:8.2f} ms a step (good to a quarter): {found['kernels']:,} kernels "
        f"{found['compute_ms']:.2f} ms, sending {found['sending_ms']:.2f} ms beside them",
        f"                   {found['samples_per_s']:,.0f} samples/s, MFU {found['mfu']:.3f}",
    ]
    if "price" in found:
        lines.append(
            f"                   {found['per_million_samples']:,.2f} per million samples at {found['price']:g} an hour"
        )
    lines.append("  dearest kernels:")
    for row in found["dearest"]:
        place = f"{row['launches']:6g}x {row['kind']} {row['shape']}"
        lines.append(f"    {row['ms']:8.3f} ms {place}  {row['source']}")
    return lines


if __name__ == "__main__":
    commands.start(main)
