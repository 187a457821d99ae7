"""Write docs/benchmarks.md, its charts and other pages' tables from the newest results: `python -m benchmarks.page`.

A table of another page stands between two comments that name it. Every figure is read from a JSON file under
benchmarks/results, and every table has its command and its files. `--check` writes nothing and exits with 1 where a
page is not what the results say.
"""

import json
import pathlib
import re
import statistics
import sys
from typing import Any

from benchmarks import charts, page_tables, parser

ROOT = pathlib.Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results"
DOCS = ROOT / "docs"
README = ROOT / "README.md"
BLOCK = re.compile(r"(<!-- (\w+) begins: python -m benchmarks.page -->\n).*?(<!-- \2 ends -->)", re.DOTALL)
NAMES = {
    "criteria_evidence": "BERT-base, 512 tokens",
    "hjepa": "ViT-B under H-JEPA",
    "fmri_autoencoder": "autoencoder, 1.97 billion parameters",
    "memory_lm": "memory LM, 371 million parameters",
    "memory_adapter": "memory adapter of a 1.5-billion-parameter model",
    "set_completion": "set transformer",
    "sparse_autoencoder": "sparse autoencoder",
}
CONVERTED = "python -m benchmarks.converted_bert"
COMPARE = "python -m benchmarks.compare --system S --peer"


HEAD = [
    "# Benchmarks",
    "",
    "Every figure on this page is read from a file under `benchmarks/results`, by `python -m benchmarks.page`. A ratio "
    "is jaxtrain's speed as a multiple of torch's. Both sides start from the same weights, read the same batches, and "
    "must give the same losses before they are timed.",
    "",
    "[Performance](performance.md) says what to change when a run is slow.",
    "",
]
FOOT = [
    "## Not measured",
    "",
    "- Several GPUs, and TPUs.",
    "- The speed of drop-ins on a GPU. Some of them were compared there for their numbers only.",
    "- The adapter of the 1.5-billion-parameter model on a GPU. It was still compiling when the time was up.",
    "- `torch.compile` on a GPU with a twin whose graph is whole.",
    "",
    "`bash benchmarks/gpu.sh compare` measures what one GPU can show.",
]


def main() -> None:
    p = parser(__doc__, figures=False)
    p.add_argument("--check", action="store_true", help="write nothing; exit with 1 where a page is stale")
    arguments = p.parse_args()
    if not arguments.check:
        write()
        return
    found = stale()
    for path in found:
        print(f"{path.relative_to(ROOT)} is not what benchmarks/results says", file=sys.stderr)
    sys.exit(int(bool(found)))


def write() -> None:
    """Write every page and picture that is stale."""
    for path, text in stale().items():
        path.write_text(text)


def stale() -> dict[pathlib.Path, str]:
    """The files that are not what the results say, and the text that they should have."""
    return {path: text for path, text in pages().items() if not path.is_file() or path.read_text() != text}


def pages() -> dict[pathlib.Path, str]:
    """Each file that this module writes, and its text."""
    gpu, cpu, drop_in = on_gpus(), newest("*cpu_cores.json"), newest("*_drop_in.json")
    bars = {
        "gpu": [(result["system"], result["ratio"]) for _, result in against(gpu, "torch_eager")],
        "cpu": [(result["system"], result["ratio"]) for _, result in against(cpu, "torch_eager")],
        "drop_in": [(name, _ratio(row)) for name, row in drop_in[1]["examples"].items()],
    }
    drawn = {DOCS / f"benchmarks_{name}.svg": charts.ratios(rows, "times torch's speed") for name, rows in bars.items()}
    tables = {"speed": _speed(gpu, cpu, drop_in), **page_tables.tables()}
    written = {path: path.read_text() for path in (README, *sorted(DOCS.glob("*.md")))}
    filled = {
        path: BLOCK.sub(lambda match: f"{match[1]}{tables[match[2]]}\n{match[3]}", text)
        for path, text in written.items()
    }
    text = [*HEAD, *_gpu(gpu), *_cpu(cpu), *_processes(), *_drop_ins(drop_in), *_predictions(gpu), *_smaller(), *FOOT]
    return {**filled, DOCS / "benchmarks.md": "\n".join(text) + "\n", **drawn}


