# make run: the quick start. make test: the tests of a change, in 10 minutes on two cores. make test-all: every test.
# All targets make .venv on first use and install nothing the second time.
PYTHON ?= python3
BIN := .venv/bin
PIP_INSTALL = $(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt
JOBS ?= $(shell nproc 2>/dev/null || sysctl -n hw.ncpu)
PYTEST = $(BIN)/python -m pytest -n $(JOBS) --dist loadfile
PROCESSES = tests/e2e/test_processes.py
SESSIONS = $(filter-out $(PROCESSES), $(wildcard tests/unit/*/test_facade_*.py tests/e2e/test_*.py)) \
  tests/test_docs.py tests/test_shown_commands.py

.PHONY: run test test-sessions test-contracts test-all lint typecheck docs clean

run: .venv/installed-run
	$(BIN)/python -m jaxtrain.run --config configs/digits.yaml

test: .venv/installed-test
	$(PYTEST) tests -m "not slow" $(addprefix --ignore=,$(SESSIONS))

# What users do: loops of their own, scripts under one changed import, the originals' facades, the documented commands.
test-sessions: .venv/installed-test
	$(PYTEST) $(SESSIONS) -m "not slow"

# Every task's whole contract. What the originals recorded is compared with programs compiled as a user's run is.
test-contracts: .venv/installed-test
	$(PYTEST) tests/contract -m slow
	$(PYTEST) tests/parity --optimised

test-all: test test-sessions test-contracts
	$(PYTEST) tests --ignore tests/contract --ignore tests/parity -m slow
	bash tests/newest_jax.sh

lint: .venv/installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check -q .
	$(BIN)/lint-imports --no-cache

typecheck: .venv/installed-test
	$(BIN)/python .ci/typecheck.py

docs: .venv/installed-test
	$(BIN)/python -m mkdocs build --strict --quiet --site-dir build/site

.venv/installed-run: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "installing into .venv: jax, torch and what they need; minutes, once"
	$(PIP_INSTALL) -e '.[torch]'
	touch $@

.venv/installed-test: .venv/installed-run
	$(PIP_INSTALL) -e '.[torch,images,text,fmri,tracking,tune,plan,drop-in,dev]'
	$(BIN)/python -m torch_bridge.torchvision_operators
	touch $@

clean:
	rm -rf .venv .venv312 .venv312-torch build *.egg-info
