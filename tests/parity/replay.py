"""Replay a golden case: read its configuration, parameters and inputs, write every output that it expects.

    python tests/parity/replay.py CASE.json CASE.safetensors -o OUT.safetensors

Only `param/` and input tensors are read; outputs in the input file are dropped before anything runs. Each system's
recipes live in `tests/parity/<system>.py` as `replay(name, case, tensors) -> {tensor name: array}`; which system a case
belongs to is decided by `claims(case)` there.
"""

import argparse
import importlib
import json
import pathlib
import sys

import numpy as np
from safetensors.numpy import load_file, save_file

SYSTEMS = ("fmri_autoencoder", "set_completion", "hjepa", "criteria_evidence", "memory_lm")
HERE = pathlib.Path(__file__).parent


def replay(case: dict, tensors: dict[str, np.ndarray], name: str = "") -> dict[str, np.ndarray]:
    """Every tensor under `case["expects"]`, computed from the case's own inputs."""
    given = {key: value for key, value in tensors.items() if key not in case["expects"]}
    for system in SYSTEMS:
        module = importlib.import_module(f"tests.parity.{system}")
        if module.claims(name, case):
            return {key: np.asarray(value) for key, value in module.replay(name, case, given).items()}
    raise SystemExit(f"{name}: no system claims this case; its JSON has the keys {sorted(case)[:12]}")


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("case", type=pathlib.Path, help="the case's JSON")
    parser.add_argument("tensors", type=pathlib.Path, help="its parameters and inputs, safetensors")
    parser.add_argument("-o", "--output", type=pathlib.Path, required=True, help="where the outputs go, safetensors")
    arguments = parser.parse_args(argv)
    case = {"folder": str(arguments.case.parent)} | json.loads(arguments.case.read_text())  # fixtures lie beside it
    outputs = replay(case, load_file(arguments.tensors), arguments.case.stem)
    wanted = {key: np.ascontiguousarray(outputs[key]) for key in case["expects"] if key in outputs}
    save_file(wanted, arguments.output)
    absent = sorted(set(case["expects"]) - set(wanted))
    if absent:
        print(f"{len(absent)} of {len(case['expects'])} expected tensors are missing: {', '.join(absent[:5])}")
    return bool(absent)


if __name__ == "__main__":
    sys.path.insert(0, str(HERE.parents[1]))
    sys.exit(main())
