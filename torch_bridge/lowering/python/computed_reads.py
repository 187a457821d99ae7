"""Tell which code reads attributes by computed names: getattr(self, f"scale{level}"), vars(config)."""

import dis
import functools
import types
from typing import Any

ANY = "attributes by computed names"  # among names: an attribute of any object may be read
_BY_NAME = {"getattr", "hasattr"}
_OF_ALL = {"attrgetter", "asdict", "astuple", "getmembers"}
_EMPTY = ("BUILD_LIST", "BUILD_MAP", "BUILD_TUPLE")
_SILENT = {"CACHE", "COPY_FREE_VARS", "EXTENDED_ARG", "NOP", "PRECALL", "PUSH_NULL", "RESUME"}


@functools.lru_cache(maxsize=8192)
def computed_reads(code: types.CodeType) -> frozenset[str]:
    """Return the objects whose attributes the code, or a function inside it, reads by computed names.

    They are named "self", by a global's name with its attributes ("torch.nn"), or "" for any other expression.
    `getattr(x, "name")` is no computed name.
    """
    return frozenset(_reads(code))


def _reads(code: types.CodeType) -> set[str]:
    steps = _steps(code)
    found = set()
    for place, (operation, value) in enumerate(steps):
        if operation == "LOAD_CONST":
            continue
        if value in _BY_NAME:
            if _after_call(steps, place) is None:
                found.add(_owner(steps, place + 1))
        elif value == "vars":
            found.add(_owner(steps, place + 1))
        elif value == "__dict__":
            found.add("self" if place and _is_self(steps[place - 1]) else "")
        elif value in _OF_ALL:
            found.add("")
    return found.union(*(computed_reads(const) for const in code.co_consts if isinstance(const, types.CodeType)))


def _steps(code: types.CodeType) -> list[tuple[str, Any]]:
    """Return the code's instructions as (operation, argument); one that loads two variables becomes two."""
    steps: list[tuple[str, Any]] = []
    for instruction in dis.get_instructions(code):
        value = instruction.argval
        if isinstance(value, tuple) and instruction.opname.startswith("LOAD_FAST"):
            steps += [("LOAD_FAST", name) for name in value]
        elif instruction.opname not in _SILENT:
            steps.append((instruction.opname, value))
    return steps


def _is_self(step: tuple[str, Any]) -> bool:
    return step[1] == "self" and step[0].startswith(("LOAD_FAST", "LOAD_DEREF"))


def _owner(steps: list[tuple[str, Any]], place: int) -> str:
    """Return the name of a call's first argument, as computed_reads does."""
    path = [str(steps[place][1])]
    for operation, value in steps[place + 1 :]:
        if not operation.startswith(("LOAD_ATTR", "LOAD_METHOD")):
            break
        path.append(str(value))
    named = steps[place][0] == "LOAD_GLOBAL" or (_is_self(steps[place]) and len(path) == 1)
    return ".".join(path) if named else ""


def _after_call(steps: list[tuple[str, Any]], place: int) -> int | None:
    """Return the place after a call of getattr or hasattr with a constant name that begins at place, else None."""
    after = _after_expression(steps, place + 1)
    if after is None or steps[after][0] != "LOAD_CONST" or not isinstance(steps[after][1], str):
        return None
    default = after + 1
    end = default if steps[default][0] == "CALL" else _after_expression(steps, default)
    return None if end is None or steps[end][0] != "CALL" else end + 1


def _after_expression(steps: list[tuple[str, Any]], place: int) -> int | None:
    """Return the place after a constant, an empty container, a variable, its attributes, or such a call, else None."""
    operation, value = steps[place]
    if operation == "LOAD_CONST" or (operation in _EMPTY and value == 0):
        return place + 1
    if not operation.startswith(("LOAD_FAST", "LOAD_DEREF", "LOAD_GLOBAL", "LOAD_NAME", "LOAD_CLASSDEREF")):
        return None
    after = _after_call(steps, place) if value in _BY_NAME else place + 1
    while after is not None and steps[after][0] == "LOAD_ATTR":
        after += 1
    return after
