# `make demo` and `make test` need Python 3.11 or newer, make and a package registry; nothing else.
PYTHON ?= python3
PIP := .venv/bin/python -m pip --disable-pip-version-check install --quiet -c constraints.txt

.PHONY: demo test lint types tests clean

demo: .venv/installed           ## the paper's six algorithms on bundled data: a table and pictures under runs/demo
	.venv/bin/fedsieve compare --config examples/demo.yaml \
		--algorithms fedavg,fedprox,fedpdp,fedca,fedcm-ucb,fedcm-ts --seeds 3 --out runs/demo

test: lint types tests          ## every check

lint: .venv/installed-dev
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .

types: .venv/installed-dev
	.venv/bin/mypy

tests: .venv/installed-dev
	.venv/bin/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "FedSieve needs Python 3.11 or newer")'
	$(PYTHON) -m venv .venv
	@echo "Installing FedSieve and PyTorch into .venv (a minute or two) ..."
	$(PIP) -e .
	touch $@

.venv/installed-dev: .venv/installed
	$(PIP) -e '.[dev,flower,ray,track]'
	touch $@

clean:
	rm -rf .venv build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
