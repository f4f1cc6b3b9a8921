# Needs only make and a python3 (3.11 or later) with venv. `make` alone lists the commands.
VENV   ?= .venv
PYTHON ?= python3
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.k31fn-installed
# triton-ascend takes the place of triton, so Ascend's compilers have an environment of their own
ASCEND ?= .venv-ascend
# ARGS is passed to pytest: make test ARGS='-k kda -x'
ARGS   ?=

# One thread per test process: the suite is parallel over processes. Training takes all cores.
test test-slow: export OMP_NUM_THREADS = 1

.DEFAULT_GOAL := help
.PHONY: help env train train-vision lint types imports test test-slow cuda-check ascend-check format clean

help: ## list the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

env: $(STAMP) ## make .venv with k31fn (editable) and all tools; redone when pyproject.toml or constraints.txt change

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-input -c constraints.txt -e '.[dev,train]'
	touch $@

lint: env ## ruff (rules and format) and the house rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m tools.house_rules k31fn

types: env ## basedpyright
	$(BIN)/basedpyright

imports: env ## the import rule (import-linter)
	$(BIN)/lint-imports

test: lint types imports ## everything but slow tests (aim: 12 minutes); ARGS='-k kda' passes options to pytest
	$(BIN)/python -m pytest -n 2 --dist worksteal --durations 10 --durations-min 2 -m "not slow" $(ARGS)

train: env ## train a small K3.1 on real text to the end: curve, samples, checkpoints (ARGS='--steps 300')
	$(BIN)/python train.py configs/tiny.py $(ARGS)
	$(BIN)/python -m k31fn.sample runs/tiny --count 3 --save

train-vision: env ## teach it to read mosaics of handwritten digits, scored on scans never seen (ARGS='--steps 200')
	$(BIN)/python -m examples.digits prepare build/digits
	$(BIN)/python train.py configs/tiny_vision.py $(ARGS)
	$(BIN)/python -m examples.digits score runs/tiny_vision

test-slow: env ## the slow tests
	$(BIN)/python -m pytest -n 2 --dist worksteal -m slow $(ARGS)

cuda-check: env ## compile the Triton kernels for sm_90, without a GPU
	$(BIN)/python -m tools.compile_cuda $(ARGS)

ascend-check: $(ASCEND)/.k31fn-installed ## compile the Triton kernels for Ascend, run their IR on the CPU, find torch_npu's operators (x86 Linux)
	$(ASCEND)/bin/python -m tools.ascend.check $(ARGS)

$(ASCEND)/.k31fn-installed: tools/ascend/requirements.txt
	test -x $(ASCEND)/bin/python || $(PYTHON) -m venv $(ASCEND)
	$(ASCEND)/bin/python -m pip install --quiet --disable-pip-version-check --no-input -r tools/ascend/requirements.txt
	$(ASCEND)/bin/python -m pip download --quiet --disable-pip-version-check --no-deps -d $(ASCEND)/wheels torch_npu==2.13.0
	touch $@

format: env ## apply ruff's fixes and format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## remove .venv, caches and builds
	rm -rf $(VENV) $(ASCEND) build dist .pytest_cache .ruff_cache .import_linter_cache
	find k31fn configs examples tests tools -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
