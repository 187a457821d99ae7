"""Write configs/schema.json, which editors check YAML configs with: `python docs/generate_config_schema.py`.

A config's first line names it: `# yaml-language-server: $schema=schema.json`. Types, defaults and meanings come from
the settings classes, as for docs/reference.md; a task's own sections replace the core's.
"""

import json
import pathlib
import sys
from typing import Any

from generate_reference import comments

from jaxtrain import config, task
from jaxtrain.config import Section

FILE = pathlib.Path(__file__).parents[1] / "configs/schema.json"
INTERPOLATED = {"type": "string", "pattern": r"\$\{"}
OUTSIDE = ("defaults", "hydra", *config.FLAT_NAMES)  # keys that Hydra composes, and flat names


def schema() -> dict[str, Any]:
    tasks = {name: task.find_task(name).sections for name in (*task.task_names(), "torch_module")}
    core = properties(config.TrainingConfig)
    core["task"] = {"enum": [*tasks, None], "description": "what is trained"}
    by_task = {key for sections in tasks.values() for key in sections}
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "jaxtrain config",
        "type": "object",
        "properties": {**core, **dict.fromkeys([*sorted(by_task), *OUTSIDE], True)},
        "additionalProperties": False,
        "allOf": [
            {
                "if": {"properties": {"task": {"const": name}}, "required": ["task"]},
                "then": {
                    "properties": {
                        key: section(sections[key]) if key in sections else core.get(key, False)
                        for key in sorted(by_task)
                    }
                },
            }
            for name, sections in tasks.items()
        ],
    }


def properties(kind: type[Section]) -> dict[str, Any]:
    """Return the schema of each field of a section."""
    whole, meanings = kind.model_json_schema(), comments(kind)
    values = {}
    for key, field in kind.model_fields.items():
        inner = field.annotation
        is_section = isinstance(inner, type) and issubclass(inner, Section)
        value = section(inner) if is_section else plain(whole["properties"][key], whole.get("$defs", {}))
        meaning = meanings.get(key)
        values[key] = {**value, "description": meaning} if meaning else value
    return values


def section(kind: type[Section]) -> dict[str, Any]:
    """Return the schema of a section; an empty one has its defaults."""
    return {"type": ["object", "null"], "properties": properties(kind), "additionalProperties": False}


def plain(value: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    """Return a field's schema without references, which takes an interpolation instead of a value too."""
    value = resolved(value, definitions)
    outside = {key: value.pop(key) for key in ("default", "title", "description") if key in value}
    kinds = value["anyOf"] if set(value) == {"anyOf"} else [value]
    default = {"default": outside["default"]} if "default" in outside else {}
    return {"anyOf": [*kinds, INTERPOLATED], **default}


def resolved(value: Any, definitions: dict[str, Any]) -> Any:
    if isinstance(value, list):
        return [resolved(item, definitions) for item in value]
    if not isinstance(value, dict):
        return value
    if "$ref" in value:
        return resolved(definitions[value["$ref"].rpartition("/")[2]], definitions)
    return {key: resolved(item, definitions) for key, item in value.items()}


if __name__ == "__main__":
    text = json.dumps(schema(), separators=(",", ":")) + "\n"
    if "--check" in sys.argv:
        sys.exit(FILE.read_text() != text)
    FILE.write_text(text)
