"""The house keeps its shape: imports point down, never sideways between systems, and torch stays in its rooms."""

import ast
import pathlib

ROOT = pathlib.Path(__file__).parents[1]
PACKAGES = ("jaxtrain", "torch_bridge", "benchmarks")

COMMANDS = {
    "run", "evaluate", "export", "tune", "lr_find", "plan", "doctor", "generate", "checkpoints", "report", "commands",
    "__main__",
}  # fmt: skip
TORCH_ROOMS = {"files", "datasets", "module", "verify", "lowering", "from_torch"}


def layer(module: str) -> int:
    """3 commands and facades, 2 train and systems, 1 shared parts, 0 settings and the bridge's core."""
    parts = module.split(".")
    if parts[0] == "benchmarks" or parts == ["jaxtrain"]:
        return 3
    if parts[0] == "torch_bridge":
        return 3 if parts[-1] == "verify" else 1 if len(parts) > 1 and parts[1] in TORCH_ROOMS else 0
    if parts[1] in COMMANDS or parts[1] == "tuning" or parts[-1] == "torch_compat":
        return 3
    if parts[1] in ("train", "systems"):
        return 3 if parts[-1] == "prepare" else 2
    return 0 if parts[1] in ("config", "errors") else 1


def test_imports_point_down_only():
    wrong = [f"{a} -> {b}" for a, b, _ in _edges() if layer(a) < layer(b) and not _facade(a, b)]
    assert wrong == []


def test_train_and_systems_never_meet():
    wrong = [
        f"{a} -> {b}"
        for a, b, _ in _edges()
        if layer(a) == 2 and layer(b) == 2 and _room(a) != _room(b) and b != "jaxtrain.systems"
    ]
    assert wrong == []


def test_no_module_is_part_of_an_import_cycle():
    graph: dict[str, set[str]] = {}
    for a, b, inside_function in _edges():
        if a != b and not inside_function:
            graph.setdefault(a, set()).add(b)
    assert [module for module in graph if _reaches(graph, module, module)] == []


def test_torch_is_imported_in_its_rooms_only():
    wrong = []
    for path in _files("jaxtrain", "torch_bridge"):
        imports_torch = any(name.split(".")[0] == "torch" for name, _ in _imports(path))
        in_room = path.name.startswith("torch_") or _module(path).startswith(
            tuple(f"torch_bridge.{room}" for room in TORCH_ROOMS)
        )
        if imports_torch and not in_room:
            wrong.append(str(path.relative_to(ROOT)))
    assert wrong == []


def test_core_settings_import_nothing_of_jax():
    names = {name.split(".")[0] for name, _ in _imports(ROOT / "jaxtrain/config.py")}
    assert names <= {"typing", "pydantic"}


def _facade(a: str, b: str) -> bool:
    """A system's __init__ offers its facade lazily; find_task reaches systems by name."""
    return a.endswith(b.rsplit(".", 1)[0]) and b.endswith("torch_compat")


def _room(module: str) -> str:
    parts = module.split(".")
    return ".".join(parts[:3]) if parts[1] == "systems" else parts[1]


def _reaches(graph, start, goal) -> bool:
    seen, stack = set(), list(graph.get(start, ()))
    while stack:
        module = stack.pop()
        if module == goal:
            return True
        if module not in seen:
            seen.add(module)
            stack += graph.get(module, ())
    return False


def _edges():
    """(importing module, imported module, inside a function) for every import of the project's own modules."""
    known = {_module(path) for path in _files(*PACKAGES)}
    for path in _files(*PACKAGES):
        tree = ast.parse(path.read_text())
        inside = {
            id(node)
            for function in ast.walk(tree)
            if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef))
            for node in ast.walk(function)
        }
        type_only = {
            id(node)
            for block in ast.walk(tree)
            if isinstance(block, ast.If) and "TYPE_CHECKING" in ast.unparse(block.test)
            for node in ast.walk(block)
        }
        for node in ast.walk(tree):
            if id(node) in type_only:
                continue
            for name in _names(node, known):
                yield _module(path), name, id(node) in inside


def _names(node, known):
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names if alias.name in known]
    if isinstance(node, ast.ImportFrom) and node.module:
        names = [f"{node.module}.{alias.name}" for alias in node.names]
        found = [name for name in names if name in known]
        return found or ([node.module] if node.module in known else [])
    return []


def _imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module, node


def _files(*packages):
    return [path for package in packages for path in sorted((ROOT / package).rglob("*.py"))]


def _module(path: pathlib.Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
