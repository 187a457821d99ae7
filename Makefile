# make run: the quick start. make test: the tests of a change, in 14 minutes on two cores. make test-all: every test.
# All targets make .venv on first use and install nothing the second time.
PYTHON ?= python3
BIN := .venv/bin
PIP_INSTALL = $(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt
JOBS ?= $(shell nproc 2>/dev/null || sysctl -n hw.ncpu)
PYTEST = $(BIN)/python -m pytest -n $(JOBS) --dist loadfile
FACADES = tests/unit/*/test_facade_*.py

.PHONY: run test test-contracts test-all lint typecheck docs clean

run: .venv/installed-run
	$(BIN)/python -m jaxtrain.run --config configs/digits.yaml

test: .venv/installed-test
	$(PYTEST) tests -m "not slow" --ignore-glob "$(FACADES)"

# Every task's whole contract, and the sessions of the originals' users. What the originals recorded is compared with
# programs compiled as a user's run is.
test-contracts: .venv/installed-test
	$(PYTEST) $(FACADES) -m "not slow"
	$(PYTEST) tests/contract -m slow
	$(PYTEST) tests/parity --optimised

test-all: test test-contracts
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
	touch $@

clean:
	rm -rf .venv .venv312 .venv312-torch build *.egg-info
