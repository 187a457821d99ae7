"""What users of the five torch originals know by heart works here: their snippets, their YAML, their commands.

docs/originals/<name>.md holds the snippets after the change of their imports; where the originals' READMEs lie beside
the repository, the pages are compared with them.
"""

import pathlib
import re

import pytest

from jaxtrain import config_io, flags, run
from tests import processes
from tests.e2e.originals import hjepa, page

pytestmark = pytest.mark.slow

ROOT = pathlib.Path(__file__).parents[2]
READMES = ROOT.parent / "shared" / "originals"
NAMES = sorted(path.stem for path in page.PAGES.glob("*.md"))
YAML = [(name, block) for name in NAMES for block in page.blocks(name) if block.kind == "yaml"]
TABLES = "".join((page.PAGES / f"{name}.md").read_text() for name in NAMES)
OURS = sorted(
    command
    for command in set(re.findall(r"\| `([^`|]*-m jaxtrain\.run --config [^`]+)`", TABLES))
    if (ROOT / re.search(r"--config (\S+)", command).group(1)).is_file()
)
COUNTS = {"hjepa": 7, "memory": 7, "psy": 2, "sherlock": 8, "splatnlp": 14}
ENVIRONMENT = {"PYTHONPATH": str(ROOT), "LOCAL_RANK": "0", "WANDB_MODE": "disabled"}
beside = pytest.mark.skipif(not READMES.is_dir(), reason="the originals' READMEs are not beside the repository")


@pytest.mark.parametrize("name", NAMES)
def test_every_snippet_runs_after_changing_its_imports(name, tmp_path):
    page = "tests.e2e.originals.page"
    (printed,) = processes.run(1, name, module=page, folder=tmp_path, **ENVIRONMENT)
    print(printed)
    assert f"{name}.md: {COUNTS[name]} of {COUNTS[name]} blocks ran" in printed


@pytest.mark.parametrize(("name", "block"), YAML, ids=[f"{name}-{block.number}" for name, block in YAML])
def test_every_yaml_block_is_a_config(name, block, tmp_path):
    path = tmp_path / "original.yaml"
    path.write_text(block.code)
    overrides = re.findall(r"task=[\w.]+", block.note)
    translation = config_io.translated(path, overrides)
    assert translation.original.startswith(name)
    assert translation.unknown == []
    config_io.load(path, overrides)


def test_a_file_of_an_original_starts_a_run(tmp_path, capsys):
    path = tmp_path / "default.yaml"
    path.write_text(hjepa.DEFAULT)
    assert run.main(["--config", str(path), "--dry-run", f"run.dir={tmp_path / 'run'}", "shard.devices=1"]) == 0
    printed = capsys.readouterr().out
    assert "# a config of hjepa; here it is" in printed
    assert "hjepa.pretrain: 6,832 trained parameters, 3,696 frozen" in printed
    assert "steps: 5 of 256 samples" in printed


def test_a_metric_is_added_over_jaxs_processes():
    for output in processes.run(2, module="tests.e2e.originals.adding", PYTHONPATH=str(ROOT)):
        assert "mean over 2: [1.5, 10.0]" in output


@pytest.mark.parametrize("command", OURS)
def test_a_command_of_the_tables_names_settings_that_exist(command):
    path, overrides = re.match(r".*-m jaxtrain\.run --config (\S+)(.*)", command).groups()
    own, given = flags.split(overrides.split(), run.OPTIONS)
    task, _ = config_io.load(ROOT / path, own + flags.overrides(given, ROOT / path, own))
    assert task.loss is not None


@beside
@pytest.mark.parametrize("name", NAMES)
def test_a_page_holds_every_snippet_and_only_its_imports_differ(name):
    text = (READMES / f"{name}.md").read_text()
    ours = [block for block in page.blocks(name) if block.kind == "block" and "signature" not in block.note]
    theirs = dict(enumerate(page.originals_blocks(text, "python"), 1))
    assert len(theirs) == COUNTS[name]
    assert {int(block.number): _without_imports(block.code) for block in ours} == {
        number: _without_imports(theirs[number]) for number in (int(block.number) for block in ours)
    }
    assert [int(block.number) for block in page.blocks(name) if block.kind == "block"] == list(theirs)


@beside
@pytest.mark.parametrize("name", NAMES)
def test_a_page_holds_every_yaml_block(name):
    theirs = page.originals_blocks((READMES / f"{name}.md").read_text(), "yaml")
    ours: dict[int, str] = {}
    for block in page.blocks(name):
        if block.kind == "yaml":
            number = int(re.match(r"\d+", block.number).group())
            ours[number] = ours.get(number, "") + block.code
    assert {number: _lines(code) for number, code in ours.items()} == {
        number: _lines(code) for number, code in enumerate(theirs, 1)
    }


@beside
@pytest.mark.parametrize("name", NAMES)
def test_a_pages_table_holds_every_command(name):
    commands = _commands((READMES / f"{name}.md").read_text())
    table = [line for line in (page.PAGES / f"{name}.md").read_text().splitlines() if line.startswith("| `")]
    mapped = {re.sub(r"\s+", " ", re.match(r"\| `(.+?)` \|", line).group(1)) for line in table}
    assert commands - mapped == set()
    print(f"{name}.md: {len(commands)} of {len(commands)} commands mapped")


def _lines(code: str) -> list[str]:
    return [line.rstrip() for line in code.splitlines() if line.strip()]


def _without_imports(code: str) -> list[str]:
    return [line for line in _lines(code) if not re.match(r"(from|import) ", line)]


def _commands(text: str) -> set[str]:
    """Every command line of the README's shell blocks; `python -c` without its program."""
    found = set()
    for code in page.originals_blocks(text, "bash"):
        code = re.sub(r'python -c ".*?"', 'python -c "..."', code, flags=re.S)
        for line in re.sub(r"\\\n\s*", "", code).splitlines():
            command = re.sub(r"\s+", " ", line.split("  #")[0]).strip()
            if command and not command.startswith("#"):
                found.add(command)
    return found
