"""Write docs/drop_in_flags.md, every flag, hook and method of the three APIs: `python docs/generate_drop_in_flags.py`.

Names come from the installed libraries' own signatures. A name without an answer in `drop_in_answers.py` is an error,
so that a new release's new flag is looked at before it is promised.
"""

import dataclasses
import inspect
import pathlib
import sys
import textwrap
from collections.abc import Callable, Iterator

sys.path.insert(0, str(pathlib.Path(__file__).parent))

import drop_in_answers

from torch_bridge.torchvision_operators import declare_torchvision

declare_torchvision()

import accelerate  # noqa: E402
import lightning.pytorch as pl  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402

PAGE = pathlib.Path(__file__).with_name("drop_in_flags.md")
HEAD = """# Flags, hooks and methods of the three APIs

What [changing one import](drop_in.md) does with each name of lightning {lightning}, transformers {transformers} and
accelerate {accelerate}. `python docs/generate_drop_in_flags.py` writes this page from their signatures; a name that a
new release adds fails a test until it stands here. *Yes*: the library's own code handles it, around the compiled step.
*No*: refused with a sentence before anything is trained. *Ignored*: accepted, without an effect.
"""


def parameters(function: Callable) -> list[str]:
    """The names of a function's arguments."""
    return [name for name in inspect.signature(function).parameters if name != "self"]


def methods(kind: type, base: type = object) -> list[str]:
    """The public methods of a class beyond those of `base`."""
    own = (name for name in dir(kind) if not name.startswith("_") and name not in dir(base))
    return [name for name in own if callable(getattr(kind, name)) and not isinstance(getattr(kind, name), type)]


def fields(kind: type, base: type | None = None) -> list[str]:
    """The fields of a dataclass beyond those of `base`."""
    before = {field.name for field in dataclasses.fields(base)} if base else set()
    return [field.name for field in dataclasses.fields(kind) if field.name not in before]


def found() -> dict[str, list[str]]:
    """Every name by section."""
    arguments = transformers.TrainingArguments
    return {
        "lightning.Trainer(...)": parameters(pl.Trainer.__init__),
        "lightning.Trainer methods": methods(pl.Trainer),
        "LightningModule": methods(pl.LightningModule, torch.nn.Module),
        "LightningDataModule": methods(pl.LightningDataModule),
        "lightning Callback": methods(pl.Callback),
        "TrainingArguments": fields(arguments),
        "Seq2SeqTrainingArguments": fields(transformers.Seq2SeqTrainingArguments, arguments),
        "transformers.Trainer(...)": parameters(transformers.Trainer.__init__),
        "transformers.Trainer methods": methods(transformers.Trainer),
        "TrainerCallback": methods(transformers.TrainerCallback),
        "Accelerator(...)": parameters(accelerate.Accelerator.__init__),
        "Accelerator methods": methods(accelerate.Accelerator),
    }


def page() -> str:
    """The page's text. Raises SystemExit that lists names without an answer, and answers without a name."""
    versions = {module.__name__: module.__version__ for module in (transformers, accelerate)}
    parts = [HEAD.format(lightning=pl.__version__, **versions)]
    problems: list[str] = []
    for section, names in found().items():
        parts += _section(section, names, drop_in_answers.ANSWERS[section], problems)
    if problems:
        raise SystemExit("docs/drop_in_answers.py: " + "; ".join(problems))
    return "\n".join(parts)


def _section(section: str, names: list[str], answers: dict, problems: list[str]) -> Iterator[str]:
    yes = answers["yes"].split()
    kinds = ("no", "ignored", "otherwise")
    rows = {name: (kind, why) for kind in kinds for name, why in answers.get(kind, {}).items()}
    both = {*yes, *rows}
    problems += [f"{section} has {name}, which has no answer" for name in names if name not in both]
    problems += [f"{section} has no {name}" for name in sorted(both - set(names))]
    yield f"## {section}\n"
    yield textwrap.fill("Yes: " + ", ".join(f"`{name}`" for name in names if name in yes) + ".", 118) + "\n"
    if rows:
        yield "| name | here | |\n|---|---|---|"
        yield from (
            f"| `{name}` | {'yes' if kind == 'otherwise' else kind} | {why} |" for name, (kind, why) in rows.items()
        )
        yield ""


def main() -> None:
    text = page()
    if "--check" in sys.argv:
        sys.exit(None if PAGE.read_text() == text else 1)
    PAGE.write_text(text)


if __name__ == "__main__":
    main()