def newest(pattern: str) -> tuple[pathlib.Path, Any]:
    """The newest result of a kind, and what it holds; of one day, that of a quiet machine."""
    path = max(RESULTS.glob(pattern), key=lambda path: (path.name[:10], "quiet" in path.name))
    return path, json.loads(path.read_text())


def on_gpus() -> list[tuple[pathlib.Path, dict]]:
    """The newest comparison of each system and peer on a GPU, with its file."""
    found: dict[tuple[str, str], tuple[pathlib.Path, dict]] = {}
    for path in sorted(RESULTS.glob("*_gpu/*.json")):
        read = json.loads(path.read_text())
        for result in read if isinstance(read, list) else [read]:
            if "ratio" in result:
                found[result["system"], result["peer"]] = path, result
    return [found[key] for key in sorted(found)]


def against(results: list | tuple, peer: str) -> list[tuple[pathlib.Path, dict]]:
    """The results beside one peer, those with the largest ratio first. results: pairs of a file and a result, or a file
    and all of its results."""
    pairs = [(results[0], result) for result in results[1]] if isinstance(results, tuple) else results
    return sorted((pair for pair in pairs if pair[1]["peer"] == peer), key=lambda pair: -pair[1]["ratio"])


def _gpu(gpu: list) -> list[str]:
    compiled = {result["system"]: result for _, result in against(gpu, "torch_compile")}
    rows = []
    for path, result in against(gpu, "torch_eager"):
        name = result["system"]
        rows.append((
            f"{NAMES[name]} (`{name}`)",
            f"{_device(result)}, {_date(path)}",
            f"{result['batch']:,}",
            f"{result['jaxtrain']['ms']:.1f}, {result['torch_eager']['ms']:.1f}",
            f"**{result['ratio']:.2f}** ({_spread(result)})",
            f"{compiled[name]['ratio']:.2f} ({_spread(compiled[name])})" if name in compiled else "not timed",
            f"{result['largest_loss_difference']:.1e}",
            f"{result['mfu']:.2f}",
            f"`{_shown(path)}`",
        ))  # fmt: skip
    heads = "system | GPU, date | batch | ms a step: jaxtrain, torch eager | of eager | of `torch.compile` (1)"
    return [
        "## On one GPU",
        "",
        "The systems at their originals' sizes, bf16, one process. `bash benchmarks/gpu.sh compare` measures them.",
        "",
        "![Speed on a GPU as a multiple of eager torch](benchmarks_gpu.svg)",
        "",
        *page_tables.table(f"{heads} | loss difference | MFU | file", rows),
        f"{'; '.join(sorted({_versions(result) for _, result in gpu}))}. Brackets: the lowest and the highest round.",
        "",
        "(1) `torch.compile` ran these with breaks in the graph, because the twins' losses selected rows by a mask. "
        "The twins compile whole now (`tests/contract/test_compiled_twins.py`) and were not timed again. The ratios "
        "are likely to be lower then.",
        "",
    ]


def _cpu(cpu: tuple[pathlib.Path, Any]) -> list[str]:
    path, results = cpu
    compiled = {result["system"]: result for _, result in against(cpu, "torch_compile")}
    rows = []
    for _, result in against(cpu, "torch_eager"):
        peer = compiled[result["system"]]
        speeds = f"{result['jaxtrain']['median']:,.1f}, {result['torch_eager']['median']:,.1f}"
        both = f"**{result['ratio']:.2f}** ({_spread(result)})", f"{peer['ratio']:.2f} ({_spread(peer)})"
        rows.append((result["system"], str(result["batch"]), speeds, *both))
    means = f"**{_mean(results, 'torch_eager')}**", _mean(results, "torch_compile")
    days = []
    for other in sorted(RESULTS.glob("*cpu_cores.json"), reverse=True):
        read = json.loads(other.read_text())
        days.append((f"`{_shown(other)}`", _machine(other), _mean(read, "torch_eager"), _mean(read, "torch_compile")))
    return [
        "## On two CPU cores",
        "",
        f"The systems at small sizes, float32, by `{COMPARE} torch_eager torch_compile`. "
        f"From `{_shown(path)}` ({_machine(path)}; {_versions(results[0])}):",
        "",
        "![Speed on two CPU cores as a multiple of eager torch](benchmarks_cpu.svg)",
        "",
        *page_tables.table(
            "system | batch | samples/s: jaxtrain, torch eager | of eager | of `torch.compile` (1)",
            [*rows, ("geometric mean", "", "", *means)],
        ),
        "Geometric means of all days and machines. Figures of a virtual machine vary by a quarter between days:",
        "",
        *page_tables.table("file | machine | of eager | of `torch.compile` (1)", days),
    ]


