"""SIGTERM, SIGUSR1, SIGHUP and SIGINT in every phase of a run: `python -m tests.chaos.terms --terms 20`.

Each must end the run with exit code 75 (130 for SIGINT), without a traceback, within its grace period, the state of the
last step saved; started again, the run must end with the bits and the logged points of the run that nobody interrupted.
"""

import pathlib
import random
import re
import shutil
import signal
import sys
import tempfile
import time

from tests import processes
from tests.chaos import runs

SLOW = (*runs.SHORT, "task=tests.chaos.slow_digits.classify")
PREEMPTING = [signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP]
GRACE_S = 20.0
PHASES = ("start", "compile", "rescue", "step", "evaluation", "stall", "commit", "twice", "two processes")
SLACK_S = 12.0  # for the interpreter to end, on a busy machine


def interrupt(phase: str, folder: pathlib.Path, chance: random.Random) -> str:
    """Start a run, interrupt it in that phase; what is wrong with its end, or nothing."""
    number = chance.choice([*PREEMPTING, signal.SIGINT])
    if phase == "two processes":
        return _interrupt_one_of_two(folder, number, chance)
    grace_s = 4.0 if phase == "rescue" else GRACE_S
    environment = {"stall": {"CHAOS_STALL_AT": str(chance.randint(200, 900))}, "evaluation": {"CHAOS_SLOW_S": "0.01"}}
    cache = folder.with_name(folder.name + "-cache") if phase in ("compile", "rescue") else None
    settings = (*SLOW, f"checkpoint.grace_s={grace_s}")
    moments = runs.phases(folder, chance)
    process = runs.start(folder, *settings, cache=cache, **environment.get(phase, {}))
    ready, pause = {
        "start": (moments["start"], chance.uniform(1, 4)),
        "compile": (moments["compile"], chance.uniform(0, 3)),
        "rescue": (moments["compile"], chance.uniform(0, 1)),
        "evaluation": (moments["step"], chance.uniform(0.5, 2)),
        "stall": (moments["step"], 4),
        "twice": (moments["step"], 0),
    }.get(phase, (moments.get(phase), 0))
    if not runs.wait_for(ready, process):
        return f"it had ended before: {runs.log_of(folder).read_text()[-1000:]}"
    time.sleep(pause)
    sent = time.monotonic()
    if not runs.kill(process, number):
        return "it had ended before"
    if phase == "twice":
        for _ in range(5):
            time.sleep(0.02)
            runs.kill(process, chance.choice(PREEMPTING))
    code = process.wait(300)
    took = time.monotonic() - sent
    return _wrong(folder, number, code, took, grace_s, runs.log_of(folder).read_text())


def _interrupt_one_of_two(folder: pathlib.Path, number: int, chance: random.Random) -> str:
    """One of them is told; both must save the same step."""
    arguments = ("--config", str(runs.CONFIG), f"run.dir={folder}", *SLOW, f"checkpoint.grace_s={GRACE_S}")
    running = processes.start(2, *arguments)
    moments = runs.phases(folder, chance)
    if not runs.wait_for(moments["step"], running[0]):
        return "it had ended before"
    time.sleep(chance.uniform(0, 0.5))
    sent = time.monotonic()
    running[chance.randint(0, 1)].send_signal(number)
    results = processes.finish(running)
    took = time.monotonic() - sent
    if {code for code, _ in results} != {_wanted(number)}:
        return f"exit codes {[code for code, _ in results]}: {results[0][1][-2000:]}{results[1][1][-2000:]}"
    return _wrong(folder, number, _wanted(number), took, GRACE_S, results[0][1])


def _wanted(number: int) -> int:
    return 130 if number == signal.SIGINT else runs.PREEMPTED


def _wrong(folder: pathlib.Path, number: int, code: int, took: float, grace_s: float, output: str) -> str:
    if code != _wanted(number) or "Traceback" in output:
        return f"{signal.Signals(number).name}: exit code {code}: {output[-2000:]}"
    if took > grace_s + SLACK_S:
        return f"it took {took:.1f} s with a grace period of {grace_s:g} s"
    if "nothing to save at this point" in output:
        return ""
    said = re.findall(r"(?:preempted|interrupted) \(.*?\): the checkpoint of step (\d+) is saved", output)
    if not said:
        return f"no word of a saved step: {output[-2000:]}"
    newest = max((int(path.name) for path in (folder / "checkpoints").iterdir() if path.name.isdigit()), default=-1)
    return "" if int(said[-1]) == newest else f"it says step {said[-1]} is saved, the newest is {newest}"


def main(argv: list[str] | None = None) -> int:
    p = runs.attempts(__doc__, "terms", 20)
    p.add_argument("--phases", nargs="+", choices=PHASES, default=PHASES)
    arguments = p.parse_args(argv)
    chance = random.Random(arguments.seed)
    for number in (signal.SIGINT, signal.SIGHUP):  # ignored under nohup and in the background, and so by the runs
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    good = 0
    with tempfile.TemporaryDirectory() as temporary:
        whole = pathlib.Path(temporary) / "whole"
        assert runs.to_the_end(whole, *SLOW) == 0, runs.log_of(whole).read_text()
        state, points = runs.final_state(whole), runs.points(whole)
        for i in range(arguments.terms):
            phase = arguments.phases[i % len(arguments.phases)]
            folder = pathlib.Path(temporary) / f"run{i}"
            wrong = interrupt(phase, folder, chance)
            if not wrong and runs.to_the_end(folder, *SLOW) != 0:
                wrong = f"it did not go on: {runs.log_of(folder).read_text()[-2000:]}"
            if not wrong and not (exact(phase, state, points, folder)):
                wrong = "it went on to another state or other points"
            good += not wrong
            print(f"{phase}: {wrong or 'saved, resumed exactly'}", flush=True)
            shutil.rmtree(folder, ignore_errors=True)
    print(f"{good} of {arguments.terms} signals: saved within the grace period and resumed exactly")
    return 0 if good == arguments.terms else 1


def exact(phase: str, state: dict, points: list, folder: pathlib.Path) -> bool:
    """The same bits; to 1e-5 where two processes began what one ended, because sums have another order."""
    if phase != "two processes":
        return runs.same_state(state, runs.final_state(folder)) and runs.points(folder) == points
    ours = runs.points(folder)
    return [point[:2] for point in ours] == [point[:2] for point in points] and all(
        abs(a[2]["loss"] - b[2]["loss"]) <= 1e-5 * abs(b[2]["loss"]) for a, b in zip(ours, points, strict=True)
    )


if __name__ == "__main__":
    sys.exit(main())
