"""SIGKILL at random moments of short runs: `python -m tests.chaos.kills --kills 100`.

A run is killed several times (at its start, while it compiles, between steps, in an evaluation, while a checkpoint is
committed, or at any moment), then left to end. Its last checkpoint must hold the bits of the run that nobody killed,
and its metrics.jsonl the same points.
"""

import collections
import pathlib
import random
import shutil
import sys
import tempfile

from tests.chaos import runs

KILLS_PER_RUN = 5
LONGEST_S = 15.0  # of a run, for a kill at any moment


def survive(folder: pathlib.Path, kills: int, chance: random.Random) -> tuple[collections.Counter, int]:
    """Kill a run so often, then let it end: kills by phase, and its exit code."""
    done: collections.Counter = collections.Counter()
    while sum(done.values()) < kills:
        moments = runs.phases(folder, chance)
        phase = chance.choice([*moments, "any"])
        process = runs.start(folder, *runs.SHORT)
        if phase == "any":
            runs.wait_for(lambda: False, process, chance.uniform(0, LONGEST_S), every_s=0.01)
        elif runs.wait_for(moments[phase], process):
            runs.wait_for(lambda: False, process, chance.choice([0, 0.01, 0.05, 0.3]))
        if runs.kill(process):
            process.wait()
            done[phase] += 1
        elif process.returncode:
            return done, process.returncode
        else:  # it had ended: the next kill needs a run to hit
            shutil.rmtree(folder)
    return done, runs.to_the_end(folder, *runs.SHORT)


def main(argv: list[str] | None = None) -> int:
    p = runs.attempts(__doc__, "kills", 100)
    arguments = p.parse_args(argv)
    chance = random.Random(arguments.seed)
    survived, phases = 0, collections.Counter()
    with tempfile.TemporaryDirectory() as temporary:
        whole = pathlib.Path(temporary) / "whole"
        assert runs.to_the_end(whole, *runs.SHORT) == 0, runs.log_of(whole).read_text()
        state, points = runs.final_state(whole), runs.points(whole)
        left = arguments.kills
        while left:
            folder = pathlib.Path(temporary) / f"killed{left}"
            kills = min(KILLS_PER_RUN, left)
            left -= kills
            done, code = survive(folder, kills, chance)
            same = code == 0 and runs.same_state(state, runs.final_state(folder))
            continuous = code == 0 and runs.points(folder) == points
            survived += kills if same and continuous else 0
            phases += done
            print(f"{dict(done)}: exit {code}, same bits {same}, same metrics {continuous}", flush=True)
            if not (same and continuous):
                print(runs.log_of(folder).read_text()[-3000:])
            shutil.rmtree(folder, ignore_errors=True)
    print(f"{survived} of {arguments.kills} kills survived, by phase {dict(phases)}")
    return 0 if survived == arguments.kills else 1


if __name__ == "__main__":
    sys.exit(main())
