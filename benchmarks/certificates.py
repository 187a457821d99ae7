"""Parity certificates of small random models of many libraries: `python -m benchmarks.certificates`.

Each is what `jaxtrain verify --module` makes: layers, loss, every gradient, updates with AdamW, the way back with
strict=True, bf16. Results go into benchmarks/results/certificates.json, one model after the other; those that stand
there with the same versions are not measured again (--again does). docs/certificates.md is written from them. A library
that is not installed, or that does not import beside this torch, is left out.
"""

import importlib
import importlib.metadata
import json
import os
import pathlib
import time
from collections.abc import Iterator
from typing import Any

from benchmarks import parser

ROOT = pathlib.Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results/certificates.json"
PAGE = ROOT / "docs/certificates.md"
INTRODUCTION = (
    "# Certificates\n\nSmall models with random weights, trained by torch and by jaxtrain from the same weights on the "
    "same batches. Each row is\nthe certificate of one model, made by [`Trainer.verify()`](verify.md); `python -m "
    "benchmarks.certificates` makes them all\nand writes this page.\n\n"
    "- **layers**: the largest relative difference of any layer's output, in evaluation and in training mode (dropout "
    "at 0). Accepted: 1e-4.\n"
    "- **gradient**: the largest of any parameter's gradient. Accepted: 1e-3.\n"
    "- **updates**: how far the weights are apart after {steps} updates with `torch.optim.AdamW`, as a share of how "
    "far they moved;\n  in brackets the same between torch's float32 and torch's float64. Accepted: 1e-3, or ten times "
    "torch's own.\n"
    "- **back**: tensors of the trained `state_dict` that torch loaded with `strict=True`, bit for bit.\n"
    "- **bf16**: how far the losses in bf16 drift from float32; in brackets what `torch.autocast` does. Accepted: "
    "2e-2, or three\n  times torch's own.\n\n"
    "An uneven last batch and the difference between the two modes are part of every certificate. Measured on a CPU "
    "with\n{versions}.\n"
)
HEAD = "| library | model | parameters | layers | gradient | updates | back | bf16 | verdict |"


def main() -> None:
    p = parser(__doc__, figures=False)
    p.add_argument("--again", action="store_true", help="measure all of them")
    p.add_argument("--only", metavar="TEXT", default="", help="libraries or models whose name holds it")
    p.add_argument("--steps", type=int, default=20, help="updates on both sides (default 20)")
    arguments = p.parse_args()
    from tests.e2e.certified import LIBRARIES

    known = json.loads(RESULTS.read_text()) if RESULTS.is_file() and not arguments.again else {}
    for library, model in _in_turn(LIBRARIES):
        name = f"{library}: {model.name}"
        if name in known or arguments.only not in name:
            continue
        started = time.perf_counter()
        try:
            known[name] = _measured(model, library, arguments.steps)
        except Exception as error:  # of a library that does not run here
            print(f"{name:50s} {type(error).__name__}: {error}", flush=True)
            continue
        RESULTS.write_text(json.dumps(known, indent=1) + "\n")
        print(f"{name:50s} {known[name]['verdict']}  {time.perf_counter() - started:.0f} s", flush=True)
    if known:
        PAGE.write_text(page(known))


def _in_turn(libraries: dict[str, str]) -> Iterator[tuple[str, Any]]:
    """The first model of every library, then the second ones, and so on."""
    found: dict[str, list] = {}
    place = 0
    while place <= max(map(len, found.values()), default=0):
        for module, library in libraries.items():
            if library not in found:
                found[library] = _models(module)
            if place < len(found[library]):
                yield library, found[library][place]
        place += 1


def _models(module: str) -> list:
    """Return the models of a library; none where it does not import here."""
    try:
        return importlib.import_module(f"tests.e2e.certified.{module}").MODELS
    except (ImportError, OSError, RuntimeError) as error:
        print(f"{module}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}", flush=True)
        return []


def _measured(model, library: str, steps: int) -> dict:
    """The figures of one certificate."""
    import torch

    from jaxtrain import Trainer, TrainingConfig

    torch.manual_seed(0)
    module, data, loss = model.build()
    trained = [p for p in module.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    config = TrainingConfig(batch_size=8, max_steps=steps)
    for inner in module.modules():
        if isinstance(inner, torch.nn.modules.dropout._DropoutNd):
            inner.p = 0.0  # a certificate does so, too; here the module is then recorded once
    certificate = Trainer(module, data, None, config, loss=loss, optimizer=optimizer).verify(steps)
    found = certificate.as_dict()
    checks = {check["name"]: check for check in found["checks"]}
    own = {name: check.own for check in certificate.checks if (name := check.name) and check.own is not None}
    largest = lambda kind, *names: max(
        (one["size"] for name in names for one in checks.get(name, {"differences": []})["differences"]
         if one["kind"] == kind), default=None,
    )  # fmt: skip
    return {
        "library": library,
        "version": importlib.metadata.version(library),
        "model": model.name,
        "parameters": found["subject"]["parameters"],
        "layers": largest("output", "evaluation", "training"),
        "gradient": largest("gradient", "gradients"),
        "updates": largest("movement", "updates"),
        "updates_torch": own.get("updates"),
        "back": sum(one["kind"] == "state dict" for one in checks.get("return", {"differences": []})["differences"]),
        "bf16": largest("drift", "bf16"),
        "bf16_torch": own.get("bf16"),
        "verdict": "agrees" if found["agrees"] else found["verdict"],
        "left_out": [check["name"] for check in found["checks"] if check["verdict"] == "not compared"],
        "steps": steps,
        "versions": found["subject"]["versions"],
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
    }


def page(known: dict) -> str:
    """docs/certificates.md."""
    rows = [HEAD, "|" + "---|" * 9]
    for one in sorted(known.values(), key=lambda one: (one["library"].lower(), one["model"])):
        cells = [
            f"{one['library']} {one['version']}",
            one["model"],
            f"{one['parameters']:,}",
            _size(one["layers"]),
            _size(one["gradient"]),
            f"{_size(one['updates'])} ({_size(one['updates_torch'])})",
            str(one["back"] or "-"),
            f"{_size(one['bf16'])} ({_size(one['bf16_torch'])})",
            one["verdict"],
        ]
        rows.append(f"| {' | '.join(cells)} |")
    first = next(iter(known.values()))
    versions = ", ".join(f"{name} {version}" for name, version in first["versions"].items())
    flags = f"; XLA_FLAGS `{first['xla_flags']}`" if first["xla_flags"] else ""
    text = INTRODUCTION.format(steps=first["steps"], versions=versions + flags)
    libraries = len({one["library"] for one in known.values()})
    agree = sum(one["verdict"] == "agrees" for one in known.values())
    text += f"\n{agree} of {len(known)} models of {libraries} libraries agree.\n\n"
    return text + "\n".join(rows) + "\n"


def _size(value: float | None) -> str:
    return "-" if value is None else f"{value:.0e}"


if __name__ == "__main__":
    main()
