"""Settings as command-line flags in the style of torch projects: `--learning_rate 1e-4 --use_fsdp --no-shuffle`.

A flag is a setting (`--optim.lr`), a name from the original project's command line or config (`--learning_rate`), or
the last part of a setting (`--dropout`; if several match, the model's); dashes and underscores are alike. Each flag is
turned into an override.
"""

import difflib
import os
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxtrain.errors import UserError

LAUNCHED = ("distributed", "local_rank", "node_rank", "world_size", "verbose", "ddp")  # ignored: the launcher sets them


class Flag(NamedTuple):
    """A flag as typed. values: the words after it. negated: typed as `--no-name`."""

    name: str
    values: tuple[str, ...]
    negated: bool = False


def split(argv: Sequence[str], options: Sequence[str]) -> tuple[list[str], list[Flag]]:
    """Split the command line into the command's own arguments and flags. options: its own (`--config`, ...), which may
    be abbreviated."""
    own: list[str] = []
    flags: list[Flag] = []
    words = list(argv)
    while words:
        word = words.pop(0)
        name, equals, value = word.partition("=")
        if not re.match("--[A-Za-z]", word) or any(option.startswith(name) for option in options):
            own.append(word)
            if name == word and name.startswith("--") and words and _takes_value(name, options):
                own.append(words.pop(0))
            continue
        values = [value] if equals else []
        while not equals and words and not words[0].startswith("--") and not re.match(r"[A-Za-z_][\w.]*=", words[0]):
            values.append(words.pop(0))
        name = name[2:].replace("-", "_")
        negated = name.startswith("no_") and not values
        flags.append(Flag(name.removeprefix("no_") if negated else name, tuple(values), negated))
    return own, flags


def _takes_value(name: str, options: Sequence[str]) -> bool:
    return any(option.startswith(name) for option in options if option in ("--config", "--resume"))


def overrides(flags: Sequence[Flag], config: str | pathlib.Path, given: Sequence[str]) -> list[str]:
    """Convert flags to overrides `section.key=value` for a config file. given: overrides typed as such.

    Raises UserError for a flag that names no setting, or several.
    """
    if not flags:
        return []
    from jaxtrain import config_io, config_mistakes

    task, original = config_io.task_of(config, given)
    schema = config_io.schema(task)
    known = Names(config_mistakes.dotted_keys(schema), task.flags, original)
    return [line for flag in flags for line in _overrides(flag, known, schema)]


class Names:
    """Valid flag names for one task."""

    def __init__(self, settings: Sequence[str], own: Mapping[str, str], original: frozenset[str]):
        from jaxtrain.config import FLAT_NAMES

        self.settings, self.own, self.flat, self.original = list(settings), dict(own), FLAT_NAMES, original

    def key(self, name: str) -> str:
        """Return the override key of a flag name. Raises UserError if it matches no setting, or several."""
        if name in self.own and " " in self.own[name]:
            raise UserError(f"--{name}: {self.own[name]}")
        for found in (name if name in self.settings else None, self.own.get(name)):
            if found is not None:
                return found
        if name in self.flat or name in self.original:
            return name
        ends = [key for key in self.settings if key.rsplit(".", 1)[-1] == name]
        if len(ends) > 1:  # prefer the model's own setting to sections of every task, such as lora
            ends = [key for key in ends if key == f"model.{name}"] or ends
        if len(ends) == 1:
            return ends[0]
        if ends:
            raise UserError(f"--{name}: could be {', '.join(f'--{key}' for key in ends)}; say which")
        names = [*self.settings, *self.own, *self.flat, *self.original, *(k.rsplit(".", 1)[-1] for k in self.settings)]
        near = difflib.get_close_matches(name, names, 1, 0.6)
        hint = f", did you mean --{near[0]}?" if near else ";"
        raise UserError(f"--{name}: no such setting{hint} `--help` lists them")


