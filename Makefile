# Everything a contributor runs. `make setup` once, then the rest.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
export OMP_NUM_THREADS ?= 1
# Two processes, whatever the machine has: each takes up to a gigabyte.
PARALLEL ?= -n 2 --dist loadgroup

.PHONY: setup train test slow check format conformance bench docs clean

setup: $(VENV)/.installed

# Rebuilt when the dependencies change. The constraints keep torch to one known release.
$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

train: setup
	$(BIN)/koila-rl train CartPole-v1 --total-timesteps 100000 --memory 64MiB

test: setup
	$(BIN)/python -m pytest -q $(PARALLEL)

slow: setup
	$(BIN)/python -m pytest -q $(PARALLEL) -m slow

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

conformance: setup
	$(BIN)/python -m pytest -q $(PARALLEL) -m "slow or not slow" tests/conformance

bench: setup
	for script in benchmarks/*.py; do $(BIN)/python "$$script" || exit 1; done

docs: setup
	$(BIN)/python -m pytest -q tests/test_docs.py

clean:
	rm -rf build dist ./*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
