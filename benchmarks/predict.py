"""The seven compared systems on a GPU that is not here: `python -m benchmarks.predict criteria_evidence`.

`jaxtrain.plan`'s prediction, at the originals' sizes, in bfloat16; docs/benchmarks.md shows what `--json` wrote.
"""

import argparse
import gc
import json
import pathlib
import tempfile

from benchmarks import parser
from benchmarks.systems import CASES, CONSTANT_RATE


def main() -> None:
    p = parser(__doc__, figures=False)
    p.add_argument("systems", nargs="*", help="all where left out; then a.b=c")
    p.add_argument("--target", default="h200")
    p.add_argument("--devices", type=int, default=1)
    p.add_argument("--strategy", default="ddp")
    p.add_argument("--size", default="reference", choices=("small", "reference"))
    p.add_argument("--json", metavar="F")
    p.add_argument("--hlo", metavar="FOLDER", help="keep the compiled programs' text")
    arguments = p.parse_intermixed_args()
    overrides = [word for word in arguments.systems if "=" in word]
    names = [word for word in arguments.systems if "=" not in word] or list(CASES)
    found = {}
    for name in names:
        found[name] = predict(name, arguments, overrides)
        print(line(name, found[name]), flush=True)
        if arguments.json:
            pathlib.Path(arguments.json).write_text(json.dumps(found, indent=1))
        gc.collect()


def predict(name: str, arguments: argparse.Namespace, overrides: list[str]) -> dict:
    from jaxtrain import config_io, planned_step
    from jaxtrain.nn import fused_attention
    from jaxtrain.runtime import topology

    topology.prepare()
    case, target, count = CASES[name][arguments.size], arguments.target, arguments.devices
    settings = ["precision.policy=bf16", "run.quiet=true", f"run.dir={tempfile.mkdtemp()}", *CONSTANT_RATE]
    settings += [f"data.batch_size={case.batch * count}", "train.steps=1000", "data.drop_last=false"]
    settings += ["data.placement=host", f"shard.strategy={arguments.strategy}"]
    task, config = config_io.load(case.config, [*case.overrides, *settings, *overrides])
    data = task.build_data(config, case.split) if case.data is None else case.data(config, config.data.batch_size)
    kept: list = []
    fused_attention.chosen.clear()
    with fused_attention.planned_for(topology.gpu(target).capability):
        card = topology.card(target, -(-count // 8))
        made = planned_step.compile_step(task, config, topology.devices(target, count), data, card, kept)
    if arguments.hlo:
        folder = pathlib.Path(arguments.hlo)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.{target}x{count}.{arguments.strategy}.hlo").write_text(kept[0].as_text())
    return made | {"attention": dict(fused_attention.chosen), "batch_size": config.data.batch_size}


def line(name: str, made: dict) -> str:
    """One row of the table."""
    found = made["predicted"]
    sent = sum(entry["bytes"] for entry in made["collectives"].values())
    least = sum(made["minimum_bytes"].values())
    attention = ", ".join(f"{kind} x{count}" for kind, count in made["attention"].items())
    return (
        f"| {name} | {found['ms']:.1f} | {found['mfu']:.3f} | {found['kernels']:,.0f} | "
        f"{found['samples_per_s']:,.0f} | {made['peak_bytes'] / (1 << 30):.1f} | {sent / 1e6:.0f} / {least / 1e6:.0f} "
        f"| {attention} |"
    )


if __name__ == "__main__":
    main()
