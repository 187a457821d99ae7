"""Describe any Python object by digests of its content, so that objects can be compared across processes.

No method of the object is called: a dataset is not read, so its random generators do not advance. Values are hashed by
content (large arrays by evenly spaced pieces), code by its bytecode and the values it captures, other objects by type
and attributes. Addresses, locks, open files and random generators do not count.
"""

import builtins
import dataclasses
import dis
import enum
import functools
import hashlib
import numbers
import os
import pathlib
import re
import sys
import sysconfig
import types
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx

from torch_bridge.lazy_array import as_leaf, to_host

Leaves = dict[str, list[str]]  # place in the object -> digests, of which one has to agree

ARRAY_BYTES = 64 << 20  # most bytes of an array to hash; of a larger one, evenly spaced rows
PIECES = 64  # most files of a folder to hash; most entries of a container with a place of their own
LISTED = 4096  # most entries of a long list to look at, if they are not just numbers and texts
PIECE_BYTES = 4096  # bytes hashed at the beginning and at the end of a file
DEEPEST = 8
MOST_LEAVES = 4096
SHOWN_WHOLE = ("builtins", "array", "collections", "datetime", "decimal", "fractions", "re", "uuid")  # hashed by repr
OPAQUE = ("Generator", "RandomState", "Random", "lock", "RLock", "Event", "Thread", "TextIOWrapper", "BufferedReader")
OWN_PACKAGES = tuple(
    str(pathlib.Path(__file__).parents[up] / name) + os.sep for up, name in ((1, ""), (2, "torch_bridge"))
)
LIBRARIES = (*OWN_PACKAGES, sysconfig.get_paths()["stdlib"] + os.sep, "<frozen")


def describe(value: Any, place: str = "") -> Leaves:
    """Return digests of a value's content by place: `dataset.labels`, `dataset.transform.p`, ..."""
    walk = _Walk()
    walk.visit(value, place, 0)
    return walk.leaves


def code_of(value: Any) -> str:
    """Return a digest of the user code behind a function, a callable object or a module's forward pass; library code
    does not count. It begins with "3.11:", the Python version, because bytecode depends on it."""
    found: dict[str, str] = {}
    for function in _functions(value):
        _add_code(function, found, 0)
    return f"{sys.version_info[0]}.{sys.version_info[1]}:" + _hash(sorted(found.items())) if found else ""


def captured(value: Any, place: str) -> Leaves:
    """Return digests of the numbers, texts and arrays that a function, or one that it calls, reads from outside:
    closures, globals, and values in the user's own modules and classes."""
    leaves: Leaves = {}
    for function in _reached(_functions(value)):
        for name, inner in sorted(_captures(function).items()):
            leaves |= describe(inner, f"{place}.{name}")
    return leaves


