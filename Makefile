# make serve    install, prepare the demo model, serve it on http://127.0.0.1:8000
# make test     install, lint, types, all tests (CPU only)

PYTHON ?= python3
CONFIG ?= cluster/config.yaml
STEPS ?= 20000
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: setup serve check test smoke cases fuzz bench-decode bench-load bench-fair bench-sampler demo-adapters clean

setup: $(INSTALLED)

$(INSTALLED): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit("Python 3.10 or newer is needed, found " + sys.version) if sys.version_info < (3, 10) else None'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -e '.[dev]'
	touch $@

serve: setup
	$(BIN)/lora-fleet up $(CONFIG)

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: check
	$(BIN)/python -m pytest

smoke: setup
	$(BIN)/python -m tests.serve.smoke

cases: setup
	$(BIN)/python -m tests.cases

fuzz: setup
	$(BIN)/python -m tests.fuzz --steps $(STEPS)

bench-decode: setup
	$(BIN)/python -m tests.bench.bench_decode

bench-load: setup
	$(BIN)/python -m tests.bench.bench_load

bench-fair: setup
	$(BIN)/python -m tests.bench.bench_fair

bench-sampler: setup
	$(BIN)/python -m tests.bench.bench_sampler

demo-adapters: setup
	$(BIN)/python -m cluster.demo.train_adapters

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis *.egg-info
