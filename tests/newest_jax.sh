#!/usr/bin/env bash
# Run under Python 3.12 with what a new user gets there: every task's contract and the engine's tests with the newest jax
# and no torch, then the torch operators and users' own loops with the newest torch beside it.
# Without a Python 3.12: say so and stop.
set -eu
cd "$(dirname "$0")/.."
python=""
for candidate in python3.12 "env PYENV_VERSION=$(ls "$HOME/.pyenv/versions" 2>/dev/null | grep -m1 '^3\.12' || echo none) python3.12"; do
  if $candidate -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null; then python=$candidate; break; fi
done
if [ -z "$python" ]; then echo "newest jax: skipped, this machine has no Python 3.12"; exit 0; fi

# environment FOLDER EXTRA...: made anew where pyproject.toml has changed
environment() {
  if [ ! -e "$1/installed" ] || [ pyproject.toml -nt "$1/installed" ]; then
    [ -x "$1/bin/python" ] || $python -m venv "$1"
    "$1/bin/python" -m pip install -q --disable-pip-version-check -e "$2" pytest pytest-xdist hypothesis tokenizers pillow matplotlib
    touch "$1/installed"
  fi
}
tested() { "$1/bin/python" -m pytest -n "$(nproc)" --dist loadfile "${@:2}" -m "not slow"; }

environment .venv312 .
.venv312/bin/python -c 'import jax, sys; print("newest jax:", jax.__version__, "on Python", sys.version.split()[0])'
tested .venv312 tests/contract tests/unit/engine
environment .venv312-torch '.[torch]'
.venv312-torch/bin/python -c 'import jax, torch; print("newest torch:", torch.__version__, "with jax", jax.__version__)'
tested .venv312-torch tests/unit/lowering tests/e2e/test_compiled_loops.py
