"""`jaxtrain completion` gives shells the commands and options as they are."""

import re
import shutil
import subprocess
import sys

import pytest

from jaxtrain import completion
from jaxtrain.__main__ import COMMANDS


@pytest.fixture(scope="module")
def scripts():
    return {shell: completion.script(shell) for shell in ("bash", "zsh", "fish")}


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("re", ["report"]),
        ("", list(COMMANDS)),
        ("report --w", ["--watch"]),
        ("run --optim.sch", ["--optim.schedule.name"]),
        ("nothing --w", []),
    ],
)
def test_bash_offers_what_begins_as_typed(scripts, typed, offered):
    words = ["jaxtrain", *typed.split(" ")]
    line = f"COMP_WORDS=({' '.join(map(repr, words))}); COMP_CWORD={len(words) - 1}; _jaxtrain"
    code = f"{scripts['bash']}\n{line}\nprintf '%s\\n' \"${{COMPREPLY[@]}}\""
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr == ""
    found = done.stdout.split()
    assert found == offered or (typed.startswith("run") and set(offered) <= set(found))


def test_fish_and_zsh_name_every_command(scripts):
    for name in COMMANDS:
        assert f" -a {name} -d " in scripts["fish"]
        assert f"      {name}) words=" in scripts["zsh"]


def test_the_script_is_made_without_importing_torch_or_jax():
    code = "import sys; from jaxtrain import completion; completion.script('bash'); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert {"torch", "jax"}.isdisjoint(done.stdout.split())


def test_torchruns_options_are_those_of_its_help():
    run = pytest.importorskip("torch.distributed.run")
    text = run.get_args_parser().format_help()
    shown = {option for line in re.findall(r"^  (-.*)", text, re.M) for option in re.findall(r"--[a-z][\w-]*", line)}
    assert "--nproc-per-node" in shown
    assert shown - {"--help"} <= set(completion.torchrun_options())
