"""Wheel and sdist, each extra in an empty environment: `python -m tests.chaos.packaging [--extras torch text ...]`.

The wheel is built, and built again from the sdist; both must hold the same files. An environment gets the wheel alone
(or with one extra), and there, outside the repository: `pip check`, every distribution that the extra names imported,
`jaxtrain doctor` and the quick start. An extra of GPU libraries is only resolved, with --resolve.
"""

import argparse
import hashlib
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
import zipfile

ROOT = pathlib.Path(__file__).parents[2]
CORE = "core"
EXTRAS = ("torch", "images", "tune", "tracking", "text", "fmri", "plan", "docs")
IMPORTS = """
import importlib, importlib.metadata as metadata, sys
def modules(name):
    files = metadata.files(name) or []
    heads = {f.parts[0].removesuffix(".py") for f in files if f.suffix == ".py" and ".." not in f.parts}
    return sorted(head for head in heads if head.isidentifier() and not head.startswith("_"))
for name in sys.argv[1:]:
    for module in modules(name):
        importlib.import_module(module)
"""


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--extras", nargs="*", default=[CORE, *EXTRAS], help=f"{CORE} is the wheel alone; default all")
    p.add_argument("--resolve", nargs="*", default=["cuda"], help="extras that are resolved, not installed")
    p.add_argument("--folder", help="where environments and files stay (default: a temporary folder, deleted)")
    arguments = p.parse_args(argv)
    with tempfile.TemporaryDirectory() as scratch:
        folder = pathlib.Path(arguments.folder or scratch).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        wheel, sdist = build(folder)
        print(f"{wheel.name}: {wheel.stat().st_size:,} bytes, {len(contents(wheel))} files; {sdist.name}", flush=True)
        failed = [name for name in arguments.extras if not try_extra(folder, wheel, name)]
        failed += [name for name in arguments.resolve if not resolve(folder, wheel, name)]
    print(f"failed: {', '.join(failed)}" if failed else "all work")
    return 1 if failed else 0


def build(folder: pathlib.Path) -> tuple[pathlib.Path, pathlib.Path]:
    """The wheel and the sdist of what git knows, built beside each other and held against each other."""
    source, dist = folder / "source", folder / "dist"
    for old in (source, dist):
        shutil.rmtree(old, ignore_errors=True)
    copy_tracked(source)
    tools = environment(folder, "build")
    call(tools / "pip", "install", "-q", "build")
    call(tools / "python", "-m", "build", "--wheel", "--sdist", "--outdir", dist, source, cwd=folder)
    (wheel,), (sdist,) = dist.glob("*.whl"), dist.glob("*.tar.gz")
    call(tools / "pip", "wheel", "-q", "--no-deps", "--wheel-dir", folder / "again", sdist, cwd=folder)
    if contents(wheel) != contents(folder / "again" / wheel.name):
        raise SystemExit("the wheel of the sdist holds other files than the wheel of the source")
    return wheel, sdist


def copy_tracked(target: pathlib.Path) -> None:
    """What a clone holds, with changes that are not committed; links stay links."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if os.path.lexists(ROOT / name):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, target / name, follow_symlinks=False)


def contents(wheel: pathlib.Path) -> dict[str, str]:
    with zipfile.ZipFile(wheel) as archive:
        return {
            name: hashlib.sha256(archive.read(name)).hexdigest()
            for name in archive.namelist()
            if not name.endswith("RECORD")
        }


def try_extra(folder: pathlib.Path, wheel: pathlib.Path, extra: str) -> bool:
    """Install, import, doctor, quick start; one line of figures."""
    shutil.rmtree(folder / extra, ignore_errors=True)
    binaries, started = environment(folder, extra), time.monotonic()
    wanted = str(wheel) if extra == CORE else f"{wheel}[{extra}]"
    place = folder / f"{extra}_work"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    try:
        call(binaries / "pip", "install", "-q", "-c", ROOT / "constraints.txt", wanted, cwd=place)
        installed = time.monotonic() - started
        call(binaries / "pip", "check", cwd=place)
        call(binaries / "python", "-c", IMPORTS, *distributions(extra), cwd=place)
        doctor = json.loads(call(binaries / "jaxtrain", "doctor", "--json", cwd=place))
        started = time.monotonic()
        told = call(binaries / "jaxtrain", "run", "--config", "configs/digits.yaml", cwd=place)
    except subprocess.CalledProcessError as error:
        print(f"{extra}: FAILED: {' '.join(map(str, error.cmd))}\n{error.stdout[-3000:]}", flush=True)
        return False
    metrics = json.loads((place / "runs/digits/summary.json").read_text())["best"]
    size = sum(file.stat().st_size for file in (folder / extra).rglob("*") if file.is_file() and not file.is_symlink())
    print(
        f"{extra}: installed in {installed:.0f} s, {size / 1e6:,.0f} MB, torch {doctor['versions']['torch']}; quick "
        f"start {time.monotonic() - started:.0f} s, accuracy {metrics['accuracy']:.4f}; {told.splitlines()[-1]}",
        flush=True,
    )
    return True


def resolve(folder: pathlib.Path, wheel: pathlib.Path, extra: str) -> bool:
    """Whether pip finds a consistent set for the extra; nothing is installed."""
    binaries = environment(folder, "resolve")
    constraints = ROOT / "constraints.txt"
    command = ("install", "--dry-run", "-q", "--report", "-", "-c", constraints, f"{wheel}[{extra}]")
    try:
        report = json.loads(call(binaries / "pip", *command, cwd=folder, merged=False))
    except subprocess.CalledProcessError as error:
        print(f"{extra}: does not resolve\n{(error.stderr or '')[-3000:]}", flush=True)
        return False
    print(f"{extra}: resolves to {len(report['install'])} distributions (not installed)", flush=True)
    return True


def distributions(extra: str) -> list[str]:
    """The names of the distributions that the core or an extra asks for; of an extra's own extra the head."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = project["dependencies"] if extra == CORE else project["optional-dependencies"][extra]
    return [re.match(r"[\w.-]+", line).group() for line in wanted]


def environment(folder: pathlib.Path, name: str) -> pathlib.Path:
    """A virtual environment; its folder of commands."""
    binaries = folder / name / "bin"
    if not (binaries / "python").exists():
        subprocess.run([sys.executable, "-m", "venv", folder / name], check=True)
    return binaries


def call(*command, cwd=None, merged: bool = True) -> str:
    """What a command printed; its environment has nothing of the repository in it."""
    own = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV", "XLA_FLAGS")}
    error = subprocess.STDOUT if merged else subprocess.PIPE
    done = subprocess.run(command, cwd=cwd, env=own, text=True, stdout=subprocess.PIPE, stderr=error)
    done.check_returncode()
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
