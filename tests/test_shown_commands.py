"""Every command that the README and the documentation show is executed by a test, or listed with the reason why not."""

import functools
import importlib
import pathlib
import re

import pytest

from jaxtrain import commands, config_io, flags
from jaxtrain.__main__ import COMMANDS
from jaxtrain.tuning import space
from tests.shown_commands import ELSEWHERE, LONG, NOT_RUN, RUN, in_turn, words

pytest.importorskip("torch", reason="the commands of the pages export to torch and verify there")

ROOT = pathlib.Path(__file__).parents[1]
FOLDERS = (ROOT / "docs", ROOT / "examples")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(page for folder in FOLDERS for page in folder.rglob("*.md"))]
STARTS = re.compile(
    r"(?:[A-Z_]+=\S+ )*(?:python3?|jaxtrain|torchrun|srun|mpirun|accelerate|make|pip|bash|mkdocs|sbatch|kubectl) "
)
MENTION = re.compile(r"(?:.* )?\.\.\.|(?:jaxtrain |python -m jaxtrain\.)\w+(?: --[a-z]+)?(?: [A-Z])?")
SYNOPSIS = re.compile(r"((?:jaxtrain|torch_bridge|benchmarks)\.\w+) (--?\w.*)")


@functools.cache
def inline_and_blocks(page: pathlib.Path) -> tuple[list[str], list[str]]:
    """The code between single backticks, and the lines of shell blocks, of our commands only."""
    text = page.read_text()
    if page.parent.name == "originals":
        text = re.sub(r"^\| `[^`]*` \|", "|", text, flags=re.M)  # the original's own command
    fence = re.compile(r"^ *```(\w*)\n(.*?)^ *```", re.S | re.M)
    blocks = [re.sub(r"\\\n\s*", "", code) for kind, code in fence.findall(text) if kind in ("", "bash", "sh", "shell")]
    lines = [re.split(r"\s+# ", line)[0] for block in blocks for line in block.splitlines()]
    inline = re.findall(r"`([^`\n]+)`", fence.sub("", text).replace(r"\|", "|"))
    clean = lambda found: [re.sub(r"\s+", " ", code).strip() for code in found]
    return clean(inline), clean(lines)


@functools.cache
def shown() -> dict[str, list[str]]:
    """Command -> the pages that show it."""
    found: dict[str, list[str]] = {}
    for page in PAGES:
        for code in (code for part in inline_and_blocks(page) for code in part):
            if STARTS.match(code):
                found.setdefault(code, []).append(str(page.relative_to(ROOT)))
    return found


LISTED = [
    command for group in (*RUN.values(), *LONG.values(), *ELSEWHERE.values(), *NOT_RUN.values()) for command in group
]
NO_SETTINGS = {"python -m torch_bridge.torchvision_operators"}  # lies below jaxtrain.commands and takes no argument
OURS = sorted(
    command
    for command in LISTED
    if re.search(r"(^|python -m )(jaxtrain|torch_bridge)\b", command) and command not in NO_SETTINGS
)


def test_every_command_shown_is_executed_or_listed_with_its_reason():
    new = {code: pages for code, pages in shown().items() if code not in LISTED and not MENTION.fullmatch(code)}
    assert new == {}, (
        "add it to tests/shown_commands.py: RUN or LONG, ELSEWHERE with its test, or NOT_RUN with the reason"
    )
    counts = [sum(map(len, group.values())) for group in (RUN, ELSEWHERE, LONG, NOT_RUN)]
    print(
        "{} commands run here, {} in other tests, {} in tests/chaos/shown_commands.py, {} do not: ".format(*counts)
        + "; ".join(NOT_RUN)
    )


def test_every_listed_command_is_shown_and_stands_in_one_place():
    extra = {"python -m torch_bridge.verify --run runs/digits"}  # the README shows its synopsis
    assert [command for command in LISTED if command not in shown() and command not in extra] == []
    assert sorted(set(LISTED)) == sorted(LISTED)


def test_a_command_that_a_page_mentions_by_name_exists(capsys):
    for command in filter(MENTION.fullmatch, shown()):
        found = re.fullmatch(r"(?:jaxtrain |python -m jaxtrain\.)(\w+)(?: (--\w+))?.*", command)
        if found is not None:
            assert found.group(1) in COMMANDS, command
            assert (found.group(2) or "") in help_of(words(f"jaxtrain {found.group(1)}")[0], capsys)


@pytest.mark.parametrize("test", ELSEWHERE)
def test_a_test_that_executes_a_command_exists(test):
    path, _, name = test.partition("::")
    text = (ROOT / path).read_text()
    assert f"def {name}(" in text if name else "def test_" in text


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_flag_of_a_synopsis_exists(page, capsys):
    for module, usage in (found.groups() for found in map(SYNOPSIS.fullmatch, inline_and_blocks(page)[0]) if found):
        told = help_of(module, capsys)
        assert [flag for flag in re.findall(r"--[a-z][\w-]*", usage) if flag not in told] == [], (module, usage)


def help_of(module: str, capsys) -> str:
    with pytest.raises(SystemExit):
        importlib.import_module(module).main(["--help"])
    return capsys.readouterr().out


@pytest.mark.parametrize("command", OURS)
def test_a_shown_command_parses_and_names_settings_that_exist(command, monkeypatch):
    seen = []
    monkeypatch.setattr(commands, "main", lambda run, arguments: seen.append(arguments) or 0)
    module, given = words(command.replace("[", "").replace("]", "") if "lr_find" in command else command)
    assert importlib.import_module(module).main(given) == 0
    config = ROOT / str(getattr(seen[0], "config", ""))
    if config.is_file():
        values = config_io.merged(config, seen[0].overrides + _as_overrides(seen[0], config))
        config_io.check(values, config)
        if module == "jaxtrain.tune":
            space.check(space.load(ROOT / seen[0].space), values, config)


def _as_overrides(arguments, config):
    return flags.overrides(getattr(arguments, "flags", ()), config, arguments.overrides)


@pytest.mark.parametrize("chain", RUN)
def test_the_commands_run_one_after_the_other(chain, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    failed = [command for command, code in in_turn(chain, RUN[chain]) if code != 0]
    assert failed == []
