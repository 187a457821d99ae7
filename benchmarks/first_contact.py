"""What jaxtrain takes for granted on a GPU, one by one: `python -m benchmarks.first_contact --jobs 6`.

Own loops, drop-ins and compiled modules whose tensors lie on the GPU against torch's own run there; fused kernels
against the formula; a run of a config twice and resumed, bit for bit. Prints a line per check: ok or FAILS, seconds,
what was found.
"""

import concurrent.futures
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from typing import Any

from benchmarks import parser, save
from benchmarks.contact_checks import CHECKS, check, device

AGREES = 1e-4  # of losses and weights, relative to the largest
MARK = "FOUND "


def main() -> int:
    p = parser(__doc__)
    p.add_argument("--only", nargs="+", default=list(CHECKS), choices=CHECKS)
    p.add_argument("--jobs", type=int, default=1, help="checks at the same time")
    p.add_argument("--limit", type=float, default=150, help="seconds that one may take")
    p.add_argument("--inside", action="store_true", help="run one in this process")
    arguments = p.parse_args()
    if arguments.inside:
        print(MARK + json.dumps(CHECKS[arguments.only[0]](), default=str))
        return 0
    found = {}
    with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
        running = {pool.submit(_run, name, arguments.limit): name for name in arguments.only}
        for done in concurrent.futures.as_completed(running):
            name, (works, seconds, what) = running[done], done.result()
            found[name] = {"works": works, "seconds": seconds, "found": what}
            print(f"{'ok   ' if works else 'FAILS'} {name:24} {seconds:6.1f} s  {str(what)[-1500:]}", flush=True)
            save(found, arguments.json)
    return int(not all(entry["works"] for entry in found.values()))


def _run(name: str, limit: float) -> tuple[bool, float, Any]:
    command = [sys.executable, "-m", "benchmarks.first_contact", "--only", name, "--inside"]
    began = time.perf_counter()
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=limit, check=False)
    except subprocess.TimeoutExpired as error:
        return False, limit, f"longer than {limit} s: {str(error.stdout)[-300:]} {str(error.stderr)[-600:]}"
    seconds = time.perf_counter() - began
    told = [line.removeprefix(MARK) for line in done.stdout.splitlines() if line.startswith(MARK)]
    if done.returncode or not told:
        return False, seconds, (done.stdout + done.stderr)[-1500:]
    what = json.loads(told[-1])
    far = isinstance(what, dict) and any(isinstance(x, float) and x > AGREES for n, x in what.items() if "far" in n)
    return not far, seconds, what


# --- other libraries --------------------------------------------------------------------------------------------------


def drop_in(name: str) -> Any:
    from benchmarks import drop_in as examples

    engines = name.partition("_")[0], "jaxtrain"
    steps = "64" if "gan" in name else "20"  # it evaluates at the end of its epoch
    runs = examples._both(name, engines, "--max_steps", steps, "--device", device())
    found = examples.compare(*runs)
    return {"far": found["loss"], "far_metrics": found["metric"], "files": found["files"], "s": found["seconds"]}


def _each_library() -> None:
    names = (
        "transformers_glue", "transformers_clm", "transformers_image_classification", "lightning_image_classifier",
        "lightning_gan", "accelerate_cv", "accelerate_nlp",
    )  # fmt: skip
    for name in names:
        CHECKS[name] = lambda name=name: drop_in(name)


_each_library()


# --- the product ------------------------------------------------------------------------------------------------------


def command(*words: str) -> str:
    done = subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError((done.stdout + done.stderr)[-1200:])
    return done.stdout + done.stderr


def agrees(system: str) -> Any:
    """The system's small size in float32 beside its torch twin."""
    more = ("--size", "small", "--rounds", "1", "--seconds", "0.3")
    return command("benchmarks.compare", "--system", system, *more)[-400:]


def _each_system() -> None:
    from benchmarks.systems import CASES

    for system in CASES:
        CHECKS[f"agrees_{system}"] = lambda system=system: agrees(system)


_each_system()


@check
def doctor() -> Any:
    return command("jaxtrain.doctor")[-900:]


@check
def digits() -> Any:
    with tempfile.TemporaryDirectory() as folder:
        return command("jaxtrain.run", "--config", "configs/digits.yaml", f"run.dir={folder}", "train.steps=300")[-500:]


SMALL_BERT = (
    "configs/criteria_tiny.yaml", "precision.policy=bf16", "data.max_length=128", "optim.schedule.name=constant",
    "optim.schedule.warmup_steps=null", "optim.schedule.warmup_ratio=null",
    "model.encoder={vocab_size: 30522, hidden_size: 256, num_hidden_layers: 2, num_attention_heads: 4, "
    "intermediate_size: 512, max_position_embeddings: 512, pad_token_id: 0}",
)  # fmt: skip


@check
def same_bits() -> Any:
    """A BERT with dropout in bfloat16: twice, and resumed in the middle."""
    from jaxtrain import export, run

    runs = []
    with tempfile.TemporaryDirectory() as folder:
        for name, lengths in (("once", [8]), ("again", [8]), ("resumed", [4, 8])):
            place = f"{folder}/{name}"
            for steps in lengths:
                more = (f"run.dir={place}", f"train.steps={steps}", "checkpoint.every_steps=4")
                assert run.main(["--config", *SMALL_BERT, *more]) in (0, None)
            export.main(["--run", place, "--checkpoint", "last", "--output", f"{place}.safetensors"])
            runs.append(pathlib.Path(f"{place}.safetensors").read_bytes())
    assert runs[0] == runs[1]
    assert runs[0] == runs[2]
    return {"bytes": len(runs[0])}


@check
def profile() -> Any:
    with tempfile.TemporaryDirectory() as folder:
        more = (f"run.dir={folder}", "train.steps=12", "profile.start=6", "profile.steps=3")
        told = command("jaxtrain.run", "--config", *SMALL_BERT, *more)
    return told[-1400:]


@check
def attention_kernels() -> Any:
    from benchmarks import attention_kernels as kernels

    return kernels.compare(kernels.PLAIN)


@check
def dropout_kernels() -> Any:
    from benchmarks import attention_kernels as kernels

    return kernels.compare(kernels.DROPPED)


@check
def out_of_memory() -> Any:
    import jax
    import jax.numpy as jnp

    from jaxtrain.train.compilation import out_of_memory as guard

    try:
        jax.block_until_ready(jax.jit(lambda: jnp.zeros(1 << 39, jnp.uint8) + 1)())
    except Exception as error:
        if guard.is_out_of_memory(error):
            return str(error)[:200]
        raise
    raise RuntimeError("512 GiB were given")


if __name__ == "__main__":
    sys.exit(main())
