"""Train the shipped configs that the documentation quotes, and keep what they reach: `python -m benchmarks.outcomes`.

Each config runs and is evaluated in processes of their own. Metrics go into benchmarks/results/outcomes.json with the
commands, one config after the other; those that stand there are not run again unless they are named. Nothing here is a
speed.
"""

import json
import pathlib
import subprocess
import sys
import tempfile

import jax
import torch

from benchmarks import parser

ROOT = pathlib.Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results/outcomes.json"
CONFIGS: dict[
    str, list[list[str]]
] = {  # config -> settings of each of its evaluations; runs that others read come first
    "splat_small": [[]],
    "splat_sae": [[]],
    "hjepa_digits": [["probe.folds=5"], ["probe.fine_tune_epochs=50", "probe.fine_tune_lr=5e-3"]],
    "sherlock_tiny": [[]],
    "memory_lm_tiny": [["data.eval_samples=16"]],
}


def main() -> None:
    p = parser(__doc__, figures=False)
    p.add_argument(
        "configs", nargs="*", metavar="CONFIG", help=f"of {', '.join(CONFIGS)} (default: those not kept yet)"
    )
    arguments = p.parse_args()
    known = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.configs or [name for name in CONFIGS if name not in known]:
            known[name] = outcome(name, pathlib.Path(folder))
            RESULTS.write_text(json.dumps(dict(sorted(known.items())), indent=1) + "\n")


def outcome(name: str, folder: pathlib.Path) -> dict:
    """Train and evaluate a config in a folder. Raises CalledProcessError where a command fails."""
    (folder / "configs").is_symlink() or (folder / "configs").symlink_to(ROOT / "configs")
    commands = [["jaxtrain.run", "--config", f"configs/{name}.yaml"]]
    commands += [["jaxtrain.evaluate", "--run", f"runs/{name}", *settings] for settings in CONFIGS[name]]
    found = []
    for number, (module, *rest) in enumerate(commands):
        print("python -m", module, *rest, flush=True)
        output = ["--output", f"{name}_{number}.json"] if number else []
        subprocess.run([sys.executable, "-m", module, *rest, *output], cwd=folder, check=True)
        if number:
            found.append(json.loads((folder / f"{name}_{number}.json").read_text()))
    summary = json.loads((folder / "runs" / name / "summary.json").read_text())
    return {
        "commands": [" ".join(["python -m", *command]) for command in commands],
        "versions": {"jax": jax.__version__, "torch": torch.__version__},
        "best": summary["best"],
        "evaluated": found,
    }


if __name__ == "__main__":
    main()
