"""Generated command lines of all commands: `python -m tests.chaos.command_lines --count 300 --seed 0`.

Options and values are drawn by hypothesis, with what users and attackers type: missing folders, files in place of
folders, numbers of no end, names that are too long, digits of other scripts. A small trained run is there to be named.
Each must end with exit code 0, 1 or 2 and without a traceback, within 20 seconds, and write within its folder only.
"""

import argparse
import collections
import contextlib
import io
import os
import pathlib
import sys
import tempfile
import time
import traceback

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from jaxtrain import checkpoints, evaluate, export, lr_find, report
from jaxtrain import run as run_command
from tests.chaos import damages

LIMIT_S = 20.0
COMMANDS = {"evaluate": evaluate, "export": export, "report": report, "checkpoints": checkpoints}
COMMANDS |= {"lr_find": lr_find, "run": run_command}
FOLDERS = (
    "{run}",
    "{run}",
    "{run}",
    "{run}/checkpoints",
    "{run}/config.yaml",
    "{here}/missing",
    "/etc/passwd",
    "",
    "~",
)
FILES = ("{here}/out.pt", "{here}/out.safetensors", "{here}/out.json", "{here}/missing/out.pt", "{here}", "/dev/full")
FILES += (
    "{run}/config.yaml/out.pt",
    "{here}/" + "n" * 300 + ".pt",
    "/proc/self/out.pt",
    "",
    "-",
    "a\x00b",
    "{here}/é ١.pt",
)
NUMBERS = ("0", "1", "-1", "5", "best", "last", "20", "٢٠", "²", "99999999999999999999", "1e3", "nan", "", "x", "0x10")
VALUES = ("18446744073709551616", "2147483647", "/etc/passwd", "../..", "[" * 500, "os.system")
WORDS = ("validation", "train", "test", "nothing", "all", "fp32", "bf16", "--help", "{{", "${oc.env:HOME}")
OPTIONS = {
    "evaluate": {"--run": FOLDERS, "--checkpoint": NUMBERS, "--split": WORDS, "--output": FILES},
    "export": {"--run": FOLDERS, "--checkpoint": NUMBERS, "--output": FILES, "--hf": FILES, "--optimizer": None},
    "report": {"--run": FOLDERS, "--output": FILES},
    "checkpoints": {
        "": ("list", "verify", "prune", "x"),
        "--run": FOLDERS,
        "--keep-last": NUMBERS,
        "--keep-best": NUMBERS,
    },
    "lr_find": {"--config": ("{run}/config.yaml", *FOLDERS), "--batches": NUMBERS, "--output": FILES},
    "run": {"--config": ("{run}/config.yaml", *FOLDERS), "--resume": ("never", "auto", *FOLDERS), "--nothing": WORDS},
}
ALWAYS = {"run": ["--dry-run"]}
overrides = st.lists(
    st.builds(
        lambda key, value: f"{key}={value}",
        st.sampled_from(["model.depth", "shard.threads", "train.steps", "init_from", "run.name", "run.dir", "task"]),
        st.sampled_from(
            [*NUMBERS, "18446744073709551616", "2147483647", "/etc/passwd", "../..", "[" * 500, "os.system"]
        ),
    ),
    max_size=2,
)


@st.composite
def command_lines(draw) -> list[str]:
    command = draw(st.sampled_from(sorted(OPTIONS)))
    words = [command, *ALWAYS.get(command, [])]
    for option, values in OPTIONS[command].items():
        if draw(st.integers(0, 9)) < (9 if option in ("", "--run", "--config", "--output") else 4):
            words += [word for word in (option, draw(st.sampled_from(values)) if values else "") if word or values]
    if command in ("run", "lr_find"):
        words += draw(overrides)
    return [word for i, word in enumerate(words) if word or i > 1]


def outcome(words: list[str]) -> str:
    """ "exit 0", "exit 2", or what is wrong."""
    output, errors = io.StringIO(), io.StringIO()
    began = time.monotonic()
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
            code = COMMANDS[words[0]].main(words[1:])
    except SystemExit as error:  # argparse's
        code = error.code
    except BaseException:
        return f"wrong: {traceback.format_exc()}"
    said = output.getvalue() + errors.getvalue()
    if code not in (0, 1, 2):
        return f"wrong: exit code {code}: {said}"
    if "Traceback" in said or (code and not said.strip()):
        return f"wrong: exit code {code}, it says {said[-2000:]!r}"
    took = time.monotonic() - began
    return f"exit {code}" if took < LIMIT_S else f"wrong: it took {took:.0f} s"


def attack(count: int, seed: int) -> tuple[collections.Counter, list[str]]:
    """Outcomes of so many command lines, and what was wrong."""
    outcomes: collections.Counter = collections.Counter()
    failures: list[str] = []
    before = os.getcwd()
    with tempfile.TemporaryDirectory() as temporary:
        outside = pathlib.Path(temporary)
        here, folder = outside / "here", outside / "here/run"
        here.mkdir()
        os.chdir(here)
        try:
            damages.go_on(folder)

            @settings(
                max_examples=count,
                deadline=None,
                database=None,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            )
            @given(command_lines())
            def example(words):
                words = [word.replace("{run}", str(folder)).replace("{here}", str(here)) for word in words]
                result = outcome(words)
                if {path.name for path in outside.iterdir()} != {"here"}:
                    result = f"wrong: it wrote {list(outside.iterdir())}"
                if result.startswith("wrong"):
                    failures.append(f"{words}\n  {result}")
                    result = "wrong"
                outcomes[f"{words[0]}: {result}"] += 1

            example._hypothesis_internal_use_seed = seed
            example()
        finally:
            os.chdir(before)
    return outcomes, failures


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--count", type=int, default=300)
    p.add_argument("--seed", type=int, default=0)
    arguments = p.parse_args(argv)
    outcomes, failures = attack(arguments.count, arguments.seed)
    for failure in failures[:20]:
        print(failure)
    print(f"seed {arguments.seed}: {sum(outcomes.values())} command lines: {dict(sorted(outcomes.items()))}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
