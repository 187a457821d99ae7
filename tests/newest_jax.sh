#!/usr/bin/env bash
# Run the torch-free tests under Python 3.12 with the newest jax and no torch. Without a Python 3.12: say so and stop.
set -eu
cd "$(dirname "$0")/.."
python=""
for candidate in python3.12 "env PYENV_VERSION=$(ls "$HOME/.pyenv/versions" 2>/dev/null | grep -m1 '^3\.12' || echo none) python3.12"; do
  if $candidate -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null; then python=$candidate; break; fi
done
if [ -z "$python" ]; then echo "newest jax: skipped, this machine has no Python 3.12"; exit 0; fi
stamp=.venv312/installed
if [ ! -e $stamp ] || [ pyproject.toml -nt $stamp ]; then
  [ -x .venv312/bin/python ] || $python -m venv .venv312
  .venv312/bin/python -m pip install -q --disable-pip-version-check -e . pytest pytest-xdist hypothesis tokenizers pillow matplotlib
  touch $stamp
fi
.venv312/bin/python -c 'import jax, sys; print("newest jax:", jax.__version__, "on Python", sys.version.split()[0])'
exec .venv312/bin/python -m pytest -n "$(nproc)" --dist loadfile tests/test_*.py tests/unit tests/contract -m "not slow"
