"""Generated configs and command lines for `jaxtrain.run --dry-run`: `python -m tests.chaos.config_fuzz --count 2000`.

Each must be taken (exit code 0) or refused with exit code 2 and a message that names a key which was set, the file, or
the argument; an exception that leaves the command, another exit code, or a minute without an end is a failure.
"""

import argparse
import collections
import contextlib
import io
import pathlib
import sys
import tempfile
import time

import yaml
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from jaxtrain import config_io, config_mistakes, run
from jaxtrain.task import find_task

TASK = "digits.classify"
KEYS = config_mistakes.dotted_keys(config_io.schema(find_task(TASK)))
WORDS = tuple(
    "auto many null true no fp32 bf16 cosine constant plateau adamw sgd muon lion adafactor ddp fsdp hsdp torch numpy "
    "device host max min loss accuracy full skip weighted highest ${optim.lr} ${nothing.here} ${oc.env:HOME} $ { [1 é "
    "1e-3 1_000 0x10 .5 nan inf -inf ~ %".split(" ")
) + ("", " ", "\t", "a: b", "!!python/object/apply:os.system [true]")
NUMBERS = (-1, 0, 1, 2, 3, 7, 32, 64, 100, 1000, 4096, 10**30, -0.5, 0.0, 1e-9, 1e-3, 0.5, 0.999, 1.0, 1.5, 1e300)
scalars = st.sampled_from(WORDS) | st.sampled_from(NUMBERS) | st.sampled_from([None, True, False])
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(WORDS), inner, max_size=2),
    max_leaves=4,
)
known = st.sampled_from([key for key in KEYS if key != "task"])
names = st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), min_size=1, max_size=8)
unknown = names | st.builds(lambda key, tail: f"{key}{tail}", known, names) | st.sampled_from([k[:-1] for k in KEYS])
tasks = st.sampled_from(
    [TASK] * 12
    + ["digits", "digits.clasify", "os", "json.tool", "/etc/passwd", "../digits", ".", "..", "a b", "", 3, None]
)
overrides = st.lists(
    st.builds(lambda key, value: f"{key}={value}", known | unknown, scalars)
    | st.sampled_from(
        ["=", "optim.lr", "optim..lr=1", "optim[0]=1", "[0]=1", "a.b.c.d=1", "optim=3", "--nothing", "-x"]
    ),
    max_size=2,
)


@st.composite
def documents(draw) -> tuple[str, list[str]]:
    """The text of a config, and the keys that it sets."""
    if draw(st.integers(0, 19)) == 0:
        return draw(st.text(max_size=60)), []
    content: dict = {"task": draw(tasks), "model": {"embed_dim": 16, "depth": 1, "num_heads": 2}}
    keys = ["task"]
    for key in draw(st.lists(known | unknown, max_size=3)):
        keys.append(key)
        *sections, leaf = key.split(".")
        target = content
        for section in sections:
            inner = target.setdefault(section, {})
            target = inner if isinstance(inner, dict) else target
        target[leaf] = draw(values)
    return yaml.safe_dump(content, allow_unicode=True), keys


def outcome(text: str, keys: list[str], command_line: list[str], folder: pathlib.Path) -> str:
    """ "taken", "refused", or what is wrong."""
    path = folder / "fuzzed.yaml"
    path.write_text(text)
    output, errors = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
            code = run.main(["--config", str(path), "--dry-run", *command_line])
    except SystemExit as error:  # argparse's
        code = error.code
    except Exception as error:
        return f"{type(error).__name__} left the command: {error}"
    said = errors.getvalue()
    if code == 0:
        return "taken"
    if code != 2:
        return f"exit code {code}: {said}"
    parts = {
        part for key in (*keys, *(c.partition("=")[0] for c in command_line)) for part in (key, key.split(".")[-1])
    }
    named = (
        any(part and part in said for part in parts) or str(path) in said or "argument" in said or "override" in said
    )
    return "refused" if named and "Traceback" not in said else f"its message names nothing: {said}"


def fuzz(count: int, seed: int) -> tuple[collections.Counter, list[str], float]:
    """Outcomes of so many examples, what was wrong, and the longest example in seconds."""
    outcomes: collections.Counter = collections.Counter()
    failures: list[str] = []
    longest = 0.0
    with tempfile.TemporaryDirectory() as temporary:

        @settings(
            max_examples=count,
            deadline=None,
            database=None,
            derandomize=False,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(documents(), overrides)
        def example(document, command_line):
            nonlocal longest
            began = time.perf_counter()
            result = outcome(*document, command_line, pathlib.Path(temporary))
            longest = max(longest, time.perf_counter() - began)
            if result not in ("taken", "refused"):
                failures.append(f"{result}\n  config: {document[0]!r}\n  arguments: {command_line}")
                result = "wrong"
            outcomes[result] += 1

        example._hypothesis_internal_use_seed = seed
        example()
    return outcomes, failures, longest


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--count", type=int, default=2000)
    p.add_argument("--seed", type=int, default=0)
    arguments = p.parse_args(argv)
    outcomes, failures, longest = fuzz(arguments.count, arguments.seed)
    for failure in failures[:20]:
        print(failure)
    print(f"{sum(outcomes.values())} configs and command lines: {dict(outcomes)}; the longest took {longest:.1f} s")
    return 1 if failures or longest > 60 else 0


if __name__ == "__main__":
    sys.exit(main())