def digest_of_array(array: Any) -> str:
    """Hash an array's dtype, shape and content; above 64 MiB, evenly spaced rows of it."""
    leaf = as_leaf(array)
    host = to_host(leaf.read()) if hasattr(leaf, "read") else np.asarray(leaf)
    told = f"{host.dtype} {list(host.shape)}"
    if host.dtype == object:
        return _hash([told, *(_plain(item) for item in _spread(host.reshape(-1), LISTED))])
    if host.nbytes > ARRAY_BYTES:
        rows = host if host.ndim > 1 or not host.size else host.reshape(-1)
        count = max(1, ARRAY_BYTES * len(rows) // host.nbytes)
        host = rows[np.unique(np.linspace(0, len(rows) - 1, count).astype(np.int64))]
    return _hash([told, np.ascontiguousarray(host).reshape(-1).view(np.uint8).data])


def sample_of_array(array: Any) -> str:
    """Hash up to 4,096 evenly spaced numbers of an array: enough to distinguish random weights."""
    leaf = as_leaf(array)
    host = np.asarray(leaf.read() if hasattr(leaf, "read") else leaf).reshape(-1)
    return digest_of_array(host[np.unique(np.linspace(0, max(0, host.size - 1), 4096).astype(np.int64))[: host.size]])


def digests_of_path(path: str | os.PathLike) -> list[str]:
    """Return digests of a path, one of which has to agree: a file's by size, beginning and end; a folder's by its name
    and by its content, as a copy may lie elsewhere and a cache may grow in it; a missing path's by its name."""
    place = pathlib.Path(path)
    with _ignoring():
        if place.is_file():
            return [_digest_of_file(place)]
        if place.is_dir():
            entries = sorted(place.iterdir())
            held = [(entry.name, entry.stat().st_size if entry.is_file() else 0) for entry in entries]
            heads = [_digest_of_file(entry) for entry in _spread([entry for entry in entries if entry.is_file()])]
            return [_hash(["folder", place.name]), _hash([held, heads])]
    return [_hash(["path", str(path)])]


class _Walk:
    def __init__(self):
        self.leaves: Leaves = {}
        self.seen: dict[int, Any] = {}  # kept alive, so that no id is reused

    def visit(self, value: Any, place: str, depth: int) -> None:
        if len(self.leaves) >= MOST_LEAVES:
            return
        try:
            self._visit(value, place, depth)
        except Exception:  # an object that cannot be inspected counts by its type
            self.put(place, type(value).__qualname__)

    def put(self, place: str, *told: Any) -> None:
        self.leaves[place] = [_hash(told)]

    def _visit(self, value: Any, place: str, depth: int) -> None:
        if value is None or isinstance(value, (bool, numbers.Number, bytes, enum.Enum, np.generic)):
            self.put(place, _plain(value))
        elif isinstance(value, (str, os.PathLike)):
            text = os.fspath(value)
            exists = isinstance(text, str) and len(text) < 1024 and "\n" not in text and os.path.exists(text)
            self.leaves[place] = digests_of_path(text) if exists else [_hash(["text", text])]
        elif _is_array(value):
            self.leaves[place] = [digest_of_array(value)]
        elif id(value) in self.seen:
            return
        else:
            self.seen[id(value)] = value
            self._visit_object(value, place, depth)

    def _visit_object(self, value: Any, place: str, depth: int) -> None:
        kind = type(value).__qualname__
        if isinstance(value, (type, types.ModuleType)):
            self.put(place, getattr(value, "__qualname__", value.__name__))
        elif isinstance(value, functools.partial):
            self.visit(value.func, f"{place}()", depth + 1)
            self.visit([value.args, value.keywords], f"{place}.arguments", depth + 1)
        elif callable(value) and hasattr(value, "__qualname__"):
            self.put(place, value.__qualname__.rpartition("<locals>.")[2])
            self.leaves |= captured(value, place) if depth < DEEPEST else {}
        elif isinstance(value, Mapping):
            self._visit_items(value.items(), len(value), kind, place, depth)
        elif isinstance(value, (list, tuple)):
            self._visit_items(enumerate(value), len(value), kind, place, depth)
        elif isinstance(value, (set, frozenset)):
            self.put(place, kind, sorted(map(_plain, value)))
        elif hasattr(value, "to_numpy") and hasattr(value, "index"):  # pandas
            self.put(place, kind, list(map(_plain, getattr(value, "columns", ()))), digest_of_array(value.to_numpy()))
        elif kind in OPAQUE or depth >= DEEPEST:
            self.put(place, kind)
        elif type(value).__module__ in SHOWN_WHOLE and not hasattr(value, "__dict__"):
            self.put(place, _plain(value))
        else:
            self.put(place, kind)
            for name, inner in _attributes(value):
                self.visit(inner, f"{place}.{name}", depth + 1)

    def _visit_items(self, items: Iterable[tuple], count: int, kind: str, place: str, depth: int) -> None:
        """Digest up to 64 entries each at its own place; more of them together, evenly spaced ones of a long list."""
        if count <= PIECES:
            self.put(place, kind, count)
            for name, inner in items:
                self.visit(inner, f"{place}[{name}]", depth + 1)
            return
        items = list(items)
        together = [_plain(inner) if _is_plain(inner) else None for _, inner in items]
        if None not in together:
            self.put(place, kind, together)
            return
        walk = _Walk()
        walk.seen = self.seen
        for name, inner in _spread(items, LISTED):
            walk.visit(inner, f"[{name}]", depth + 1)
        self.put(place, kind, count, sorted(walk.leaves.items()))


def _attributes(value: Any) -> list[tuple[str, Any]]:
    """Return an object's attributes by name. Of a DataLoader only those that decide its batches: workers and pinning
    may change."""
    if hasattr(value, "batch_sampler") and hasattr(value, "collate_fn"):
        names = ("dataset", "batch_size", "drop_last", "batch_sampler", "sampler", "collate_fn")
        return [(name, getattr(value, name)) for name in names]
    if dataclasses.is_dataclass(value):
        return [(field.name, getattr(value, field.name, None)) for field in dataclasses.fields(value)]
    held = dict(getattr(value, "__dict__", {}))
    for base in type(value).__mro__:
        slots = base.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if not name.startswith("__") and hasattr(value, name):
                held[name] = getattr(value, name)
    return sorted((str(name), inner) for name, inner in held.items() if not str(name).startswith("__"))


def _is_array(value: Any) -> bool:
    if isinstance(value, (np.ndarray, jax.Array)):
        return True
    return type(value).__module__.partition(".")[0] == "torch" and hasattr(value, "untyped_storage")


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, (bool, numbers.Number, str, bytes, np.generic))


def _plain(value: Any) -> str:
    if isinstance(value, frozenset):
        return str(sorted(map(_plain, value)))  # its order differs between processes
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value.item() if isinstance(value, np.generic) else value))


