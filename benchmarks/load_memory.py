"""Host memory that loading a checkpoint takes beyond the model itself: `python -m benchmarks.load_memory`.

A model of --layers float32 matrices is filled by `init_from`'s own code, NaN check included, from sharded safetensors
and from a .pt. Figure: the process's highest resident memory while it loads, less what it had before, when the
model's arrays were there already. Wanted: at most the largest tensor and 10 %. Linux, one CPU device, whose memory is
the host's.

"devices": a torch module on the meta device is loaded by `jaxtrain.compile(weights=...)` onto eight CPU devices under
fsdp, and runs a step. Figures: the same, less the bytes of the devices' arrays, which are host memory here; and the
process's highest memory in all, less these bytes. Wanted: at most 4 times the largest tensor while loading. 4 GB:
`--layers 60 --side 4096`.
"""

import argparse
import gc
import json
import os
import pathlib
import subprocess
import sys
import tempfile

import numpy as np

from benchmarks import parser, save
from jaxtrain.runtime import host_memory

ALLOWED = 1.1  # times the largest tensor
ALLOWED_ON_DEVICES = 4.0
DEVICES = 8


def write(folder: pathlib.Path, kind: str, layers: int, side: int) -> pathlib.Path:
    """A checkpoint of `layers` matrices [side, side] and a vector each."""
    from torch_bridge import files

    rng = np.random.default_rng(0)
    weight = rng.standard_normal((side, side), np.float32)
    state = {}
    for i in range(layers):
        state |= {f"layers.{i}.weight": weight, f"layers.{i}.bias": np.full(side, i, np.float32)}
    if kind == "pt":
        return files.save({key: value.copy() for key, value in state.items()}, folder / "model.pt")
    files.SHARD_BYTES = 2 * weight.nbytes + 8 * side
    return files.save_folder(state, {}, folder / "hf")


def measure(path: pathlib.Path, layers: int, side: int) -> dict[str, float]:
    """Loads in this process. MB of 10^6 bytes."""
    import jax
    from flax import nnx

    from jaxtrain import Loss, Task, Trainer, TrainingConfig, nn
    from jaxtrain.train.checkpoint import init_from
    from torch_bridge import files

    class Stack(nnx.Module):
        def __init__(self, rngs):
            self.layers = nnx.List([nn.Linear(side, side, rngs=rngs) for _ in range(layers)])

    config = TrainingConfig(
        run={"dir": str(path.parent / "run"), "quiet": True},
        data={"batch_size": 1},
        optim={"name": "sgd"},
        shard={"devices": 1},
    )
    task = Task(build_model=lambda config, rngs: Stack(rngs), loss=lambda model, batch, config, rngs: Loss(0.0, 1.0))
    trainer = Trainer(None, {"x": np.zeros(1)}, None, config, task=task)
    jax.block_until_ready(trainer.state.params)
    first = path.parent / f"first{path.suffix or '.safetensors'}"
    files.load(files.save({"x": np.zeros(2, np.float32)}, first))  # the code that reads is imported
    gc.collect()
    host_memory.give_back()  # what creating the model left behind
    _reset_peak()
    before = _status("VmRSS")
    init_from.apply(trainer.program, path)
    jax.block_until_ready(trainer.state.params)
    peak, after = _status("VmHWM"), _status("VmRSS")
    params = trainer.state.params
    largest = max(value.nbytes for value in params.values())
    assert float(params[f"layers.{layers - 1}.bias"][0]) == layers - 1
    extra = peak - before
    sizes = {
        "model": sum(v.nbytes for v in params.values()),
        "largest": largest,
        "extra": extra,
        "left": after - before,
    }
    return {f"{name}_mb": round(size / 1e6, 2) for name, size in sizes.items()} | {"ratio": round(extra / largest, 3)}