def _processes() -> list[str]:
    path, results = newest("*quiet_cpu_cores.json")
    rows = []
    for _, result in against((path, results), "torch_ddp"):
        speeds = f"{result['jaxtrain']['median']:,.1f}, {result['torch_ddp']['median']:,.1f}"
        rows.append((result["system"], speeds, f"**{result['ratio']:.2f}** ({_spread(result)})"))
    return [
        "## Two processes on two cores",
        "",
        f"`{COMPARE} torch_ddp --devices 2`: `shard.strategy: ddp_local` against DistributedDataParallel over gloo. "
        f"From `{_shown(path)}`:",
        "",
        *page_tables.table(
            "system | samples/s: jaxtrain, torch DDP | of DDP",
            [*rows, ("geometric mean", "", f"**{_mean(results, 'torch_ddp')}**")],
        ),
    ]


def _drop_ins(drop_in: tuple[pathlib.Path, Any]) -> list[str]:
    path, read = drop_in
    found, rows = read["examples"], []
    for name, row in found.items():
        clock = ", ".join(f"{1000 * seconds:.1f}" for seconds in row["seconds"])
        same = "same" if row["files"] else "differ"
        far = f"{row['loss']:.0e}", f"{row['metric']:.0e}"
        rows.append((name, *far, same, clock, f"{_ratio(row):.2f}", f"{row['compile_s']:.0f} s"))
    ratios = [_ratio(row) for row in found.values()]
    same = sum(max(row["loss"], row["metric"]) <= 1e-4 and row["files"] for row in found.values())
    return [
        "## Scripts with one changed import",
        "",
        f"`python -m benchmarks.drop_in --write`, from `{_shown(path)}`: 60 steps of each script of "
        f"`examples/drop_in`, float32, dropout off, {read['machine']}, every step XLA's. "
        "Differences are the largest relative ones. Clock: median milliseconds of a step under the library and here. "
        "Compile: processor seconds that compiling adds to a run.",
        "",
        "![Speed of scripts with one changed import, as a multiple of their library's](benchmarks_drop_in.svg)",
        "",
        *page_tables.table("example | losses differ by | metrics differ by | files | clock | ratio | compile", rows),
        f"{same} of {len(found)} give the library's curves, metrics and files. The geometric mean of the ratios is "
        f"{statistics.geometric_mean(ratios):.2f}; {sum(ratio < 1 for ratio in ratios)} are slower.",
        "",
    ]


def _predictions(gpu: list) -> list[str]:
    folder = max(RESULTS.glob("*_predictions"))
    one, ddp, fsdp = (json.loads((folder / f"h200{name}.json").read_text()) for name in ("x1", "x8_ddp", "x8_fsdp"))
    measured = {result["system"]: result["jaxtrain"]["ms"] for _, result in against(gpu, "torch_eager")}
    rows = []
    for name, made in one.items():
        found, ms = made["predicted"], measured.get(name)
        shown = (f"{ms:.1f}", f"{100 * (found['ms'] / ms - 1):+.0f} %") if ms else ("not measured", "")
        least = f"{found['mfu']:.3f}", f"{found['kernels']:,}", f"{found['samples_per_s']:,.0f}"
        sent = f"{made['peak_bytes'] / 2**30:.1f}", _megabytes(ddp[name]), _megabytes(fsdp[name])
        rows.append((name, f"{found['ms']:.1f}", *shown, *least, *sent))
    heads = "system | predicted, ms | measured, ms | off | MFU | kernels | samples/s | peak, GiB"
    return [
        "## Predicted for an H200",
        "",
        "`python -m benchmarks.predict` compiles each system's step without the GPU and reads it kernel by kernel. "
        f"From `{_shown(folder)}`. MB are those that each of 8 devices sends in a step, of the fewest that a plain "
        "scheme needs. Less is sent where XLA keeps gathered weights, or computes a buffer alike on all.",
        "",
        *page_tables.table(f"{heads} | MB, ddp | MB, fsdp", rows),
    ]