def _spread(values: Any, most: int = PIECES) -> list:
    """Return up to `most` values, evenly spaced, including the first and the last."""
    count = len(values)
    return list(values) if count <= most else [values[i * (count - 1) // (most - 1)] for i in range(most)]


def _digest_of_file(path: pathlib.Path) -> str:
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(PIECE_BYTES)
        file.seek(max(0, size - PIECE_BYTES))
        return _hash(["file", size, head, file.read(PIECE_BYTES)])


def _hash(told: Any) -> str:
    digest = hashlib.blake2b(digest_size=12)
    _feed(digest, told)
    return digest.hexdigest()


def _feed(digest: Any, told: Any) -> None:
    if isinstance(told, (list, tuple)):
        digest.update(f"[{len(told)}".encode())
        for part in told:
            _feed(digest, part)
    elif isinstance(told, (bytes, memoryview)):
        digest.update(told)
    else:
        digest.update(f"{told!r};".encode("utf-8", "surrogatepass"))


# --- code -----------------------------------------------------------------------------------------------------------


def _functions(value: Any) -> list[types.FunctionType]:
    """Return the functions that run when a value is called; for a module, the methods of all its submodules."""
    value = getattr(value, "func", value) if isinstance(value, functools.partial) else value
    value = getattr(value, "__wrapped__", value)
    if isinstance(value, types.MethodType):
        return [value.__func__]
    if isinstance(value, types.FunctionType):
        return [value]
    found = [value]
    if isinstance(value, nnx.Module):
        found = [part for _, part in nnx.iter_graph(value) if isinstance(part, nnx.Module)]
    elif callable(getattr(value, "modules", None)):
        found = list(value.modules())
    methods: dict[Any, None] = {}
    for kind in dict.fromkeys(type(part) for part in found):
        for base in kind.__mro__:
            methods |= {m: None for m in vars(base).values() if isinstance(m, types.FunctionType)}
    return [method for method in methods if _is_own(method)]


def _is_own(function: types.FunctionType) -> bool:
    file = function.__code__.co_filename
    return not file.startswith(LIBRARIES) and "-packages" + os.sep not in file


def _add_code(function: types.FunctionType, found: dict[str, str], depth: int) -> None:
    name = f"{function.__module__ != '__main__' and function.__module__}.{function.__qualname__}"
    if name in found or depth > DEEPEST or not _is_own(function):
        return
    found[name] = _hash(_bytecode(function.__code__))
    for used in function.__code__.co_names:
        inner = function.__globals__.get(used)
        if isinstance(inner, types.FunctionType):
            _add_code(inner, found, depth + 1)


def _reached(functions: list[types.FunctionType]) -> list[types.FunctionType]:
    """Return the functions and the user's own ones that they refer to, directly or indirectly."""
    found = list(functions)
    for function in found:
        named = [function.__globals__.get(name) for name in function.__code__.co_names]
        inner = [f for f in named if isinstance(f, types.FunctionType) and _is_own(f) and f not in found]
        found += inner if _is_own(function) else []
    return found


def _values_in(scope: Any, names: Iterable[str]) -> dict[str, Any]:
    """Return the values with these names in a module or class, if it is the user's own; else {}."""
    module = sys.modules.get(scope.__module__) if isinstance(scope, type) else scope
    name, file = getattr(module, "__name__", ""), getattr(module, "__file__", None) or ""
    own = name == "__main__" or (file and not file.startswith(LIBRARIES) and "-packages" + os.sep not in file)
    return {name: vars(scope)[name] for name in names if name in vars(scope)} if own else {}


def _bytecode(code: types.CodeType) -> list:
    """Return the content of a code object without file name, line numbers and docstring."""
    constants = code.co_consts[1:] if code.co_consts and isinstance(code.co_consts[0], str) else code.co_consts
    told = [_bytecode(inner) if isinstance(inner, types.CodeType) else _plain(inner) for inner in constants]
    return [code.co_code, list(code.co_names), list(code.co_varnames[: code.co_argcount]), told]


def _captures(function: types.FunctionType) -> dict[str, Any]:
    """Return the plain values and arrays from outside a function that it reads but does not write itself."""
    code = function.__code__
    written = {i.argval for i in dis.get_instructions(code) if i.opname in ("STORE_GLOBAL", "STORE_DEREF")}
    cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
    found = {name: cell.cell_contents for name, cell in cells if _is_full(cell)}
    if _is_own(function):
        names = (name for name in code.co_names if not hasattr(builtins, name))
        around = {name: function.__globals__[name] for name in names if name in function.__globals__}
        scopes = {name: value for name, value in around.items() if isinstance(value, (type, types.ModuleType))}
        for name, scope in scopes.items():
            found |= {f"{name}.{key}": value for key, value in _values_in(scope, code.co_names).items()}
        found |= around
    found |= dict(enumerate(function.__defaults__ or ()))
    kept = lambda v: (
        (_is_plain(v) and v is not None) or _is_array(v) or (isinstance(v, tuple) and all(map(_is_plain, v)))
    )
    return {str(name): value for name, value in found.items() if name not in written and kept(value)}


def _is_full(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


class _ignoring:
    """Context that suppresses OSError: a file that cannot be read then counts by its name."""

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        return kind is not None and issubclass(kind, OSError)