def measure_on_devices(path: pathlib.Path, layers: int, side: int) -> dict[str, float]:
    """Loads in this process, straight onto the devices, and runs a step with plain SGD. MB of 10^6 bytes."""
    import jax
    import torch

    import jaxtrain
    from torch_bridge import files

    class Stack(torch.nn.Module):
        def __init__(self, count, size):
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Linear(size, size) for _ in range(count))

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x.square().mean()

    def compiled(source, count, size):
        with torch.device("meta"):
            module = Stack(count, size)
        optimizer = torch.optim.SGD(module.parameters(), 1e-3)
        return jaxtrain.compile(module, lambda module, x: module(x), optimizer, shard="fsdp", weights=source)

    small = {"layers.0.weight": np.zeros((64, 64), np.float32), "layers.0.bias": np.zeros(64, np.float32)}
    float(compiled(files.save(small, path.parent / "first.safetensors"), 1, 64)(torch.zeros(DEVICES, 64)))  # imports
    gc.collect()
    host_memory.give_back()
    _reset_peak()
    before = _status("VmRSS")
    step = compiled(path, layers, side)
    jax.block_until_ready(list(step.weights.arrays.values()))
    peak = _status("VmHWM")
    arrays = step.weights.arrays.values()
    held = sum(shard.data.nbytes for array in arrays for shard in array.addressable_shards)
    largest = max(array.nbytes for array in arrays)
    assert float(step.weights.arrays[f"layers.{layers - 1}.bias"][0]) == layers - 1
    loss = float(step(torch.zeros(DEVICES, side)))
    assert loss == loss
    extra = peak - before - held
    sizes = {"model": sum(a.nbytes for a in arrays), "largest": largest, "extra": extra, "process": peak - held}
    return {f"{name}_mb": round(size / 1e6, 2) for name, size in sizes.items()} | {"ratio": round(extra / largest, 3)}


def _reset_peak() -> None:
    """VmHWM counts from here (man 5 proc, clear_refs)."""
    pathlib.Path("/proc/self/clear_refs").write_text("5")


def _status(name: str) -> int:
    """A figure of /proc/self/status, in bytes."""
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name + ":")) * 1024


def of_kind(kind: str, layers: int, side: int) -> dict[str, float]:
    """Writes the file here, loads it in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        path = write(pathlib.Path(folder), kind, layers, side)
        command = [sys.executable, "-m", "benchmarks.load_memory", "--load", str(path)]
        command += ["--layers", str(layers), "--side", str(side)]
        environment = dict(os.environ)
        if kind == "devices":
            command += ["--devices"]
            environment["XLA_FLAGS"] = (
                f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={DEVICES}"
            )
        printed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment).stdout
        return json.loads(printed.splitlines()[-1])


def main() -> None:
    p = parser(__doc__)
    p.add_argument("--layers", type=int, default=8)
    p.add_argument("--side", type=int, default=4096)
    p.add_argument("--load", metavar="F", help=argparse.SUPPRESS)
    p.add_argument("--devices", action="store_true", help=argparse.SUPPRESS)
    p.add_argument("--kinds", default="safetensors,pt,devices", help="which of them, joined by commas")
    arguments = p.parse_args()
    if arguments.load:
        how = measure_on_devices if arguments.devices else measure
        print(json.dumps(how(pathlib.Path(arguments.load), arguments.layers, arguments.side)))
        return
    found = {kind: of_kind(kind, arguments.layers, arguments.side) for kind in arguments.kinds.split(",")}
    for kind, figures in found.items():
        allowed = ALLOWED_ON_DEVICES if kind == "devices" else ALLOWED
        whole = f" ({figures['process_mb']} MB the whole process without the arrays)" if kind == "devices" else ""
        print(
            f"{kind:12s} model {figures['model_mb']} MB, largest tensor {figures['largest_mb']} MB, "
            f"extra while loading {figures['extra_mb']} MB: {figures['ratio']:.2f} x the largest, "
            f"wanted {allowed}{whole}"
        )
    save(found, arguments.json)


if __name__ == "__main__":
    main()
