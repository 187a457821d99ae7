# make run: the quick start. make test: all tests. Both make .venv on first use and install nothing the second time.
PYTHON ?= python3
PYTHON312 ?= $(shell command -v python3.12 || true)
BIN := .venv/bin
PIP_INSTALL = $(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt
JOBS ?= $(shell nproc 2>/dev/null || sysctl -n hw.ncpu)

.PHONY: run test test-newest lint docs clean

run: .venv/installed-run
	$(BIN)/python -m jaxtrain.run --config configs/digits.yaml

test: .venv/installed-test lint
	$(BIN)/python -m pytest -n $(JOBS) tests --ignore tests/parity
	$(BIN)/python -m pytest -n $(JOBS) tests/parity --thorough
	bash tests/newest_jax.sh

lint: .venv/installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check -q .
	$(BIN)/lint-imports --no-cache

.venv/installed-run: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "installing into .venv: jax, torch and what they need; minutes, once"
	$(PIP_INSTALL) -e '.[torch]'
	touch $@

.venv/installed-test: .venv/installed-run
	$(PIP_INSTALL) -e '.[torch,images,text,fmri,tracking,tune,plan,dev]'
	touch $@

clean:
	rm -rf .venv .venv312 build *.egg-info
