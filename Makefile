# `make run` and `make test` are all a newcomer needs; both work on a fresh machine.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Without an NVIDIA GPU take the CPU build: a plain `pip install torch` fetches gigabytes of CUDA.
HAS_GPU := $(shell command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -c GPU)
comma := ,
TORCH := $(if $(filter-out 0,$(HAS_GPU)),torch>=2.11$(comma)<2.15,torch==2.13.0)


.PHONY: help run test test-gpu lint types docs references wheel clean
help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 12

$(VENV)/installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet '$(TORCH)'
	$(BIN)/pip install --quiet --editable '.[dev,kernels]'
	touch $@

run: $(VENV)/installed  ## the main job: prefill and decode the demo model, most experts outside the pool
	$(BIN)/residency run

test: $(VENV)/installed lint  ## lint, type-check and all tests that need no GPU
	$(BIN)/pytest -q -n auto --dist worksteal -m 'not gpu'

test-gpu: $(VENV)/installed  ## the tests that need an NVIDIA GPU
	$(BIN)/pytest -q -m gpu tests
	$(BIN)/pytest -q tests/runtime/kernels tests/runtime/test_fused.py tests/runtime/test_replacements.py tests/runtime/test_qwen4.py

lint: $(VENV)/installed types  ## ruff, and mypy over what the wheel would ship
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/installed
	rm -rf build
	$(BIN)/pip install --quiet --no-deps --target build/types .
	$(BIN)/mypy

docs: $(VENV)/installed  ## build the documentation into site/; a broken link is an error
	$(BIN)/python -m mkdocs build  # a quiet one would not count warnings

references: $(VENV)/installed  ## write docs/reference/ anew, from the typed config and the commands
	$(BIN)/python docs/reference/generate.py

wheel: $(VENV)/installed  ## build a wheel into dist/
	rm -rf build dist
	$(BIN)/pip wheel --quiet --no-deps --wheel-dir dist .

clean:  ## remove everything that was made here
	rm -rf $(VENV) build dist site *.egg-info