def _overrides(flag: Flag, known: Names, schema: Any) -> list[str]:
    name = flag.name
    if name in LAUNCHED and name not in known.own:
        return []
    if name == "use_fsdp":
        return [f"shard.strategy={'fsdp' if _said_yes(flag) else 'ddp'}"]
    if name == "device":
        return [choose_device(" ".join(flag.values))]
    key = known.key(name)
    if not flag.values:
        if not _is_boolean(key, schema):
            raise UserError(f"--{name}: wanted a value")
        return [f"{key}={'false' if flag.negated else 'true'}"]
    if len(flag.values) == 1:
        return [f"{key}={flag.values[0]}"]
    return [f"{key}=[{','.join(flag.values)}]"]


def _said_yes(flag: Flag) -> bool:
    return not flag.negated and (not flag.values or flag.values[0].lower() in ("true", "yes", "on", "1"))


def _is_boolean(key: str, schema: Any) -> bool:
    if key.endswith("mixed_precision"):
        return True
    from jaxtrain.config import FLAT_NAMES

    for part in FLAT_NAMES.get(key, key).split("."):
        field = getattr(schema, "model_fields", {}).get(part)
        if field is None:
            return True  # a name of the original's; its translation checks the value
        schema = field.annotation
    return schema is bool or bool in getattr(schema, "__args__", ())


def choose_device(device: str) -> str:
    """Make JAX use the device of this torch name (auto, cpu, cuda, cuda:1); return the override that selects it.

    Sets environment variables, so call it before JAX starts. Raises UserError for any other name.
    """
    kind, _, number = device.partition(":")
    if kind not in ("auto", "cpu", "cuda", "gpu") or not re.fullmatch("[0-9]*", number):
        raise UserError(f"--device: got {device!r}, wanted auto, cpu, cuda or cuda:<number>")
    if kind == "auto":
        return "shard.devices=null"
    if kind == "cpu":
        os.environ["JAX_PLATFORMS"] = "cpu"
    elif number:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = visible.split(",") if visible else None
        if names is not None and int(number) >= len(names):
            raise UserError(f"--device {device}: CUDA_VISIBLE_DEVICES={visible} leaves {len(names)}")
        os.environ["CUDA_VISIBLE_DEVICES"] = number if names is None else names[int(number)]
    return "shard.devices=1"


def help_text(config: str | pathlib.Path | None = None) -> str:
    """Return help that lists every setting as a flag with its default: those of the config's task, or of the core."""
    from jaxtrain import config_io
    from jaxtrain.config import FLAT_NAMES, TrainingConfig

    own: Mapping[str, str] = {}
    kind: Any = TrainingConfig
    if config is not None:
        task, _ = config_io.task_of(config, ())
        kind, own = config_io.schema(task), task.flags
    shorter: dict[str, list[str]] = {}
    for name, key in (*FLAT_NAMES.items(), *own.items()):
        shorter.setdefault(key, []).append(f"--{name}")
    lines = [
        "settings, as flags or as overrides (`--optim.lr 1e-4` is `optim.lr=1e-4`; `--key` and `--no-key` switch),",
        "with their defaults" + ("; `--config F --help` adds those of its task:" if config is None else ":"),
    ]
    for key, default in _defaults(kind):
        names = " ".join([f"--{key}", *dict.fromkeys(shorter.get(key, ()))])
        lines.append(f"  {names}  ({default})")
    lines.append("  --device auto|cpu|cuda|cuda:N  --use_fsdp  --distributed (the launcher says it)")
    return "\n".join(lines)


def _defaults(kind: Any, prefix: str = "") -> list[tuple[str, Any]]:
    found = []
    for name, field in kind.model_fields.items():
        if isinstance(field.annotation, type) and hasattr(field.annotation, "model_fields"):
            found += _defaults(field.annotation, f"{prefix}{name}.")
        else:
            default = field.get_default(call_default_factory=True)
            plain = default is None or isinstance(default, bool)
            found.append((prefix + name, str(default).lower() if plain else default))
    return found