def _megabytes(made: dict) -> str:
    sent = sum(entry["bytes"] for entry in made["collectives"].values())
    return f"{sent / 1e6:,.0f} of {sum(made['minimum_bytes'].values()) / 1e6:,.0f}"


def _smaller() -> list[str]:
    bert, figures = newest("*_converted_bert.json")
    contact = max(RESULTS.glob("*_gpu/h200_first_contact.json"))
    checks = json.loads(contact.read_text())
    ms, off = (checks["dropout_kernels"]["found"]["dropped"][key] for key in ("ms", "off"))
    batch = checks["batch_memory"]["found"]
    ratio = lambda name: "{median:.2f} ({least:.2f} to {most:.2f})".format(**figures["figures"][name])
    attention = "attention with dropout, forward and backward of [8, 512, 12, 64] on an H200"
    distance = "the same, distance from the formula in float32"
    loop = "a small step of a loop of yours on a 100 MB batch that lies on an H200"
    by, shown = "`bash benchmarks/gpu.sh contact`", f"`{_shown(contact)}`"
    time = "a converted BERT's training step on two CPU cores, of the time of"
    rows = [
        (f"{time} the flax BERT", ratio("converted / flax"), f"`{CONVERTED}`", f"`{_shown(bert)}`"),
        (f"{time} torch eager", ratio("converted / torch_eager"), f"`{CONVERTED}`", f"`{_shown(bert)}`"),
        (f"{attention}: our kernel, and the formula", f"{ms[0]:.2f} ms, {ms[1]:.2f} ms", by, shown),
        (f"{distance}: our kernel in bf16, and the formula", f"{off[0]:.1e}, {off[1]:.1e}", by, shown),
        (f"{loop}: jaxtrain, and eager torch", f"{batch['ms']:.1f} ms, {batch['torch_ms']:.1f} ms", by, shown),
    ]
    return ["## Single parts", "", *page_tables.table("part | figure | command | file", rows)]


def _speed(gpu: list, cpu: tuple[pathlib.Path, Any], drop_in: tuple[pathlib.Path, Any]) -> str:
    """README's table."""
    rows = []
    for path, result in sorted(against(gpu, "torch_eager"), key=lambda pair: pair[1]["ratio"]):
        command = "the same" if rows else "`bash benchmarks/gpu.sh compare`"
        what, where = f"{NAMES[result['system']]}, {result['precision']}", f"{_device(result)}, {_date(path)}"
        rows.append((what, where, f"{result['ratio']:.2f}", command))
    ratios = [_ratio(row) for row in drop_in[1]["examples"].values()]
    cores = "two CPU cores,"
    small = f"{cores} {_date(cpu[0])}", _mean(cpu[1], "torch_eager"), f"`{COMPARE} torch_eager`"
    spread = f"{cores} {_date(drop_in[0])}", f"{min(ratios):.2f} to {max(ratios):.2f}"
    rows.append(("the seven systems, small, float32 (geometric mean)", *small))
    rows.append((f"{len(ratios)} scripts under one changed import", *spread, "`python -m benchmarks.drop_in --write`"))
    return "\n".join(page_tables.table("what | hardware, date | of torch eager | command", rows)[:-1])


def _ratio(row: dict) -> float:
    return row["seconds"][0] / row["seconds"][1]


def _spread(result: dict) -> str:
    return f"{result['lowest']:.2f} to {result['highest']:.2f}"


def _mean(results: list[dict], peer: str) -> str:
    """Geometric mean of the ratios against a peer, or nothing where it was not timed."""
    ratios = [result["ratio"] for result in results if result["peer"] == peer]
    return f"{statistics.geometric_mean(ratios):.2f}" if ratios else ""


def _machine(path: pathlib.Path) -> str:
    """What benchmarks/results/README.md tells of a CPU's result."""
    if "quiet" in path.name:
        return "quiet, with AVX-512 and AMX"
    return "with another job on one core" if path.name.startswith("2026-11-27") else "a virtual machine"


def _device(result: dict) -> str:
    return result["device"].removeprefix("NVIDIA ")


def _versions(result: dict) -> str:
    return f"jax {result['jax']}, torch {result['torch']}"


def _date(path: pathlib.Path) -> str:
    return _shown(path).removeprefix("benchmarks/results/")[:10]


def _shown(path: pathlib.Path) -> str:
    return str(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
