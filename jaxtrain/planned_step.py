"""Compile a run's training step for devices that are not here, and read what it costs."""

from typing import Any

from jaxtrain.errors import UserError


def make_plan(
    config_file: str, overrides: list[str], target: str, devices: list, fit: bool = True, card: Any = None
) -> dict:
    """Compile the step for these devices and return its costs. Bytes are per device. card: the GPU to predict the
    step's time for (runtime.kernel_cost.Card)."""
    from jaxtrain import config_io
    from jaxtrain.runtime import topology, tpu_topology

    of_tpu = target in tpu_topology.TPUS
    budget = (tpu_topology if of_tpu else topology).memory_bytes(target)
    task, config = config_io.load(config_file, overrides)
    if not of_tpu:
        topology.check_products(target, config.precision.policy)
    elif config.precision.policy == "fp8":
        raise UserError(f"--target {target}: has no fp8 products; precision.policy=bf16 has")
    plan = compile_step(task, config, devices, card=card)
    plan |= {"batch_size": config.data.batch_size, "card_bytes": budget, "fits": plan["peak_bytes"] <= budget}
    if fit:
        plan["largest_batch"] = {}
        for remat in dict.fromkeys((config.train.remat, "none", "full")):
            found = _largest_batch(task, config, devices, budget, remat)
            if found is not None:
                plan["largest_batch"][f"remat {remat}"] = found
    return plan


def compile_step(task, config, devices, data=None, card: Any = None, keep: list | None = None) -> dict:
    """Plan one step on these devices. data: used instead of the task's example or first sample. card: the GPU to
    predict the step's time for, or several of one architecture, by name. keep: a list to which the compiled program is
    appended."""
    from jaxtrain.runtime import topology, tpu_topology
    from jaxtrain.runtime.collectives import collectives, summary
    from jaxtrain.train.trainer import Trainer

    if data is None and task.example is not None:
        short = {"placement": "host", "drop_last": False}  # an example may have fewer samples than a batch
        config = config.model_copy(update={"data": config.data.model_copy(update=short)})
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
    if isinstance(card, tpu_topology.Tpu) and (foreign := tpu_topology.foreign_calls(text)):
        raise UserError(f"--target: this step calls {foreign[0]}, which a TPU does not have")
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
        **({} if card is None else {"predicted": _predictions(trainer, traced, compiled, found, card)}),
    }


def _per_step(found: dict, steps: int) -> dict:
    return {kind: {name: value // steps for name, value in entry.items()} for kind, entry in found.items()}


def _predictions(trainer, traced, compiled, found, cards) -> dict:
    from jaxtrain.runtime import tpu_topology

    if isinstance(cards, tpu_topology.Tpu):
        return _predicted_on_tpu(trainer, traced, compiled, found, cards)
    text = compiled.as_text()
    if not isinstance(cards, dict):
        return _predicted(trainer, traced, text, found, cards)
    return {name: _predicted(trainer, traced, text, found, card) for name, card in cards.items()}


def _predicted_on_tpu(trainer, traced, compiled, found, tpu) -> dict:
    """Return milliseconds per optimizer step as XLA estimates them for the TPU, MFU and samples/s."""
    from jaxtrain.runtime import tpu_topology
    from jaxtrain.train.compilation import flops

    config, steps = trainer.config, trainer.config.train.steps_per_call
    sending_s = sum(collective.sent for collective in found) / tpu.link / steps
    compute_s = tpu_topology.step_seconds(compiled, tpu) / steps
    step_s = max(compute_s, sending_s)
    of_model = flops.model_flops(flops.count(traced.jaxpr.jaxpr), config.train.remat) / trainer.layout.mesh.size / steps
    return {
        "ms": step_s * 1e3,
        "compute_ms": compute_s * 1e3,
        "sending_ms": sending_s * 1e3,
        "mfu": of_model / step_s / tpu.half,
        "samples_per_s": config.data.batch_size / step_s,
        "words": tpu_topology.WORDS,
    }


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
