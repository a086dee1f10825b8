# Two commands set everything up from a fresh clone with Python 3.11 or newer:
#   make quickstart   a small language model of your own, measured and explained (about ten minutes)
#   make test         the tests
# Both share .venv; a second call installs nothing.

PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: quickstart test check lint types contracts bench-smoke .venv clean

quickstart: .venv
	$(BIN)/whorl run quickstart
	@echo 'next: .venv/bin/whorl serve quickstart/pretrain   (a page to write with it)'

test: .venv/dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadgroup $(ARGS)

bench-smoke: .venv/dev  ## every bench at tiny sizes; SLICE=2/24 runs a part
	$(BIN)/python bench/run_all.py --smoke --slice $(or $(SLICE),1/1)

check: .venv/dev  ## lint, format, types, import contracts
	$(MAKE) --no-print-directory -j 2 lint types contracts

lint: .venv/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/dev
	$(BIN)/mypy

contracts: .venv/dev
	$(BIN)/lint-imports

.venv: .venv/package

.venv/package: pyproject.toml constraints.txt
	@echo "setting up .venv (once; the packages take 1.4 GB and some minutes)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Whorl needs Python 3.11 or newer; try: make PYTHON=python3.11")'
	@$(PYTHON) -m venv .venv
	@$(PIP) torch
	@$(PIP) -e '.[serve]'
	@touch $@

.venv/dev: .venv/package
	@echo "adding the test tools to .venv (once)"
	@$(PIP) -e '.[dev]'
	@touch $@

clean:
	rm -rf .venv build *.egg-info src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
