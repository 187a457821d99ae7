"""Say how a training script would run, without training: `python -m jaxtrain.doctor --script train.py`.

The script runs in a process of its own, up to its first updates; then it is stopped.
"""

import contextlib
import gc
import io
import json
import os
import pathlib
import runpy
import subprocess
import sys
import tempfile
import time
from typing import Any

from jaxtrain.errors import UserError

CALLS = 3  # of each compiled step: the first runs in torch or is compiled, the second may be compiled, the third is not


class Enough(BaseException):
    """Ends the script; no `except Exception` of its own holds it."""


def examine(script: str, arguments: list[str], timeout_s: float = 600.0) -> dict[str, Any]:
    """Run the script in a process of its own and return the report. Raises UserError if there is no such script, or if
    it takes longer than `timeout_s` to its first updates."""
    if not pathlib.Path(script).is_file():
        raise UserError(f"--script {script}: there is no such file")
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder) / "report.json"
        command = [sys.executable, "-m", "jaxtrain.script_doctor", str(out), script, *arguments]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
        except subprocess.TimeoutExpired:
            raise UserError(f"--script {script}: no update within {timeout_s:g} s; give it less data") from None
        if not out.exists():
            raise UserError(f"--script {script}: the process ended with {done.returncode}: {done.stderr[-500:]}")
        return json.loads(out.read_text())


def describe(found: dict[str, Any]) -> list[str]:
    """Return the report as lines."""
    lines = [f"{found['script']}: {found['verdict']}"]
    for step in found["steps"]:
        lines.append(
            f"  {step['name']}: {step['programs']} programs, first call {step['first_call_s']:.1f} s, "
            + (f"torch runs it: {step['in_torch']}" if step["in_torch"] else "one program per call")
        )
        lines += [f"    {line}" for line in step["explain"]]
    for module in found["modules"]:
        how = "converts whole" if module["one_program"] else "does not convert"
        lines.append(f"  {module['module']} ({module['parameters']:,} parameters): {how}")
        lines += [f"    {line}" for line in module["why"].splitlines()]
    if found["error"]:
        lines.append(f"  the script stopped: {found['error']}")
    return [*lines, f"  next: {found['next']}"]


def main(out: str, script: str, *arguments: str) -> None:
    """Run the script until Enough, and write the report as JSON to `out`."""
    from jaxtrain.compiled_step import CompiledStep
    from jaxtrain.runtime.background import WAIT
    from jaxtrain.train.trainer import Trainer
    from torch_bridge.script_watch import Watch

    first: dict[int, float] = {}
    began: dict[int, float] = {}
    trainers: list[dict[str, Any]] = []
    call, after_call, watch = CompiledStep.__call__, CompiledStep.after_call, Watch()

    def timed(step: Any, *args: Any, **kwargs: Any) -> Any:
        began.setdefault(id(step), time.perf_counter())
        return call(step, *args, **kwargs)

    def counted(step: Any, updated: Any) -> None:
        after_call(step, updated)
        first.setdefault(id(step), time.perf_counter() - began.get(id(step), started))
        if step.count >= CALLS:
            raise Enough

    def planned(trainer: Any, *args: Any, **kwargs: Any) -> Any:
        trainers.append(_of_trainer(trainer))
        raise Enough

    def after_update(count: int) -> None:
        if count >= CALLS and not _steps(CompiledStep):
            raise Enough

    CompiledStep.__call__, CompiledStep.after_call, Trainer.train = timed, counted, planned  # in this process alone
    os.environ[WAIT] = "1"  # the programs are what is looked for
    error, started = "", time.perf_counter()
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(pathlib.Path(script).resolve().parent))
    try:
        with watch.watching(after_update), contextlib.redirect_stdout(io.StringIO()):
            runpy.run_path(script, run_name="__main__")
    except (Enough, SystemExit):
        pass
    except BaseException as raised:
        error = f"{type(raised).__name__}: {' '.join(str(raised).split())}"[:2000]
    steps = [_of_step(step, first.get(id(step), 0.0)) for step in _steps(CompiledStep)]
    modules = [] if steps or trainers else watch.conversions()
    found = {"script": script, "steps": [*steps, *trainers], "modules": modules, "error": error}
    pathlib.Path(out).write_text(json.dumps({**found, **_verdict(found, watch.updates)}))


def _steps(kind: type) -> list[Any]:
    """Return every compiled step that was called, also those that a drop-in has made."""
    return [each for each in gc.get_objects() if type(each) is kind and each._calls + each.count > 0]


def _of_step(step: Any, seconds: float) -> dict[str, Any]:
    return {
        "name": getattr(step.loss_fn, "__name__", "the loss"),
        "programs": len(step.programs),
        "first_call_s": round(seconds, 3),
        "calls": step.count,
        "in_torch": "" if step.torch is None else str(step.torch.reason),
        "explain": step.explain().splitlines(),
    }


def _of_trainer(trainer: Any) -> dict[str, Any]:
    """Compile a Trainer's step for its first batch, without a run folder."""
    began = time.perf_counter()
    program = trainer.program
    program.train_step(1).jitted.lower(*program.abstract_arguments(1)).compile()
    return {
        "name": "Trainer",
        "programs": 1,
        "first_call_s": round(time.perf_counter() - began, 3),
        "calls": 0,
        "in_torch": "",
        "explain": [f"batches may have up to {program.train_shapes} shapes, each a program"],
    }


def _verdict(found: dict[str, Any], updates: int) -> dict[str, str]:
    steps, modules = found["steps"], found["modules"]
    if steps and not any(step["in_torch"] for step in steps):
        return {"verdict": "runs as compiled programs", "next": "nothing to change"}
    if steps:
        return {"verdict": "part of it runs in torch", "next": "change what the line above names, or leave it so"}
    if not modules:
        said = "mend the error" if found["error"] else "no module was trained: name the script that trains"
        return {"verdict": "nothing was compiled", "next": said}
    if all(module["one_program"] for module in modules):
        said = "jaxtrain.compile(module, loss_fn, optimizer) in place of backward and step (docs/own_loop.md)"
        return {"verdict": f"plain torch ({updates} updates seen); its modules convert", "next": said}
    return {
        "verdict": "plain torch; not every module converts",
        "next": "change the lines above, or leave them",
    }


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    main(*sys.argv[1:])
