# Every task of the project. `make` lists them; each prepares what it needs by itself.
#
# The tools are installed into .venv, once. To use an environment that already has them and install nothing (an image with
# a GPU, say):   make VENV= PYTHON=python3 test

PYTHON ?= python3
VENV ?= .venv
# Where pip finds torch. For the build without CUDA: TORCH_INDEX=https://download.pytorch.org/whl/cpu
TORCH_INDEX ?=

ifeq ($(strip $(VENV)),)
READY :=
RUN := PYTHONPATH=src $(PYTHON)
WORKERS ?=
else
READY := $(VENV)/.ready
RUN := $(VENV)/bin/python
WORKERS ?= -n auto --maxprocesses 8
endif
TERRAZZO := $(RUN) -c 'from terrazzo.cli import main; main()'
DEMO_MODEL := TinyLlama/TinyLlama-1.1B-Chat-v1.0 --layer 0 --seq-len 32 --random-weights

.DEFAULT_GOAL := help
.PHONY: help demo test check mutants adverse opinfo fuzz replay docs test-gpu sanitize bench-gpu bench-cpu setup clean

help: ## list the tasks
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 12

demo: $(READY) ## compile a decoder layer, show its kernels, run it, check it against eager and time it
	$(TERRAZZO) compile $(DEMO_MODEL) --ir loop
	$(TERRAZZO) run $(DEMO_MODEL) --check --time

test: $(READY) ## all tests that need no GPU
	$(RUN) -m pytest $(WORKERS) -m "not gpu" $(ARGS)

check: $(READY) ## lint and type-check
	$(RUN) -m ruff check .
	$(RUN) -m mypy

mutants: $(READY) ## kernels with one thing wrong: nearly all must be found (N mutants, 0 for all; SEED says which)
	PYTHONPATH=src:. $(RUN) -m tests.mutants.run --count $(or $(N),1000) --seed $(or $(SEED),0) $(ARGS)

adverse: $(READY) ## the pinned schedules, each simulated in N adverse orders and a fair one (50; ARGS="-n 16")
	SIMULATED_SEEDS=$(or $(N),50) OMP_NUM_THREADS=1 $(RUN) -m pytest -q -p no:cacheprovider $(WORKERS) $(ARGS) \
	    tests/kernels/test_arrangements.py tests/kernels/test_chains.py tests/kernels/test_convolutions.py -k "is_right or written_by_hand or pinned_split"

opinfo: $(READY) ## PyTorch's whole operator database, interpreted and compiled, and the table in the docs (long)
	PYTHONPATH=src:. $(RUN) -m tests.opinfo.run --table docs/operators.md $(ARGS)

fuzz: $(READY) ## random programs, schedules, texts, aliases: make fuzz N=2000 (SEED=7 KIND=programs|schedules|plans|arrangements|texts|hostile|aliases|effects|scores)
	PYTHONPATH=src:. OMP_NUM_THREADS=1 $(RUN) -m tests.fuzz.run $(or $(N),200) $(if $(SEED),--seed $(SEED)) $(if $(KIND),--kind $(KIND)) $(ARGS)

replay: $(READY) ## every kernel of the benchmarks and tests, at a commit and now: make replay BASE=main (ARGS=--help)
	PYTHONPATH=src:. $(RUN) -m tests.replay.run $(or $(BASE),HEAD) $(ARGS)

docs: $(READY) ## write the generated pages of the manual
	$(RUN) docs/generate.py $(ARGS)

test-gpu: $(READY) ## the tests that need a GPU
	$(RUN) -m pytest -m gpu $(ARGS)

sanitize: $(READY) ## compute-sanitizer over every kernel of the tests, on this machine's GPU
	PYTHONPATH=src:. $(RUN) -m tests.kernels.sanitize $(ARGS)

bench-gpu: $(READY) ## compare with PyTorch on this machine's GPU
	$(TERRAZZO) bench gpu $(ARGS)

bench-cpu: $(READY) ## compare with eager on this machine's processor
	$(TERRAZZO) bench cpu $(ARGS)

setup: $(READY) ## only install what the other tasks need

clean: ## remove the environment and the tools' caches
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis

# A Debian without python3-venv has no ensurepip, but perhaps pip or virtualenv. Without a C++ compiler, zig is one.
$(VENV)/.ready: pyproject.toml requirements-dev.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	    || { echo "Python 3.11 or newer is needed. Name one with: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(VENV)/bin/python -m pip --version >/dev/null 2>&1 \
	    || $(PYTHON) -m venv $(VENV) >/dev/null 2>&1 \
	    || { $(PYTHON) -m venv --without-pip $(VENV) && $(PYTHON) -m pip --python $(VENV)/bin/python install -q pip; } >/dev/null 2>&1 \
	    || $(PYTHON) -m virtualenv -q $(VENV) >/dev/null 2>&1 \
	    || { echo "Cannot make an environment in $(VENV). On Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
	@echo "Installing into $(VENV); the first time this takes some minutes."
	$(VENV)/bin/python -m pip install -q --disable-pip-version-check $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) \
	    -c requirements-dev.txt -e '.[dev]' $(shell command -v c++ g++ clang++ >/dev/null || echo ziglang)
	@touch $@
