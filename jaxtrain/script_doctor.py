"""Say how a training script would run, without training: `python -m jaxtrain.doctor --script train.py`.

The script runs in a process of its own, up to its first updates; then it is stopped. The loss of a loop in plain torch
is compiled from the loop's lines, and a script of a library's trainer runs once more with the drop-in's import.
"""

import contextlib
import gc
import io
import json
import logging
import os
import pathlib
import subprocess
import sys
import tempfile
import time
import types
from typing import Any

from jaxtrain import script_imports
from jaxtrain.errors import UserError

CALLS = 3  # of each compiled step: the first runs in torch or is compiled, the second may be compiled, the third is not
UPDATES = 8  # of a loop in plain torch that are watched; each tells a batch's shapes
MANY_SHAPES = 3  # in as many batches: more will come


class Enough(BaseException):
    """Ends the script; no `except Exception` of its own holds it."""


def examine(script: str, arguments: list[str], timeout_s: float = 600.0) -> dict[str, Any]:
    """Run the script in a process of its own and return the report. Raises UserError if there is no such script, or if
    it takes longer than `timeout_s` to its first updates."""
    if not pathlib.Path(script).is_file():
        raise UserError(f"--script {script}: there is no such file")
    source = pathlib.Path(script).read_text()
    found = _in_a_process(script, source, arguments, timeout_s)
    if found["library"]:
        found = _with_drop_in(found, source, arguments, timeout_s)
    return {**found, **_verdict(found)}


def _in_a_process(script: str, source: str, arguments: list[str], timeout_s: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        out, text = pathlib.Path(folder) / "report.json", pathlib.Path(folder) / "script.py"
        text.write_text(source)
        command = [sys.executable, "-m", "jaxtrain.script_doctor", str(out), str(text), script, *arguments]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
        except subprocess.TimeoutExpired:
            raise UserError(f"--script {script}: no update within {timeout_s:g} s; give it less data") from None
        if not out.exists():
            raise UserError(f"--script {script}: the process ended with {done.returncode}: {done.stderr[-500:]}")
        return json.loads(out.read_text())


def _with_drop_in(found: dict[str, Any], source: str, arguments: list[str], timeout_s: float) -> dict[str, Any]:
    """Return the report with what the script does under the drop-in's import, which is the change that it needs."""
    lines = script_imports.changes(source, found["library"])
    if not lines:
        return found
    after = _in_a_process(found["script"], script_imports.changed(source, lines), arguments, timeout_s)
    kept = {name: after[name] for name in ("steps", "error")}
    return {**found, **kept, "modules": [], "change": [change._asdict() for change in lines]}


def describe(found: dict[str, Any]) -> list[str]:
    """Return the report as lines."""
    lines = [f"{found['script']}: {found['verdict']}"]
    for step in found["steps"]:
        count = step["programs"]
        lines.append(
            f"  {step['name']}: {count} program{'s' * (count != 1)}, first call {step['first_call_s']:.1f} s, "
            + (f"torch runs it: {step['in_torch']}" if step["in_torch"] else "one program per call")
            + (f", {step['shapes']} shapes in {step['batches']} batches" if step["shapes"] > 1 else "")
        )
        lines += [f"    {line}" for line in step["explain"]]
        if step["torch_s"] and step["step_s"] and not step["in_torch"]:
            lines.append(f"    here: {1e3 * step['torch_s']:.2f} ms in torch, {1e3 * step['step_s']:.2f} ms compiled")
    for module in found["modules"]:
        how = "converts whole" if module["one_program"] else "does not convert"
        lines.append(f"  {module['module']} ({module['parameters']:,} parameters): {how}")
        lines += [f"    {line}" for line in module["why"].splitlines()]
    if found["error"]:
        lines.append(f"  the script stopped: {found['error']}")
    return [*lines, f"  next: {found['next']}"]


def main(out: str, text: str, script: str, *arguments: str) -> None:
    """Run the script, whose source is in `text`, until Enough, and write the report as JSON to `out`."""
    from jaxtrain.compiled_step import CompiledStep
    from jaxtrain.runtime.background import WAIT
    from jaxtrain.train.trainer import Trainer
    from torch_bridge.capture.module_call import ModuleCall
    from torch_bridge.script_watch import Watch

    watch, calls, trainers = Watch(script_imports.DROP_INS), _Calls(), []
    calls.of_steps(CompiledStep, watch.stop_looking)
    calls.of_modules(ModuleCall, watch.stop_looking)

    def planned(trainer: Any, *args: Any, **kwargs: Any) -> Any:
        trainers.append(_of_trainer(trainer))
        raise Enough

    def after_update(count: int) -> None:
        compiled = calls.modules or calls.steps
        slow = time.perf_counter() - started > 60.0
        if count >= (CALLS if compiled or slow else UPDATES) and not calls.steps:
            raise Enough

    Trainer.train = planned  # in this process alone
    os.environ[WAIT] = "1"  # the programs are what is looked for
    error, started = "", time.perf_counter()
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(pathlib.Path(script).resolve().parent))
    own = types.ModuleType("__main__")
    own.__file__, sys.modules["__main__"] = script, own
    try:
        with watch.watching(after_update), contextlib.redirect_stdout(io.StringIO()):
            exec(compile(pathlib.Path(text).read_text(), script, "exec"), own.__dict__)
    except (Enough, SystemExit):
        pass
    except BaseException as raised:
        error = f"{type(raised).__name__}: {' '.join(str(raised).split())}"[:2000]
    steps = [*calls.found(), *trainers]
    library = "" if steps else watch.library
    modules: list[dict[str, Any]] = []
    if not steps and not library and watch.updates:
        steps, modules = _of_loops(watch, calls)
    found = {"script": script, "library": library, "updates": len(watch.updates), "plain": not (calls.used or trainers)}
    found |= {"steps": steps, "modules": modules, "change": [], "error": error}
    pathlib.Path(out).write_text(json.dumps(found))


class _Calls:
    """Calls of jaxtrain in the script: steps of `compile` and the drop-ins, and modules that run compiled. used: any
    was called by the script itself."""

    def __init__(self) -> None:
        self.steps: dict[int, Any] = {}
        self.modules: dict[int, Any] = {}
        self.times: dict[int, list[float]] = {}
        self.shapes: dict[int, set] = {}
        self.reasons: list[str] = []
        self.used = False

    def of_steps(self, kind: type, begin: Any) -> None:
        """Time every call of a CompiledStep; end the script after CALLS calls of one."""
        call, after_call = kind.captured, kind.after_call

        def timed(step: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
            begin()
            self.used = True
            self.steps[id(step)] = step
            self.shapes.setdefault(id(step), set()).add(step.weights.bridge.shapes_of(batch))
            began = time.perf_counter()
            try:
                return call(step, batch, *args, **kwargs)
            finally:
                self.times.setdefault(id(step), []).append(time.perf_counter() - began)

        def counted(step: Any, updated: Any) -> None:
            after_call(step, updated)
            if id(step) in self.steps and step.count >= CALLS:
                raise Enough

        kind.captured, kind.after_call = timed, counted

    def of_modules(self, kind: type, begin: Any) -> None:
        """Note the modules that run compiled in a loop of torch's, and what of them torch runs."""
        call = kind.__call__

        def timed(module: Any, *args: Any, **kwargs: Any) -> Any:
            begin()
            self.used = True
            self.modules[id(module)] = module
            began = time.perf_counter()
            try:
                return call(module, *args, **kwargs)
            finally:
                self.times.setdefault(id(module), []).append(time.perf_counter() - began)

        kind.__call__ = timed
        handler = logging.Handler()
        handler.emit = lambda record: self.reasons.append(record.getMessage())
        logging.getLogger("torch_bridge.capture.backend").addHandler(handler)

    def found(self) -> list[dict[str, Any]]:
        """Return a row for every step and for the modules together."""
        rows = [self.of_step(step) for step in self.steps.values()]
        return [*rows, *([] if rows else self._of_modules())]

    def of_step(self, step: Any, name: str = "") -> dict[str, Any]:
        times, reason = self.times.get(id(step), []), step.torch or step.refused
        return _row(
            name or getattr(step.loss_fn, "__name__", "the loss"),
            len(step.programs),
            times,
            in_torch="" if reason is None else str(getattr(reason, "reason", reason)),
            explain=step.explain().splitlines(),
            shapes=len(self.shapes.get(id(step), ())),
            batches=len(times),
        )

    def _of_modules(self) -> list[dict[str, Any]]:
        from torch_bridge.capture.compiled_graph import CompiledGraph

        if not self.modules:
            return []
        graphs = [each for each in gc.get_objects() if type(each) is CompiledGraph]
        names = [type(each._module).__name__ for each in self.modules.values()]
        times = [float(sum(each)) for each in zip(*self.times.values(), strict=False)]
        parts = [f"{len(graphs)} graphs, forward and backward, in torch's autograd graph", *self.reasons]
        programs = sum(len(getattr(graph, "_programs", ())) for graph in graphs)
        return [_row(", ".join(names), programs, times, in_torch="; ".join(self.reasons), explain=parts)]


def _row(name: str, programs: int, times: list[float], **facts: Any) -> dict[str, Any]:
    """Return what the report says of a step. times: of its calls; the first has compiled."""
    row = {"name": name, "programs": programs, "first_call_s": round(times[0], 3) if times else 0.0}
    row |= {"step_s": min(times[1:], default=0.0), "torch_s": 0.0, "calls": len(times), "in_torch": "", "explain": []}
    return {**row, "shapes": 1, "batches": len(times), "where": "", **facts}


def _of_trainer(trainer: Any) -> dict[str, Any]:
    """Compile a Trainer's step for its first batch, without a run folder."""
    began = time.perf_counter()
    program = trainer.program
    program.train_step(1).jitted.lower(*program.abstract_arguments(1)).compile()
    explain = [f"batches may have up to {program.train_shapes} shapes, each a program"]
    return _row("Trainer", 1, [time.perf_counter() - began], calls=0, explain=explain)


def _of_loops(watch: Any, calls: _Calls) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Compile the loss of every optimizer's loop and run it on the batches seen; of a loop whose loss does not stand in
    one block, tell which modules convert."""
    from torch_bridge.script_loop import CannotExtract, loop_of

    steps, reasons = [], []
    for optimizer in watch.optimizers:
        try:
            steps.append(_of_loop(loop_of(watch.of(optimizer)), watch.of(optimizer), calls))
        except (CannotExtract, SyntaxError) as error:
            reasons.append(str(error))
    return steps, watch.conversions() if reasons else []


def _of_loop(loop: Any, updates: list[Any], calls: _Calls) -> dict[str, Any]:
    import statistics

    from jaxtrain.compiled_step import compile_many
    from torch_bridge.script_loop import joined

    seconds = [update.seconds for update in updates if update.seconds]
    facts = {"where": loop.where, "shapes": loop.shapes, "batches": len(loop.batches), "backward": loop.backward}
    facts["torch_s"] = statistics.median(seconds) if seconds else 0.0
    used = calls.used
    try:
        step = compile_many({"modules": joined(loop)}, {"loss": (loop.loss_fn, updates[0].optimizer)}, wait=True)[
            "loss"
        ]
        with contextlib.suppress(Enough), contextlib.redirect_stdout(io.StringIO()):
            for batch in (loop.batches * CALLS)[:CALLS]:
                step(batch)
        row = calls.of_step(step, f"loop at {loop.where}")
    except Exception as error:  # the step's, or the script's when its lines run alone
        why = f"{type(error).__name__}: {' '.join(str(error).split())}"[:1000]
        row = _row(f"loop at {loop.where}", 0, [], in_torch=why, explain=[])
    calls.used = used
    if loop.shapes > row["shapes"] and row["programs"]:
        facts["programs"] = max(row["programs"], loop.shapes)
    return {**row, **facts}


def _verdict(found: dict[str, Any]) -> dict[str, str]:
    steps, modules = found["steps"], found["modules"]
    in_torch = [step for step in steps if step["in_torch"]]
    many = [step for step in steps if step["batches"] >= MANY_SHAPES and step["shapes"] >= step["batches"]]
    do = _change(found)
    pad = "every batch has a shape of its own: pad them to a few in the collate function (docs/troubleshooting.md)"
    if not steps and not modules:
        said = "mend the error" if found["error"] else "no module was trained: name the script that trains"
        return {"verdict": "nothing was compiled", "next": said}
    if in_torch:
        lines = "; ".join(dict.fromkeys(f"{step['in_torch']} ({_advice(step['in_torch'])})" for step in in_torch))
        rest = f"; then {do}" if do else ""
        return {"verdict": "part of it runs in torch", "next": f"change {lines}{rest}"}
    if steps and found["plain"]:
        said = f"plain torch ({found['updates']} updates seen); its steps compile, each as one program per call"
        return {"verdict": said, "next": f"{do}; {pad}" if many else do}
    if steps and not modules:
        return {"verdict": "runs as compiled programs", "next": pad if many else "nothing to change"}
    if all(module["one_program"] for module in modules):
        said = "jaxtrain.compile(module, loss_fn, optimizer) in place of backward and step (docs/own_loop.md)"
        return {"verdict": f"plain torch ({found['updates']} updates seen); its modules convert", "next": said}
    return {"verdict": "plain torch; not every module converts", "next": "change the lines above, or leave them"}


def _advice(reason: str) -> str:
    """Return what to do about a reason why torch runs a step."""
    if "data-dependent" in reason.lower() or "values of a tensor" in reason:
        return "torch.where or a mask instead of a branch or a shape that depends on values"
    if "skipped" in reason or "numpy" in reason:
        return "compute it with torch's operators, or outside of the loss, as a part of the batch"
    if "no lowering" in reason:
        return "another operator, or torch_bridge.lowering.register for this one (CONTRIBUTING.md)"
    return "or leave it: torch then runs it around the compiled modules, exact but slower"


def _change(found: dict[str, Any]) -> str:
    """Return the smallest change by which a script in plain torch runs compiled."""
    if found["change"]:
        return "; ".join(f"line {change['line']}: {change['then']}" for change in found["change"])
    if found["library"]:
        return f"import jaxtrain's drop-in for {found['library']} where its trainer is made (docs/drop_in.md)"
    if not found["plain"]:
        return ""
    loops = [step for step in found["steps"] if step["where"]]
    lines = ", ".join(step["where"].rpartition(":")[2] for step in loops)
    made = "jaxtrain.compile(module, loss_fn, optimizer)" if len(loops) == 1 else "jaxtrain.compile_many"
    moved = f"lines {lines} become" if len(loops) > 1 or "-" in lines else f"line {lines} becomes"
    return (
        f"{moved} loss_fn(module, batch), and {made} takes the place of zero_grad, backward and step (docs/own_loop.md)"
    )


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    main(*sys.argv[1:])
