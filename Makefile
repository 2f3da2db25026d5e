# `make demo` and `make test` do everything on a fresh machine. Each step leaves a stamp in the virtual environment,
# so that a second run goes straight to work.
PYTHON ?= python3
VENV ?= .venv
# Looked at first for torch where there is no NVIDIA GPU; left out when it does not answer.
CPU_WHEEL_INDEX ?= https://download.pytorch.org/whl/cpu
WORKERS ?= 2
PYTEST_ARGS ?=
HEADS_ARGS ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
PYTEST := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS)

# Unpinned, torch brings gigabytes of CUDA libraries to machines that cannot use them. Both are empty where there is a GPU.
HAS_GPU = $(shell nvidia-smi -L >/dev/null 2>&1 && echo yes)
TORCH_CONSTRAINT = $(if $(HAS_GPU),,-c constraints/cpu.txt)
PROBE = import signal, sys, urllib.request as request; signal.alarm(6); \
	request.urlopen(sys.argv[1] + "/torch/", timeout=3); print("--extra-index-url", sys.argv[1])
TORCH_INDEX = $(if $(HAS_GPU),,$(shell $(PYTHON) -c '$(PROBE)' '$(CPU_WHEEL_INDEX)' 2>/dev/null))

.DEFAULT_GOAL := help
.PHONY: help demo native sanitize test check lint types layers format test-slow test-network test-oldest verify-matrix heads clean distclean

help:
	@echo "make demo           install, fetch SmolLM2-135M, stream an answer, print its statistics"
	@echo "make native         compile the C++ operators again, after a change to them"
	@echo "make sanitize       the operators' tests under AddressSanitizer and UBSan"
	@echo "make test           the test suite (PYTEST_ARGS='tests/core -x' for a part)"
	@echo "make check          lint, types, layers, tests: what CI runs"
	@echo "make format         rewrite the sources as the linter wants them"
	@echo "make test-slow      the tests with the 1.5B model"
	@echo "make test-network   the tests that need the Hugging Face Hub"
	@echo "make test-oldest    the test suite on the oldest supported dependencies"
	@echo "make verify-matrix  speculative against plain decoding, token by token and in law (resumable)"
	@echo "make heads          data and training of the draft heads that come with the package (hours, resumable)"
	@echo "make clean          remove caches and build products; distclean: the environments too"

demo: $(VENV)/.stamp-install
	$(BIN)/paceline generate --model smollm2-135m --method ngram --max-tokens 96 --temperature 0 --stats \
		"Write these three lines, then write them again: The sun rises in the east. The sun sets in the west. The moon follows."

native: $(VENV)/.stamp-install
	$(BIN)/python -m paceline.ops.native.build

# torch leaks by design; a preloaded runtime sees every allocation, Python's too.
SANITIZED := PACELINE_OPS_LIBRARY=build/libpaceline_ops.sanitized.so
sanitize: $(VENV)/.stamp-dev
	@mkdir -p build
	$(SANITIZED) $(BIN)/python -m paceline.ops.native.build \
		-g -fsanitize=address,undefined -fno-sanitize-recover=undefined
	$(SANITIZED) LD_PRELOAD="$$($${CXX:-c++} -print-file-name=libasan.so)" ASAN_OPTIONS=detect_leaks=0 \
		$(BIN)/python -m pytest -q tests/ops/test_packed.py tests/ops/test_dense.py tests/ops/test_fused.py \
		tests/ops/test_fused_layer.py $(PYTEST_ARGS)

test: $(VENV)/.stamp-dev
	$(PYTEST) $(PYTEST_ARGS)

check: lint types layers
	@$(MAKE) --no-print-directory test

lint: $(VENV)/.stamp-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.stamp-dev
	$(BIN)/mypy

layers: $(VENV)/.stamp-dev
	$(BIN)/lint-imports

format: $(VENV)/.stamp-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# One worker: two copies of the 1.5B model would not fit a small machine.
test-slow: $(VENV)/.stamp-dev
	$(BIN)/python -m pytest -m slow $(PYTEST_ARGS)

test-network: $(VENV)/.stamp-dev
	$(BIN)/python -m pytest -m network $(PYTEST_ARGS)

# Old releases warn about things that were put right since: here a warning is no error.
test-oldest: .venv-oldest/.stamp-oldest
	$(MAKE) --no-print-directory VENV=.venv-oldest oldest-suite

.PHONY: oldest-suite
oldest-suite:
	$(PYTEST) -W default $(PYTEST_ARGS)

verify-matrix: $(VENV)/.stamp-dev
	$(BIN)/python bench/verify_matrix.py
	$(BIN)/python bench/verify_law.py

# In the background, too, and interrupted as often as you like: it goes on where it was.
heads: $(VENV)/.stamp-install
	$(BIN)/python bench/heads.py $(HEADS_ARGS)

clean:
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -not -path './.venv*' -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV) .venv-oldest

%/.stamp-venv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "error: Python 3.11 or newer is needed, $(PYTHON) is older"; echo "hint: make PYTHON=python3.12 …"; exit 1; }
	$(PYTHON) -m venv $*
	@touch $@

$(VENV)/.stamp-torch: constraints/cpu.txt | $(VENV)/.stamp-venv
	@echo "installing torch into $(VENV), which may take some minutes …"
	$(PIP) torch $(TORCH_CONSTRAINT) $(TORCH_INDEX)
	@touch $@

$(VENV)/.stamp-install: pyproject.toml hatch_build.py $(wildcard src/paceline/ops/native/*.cpp) \
		$(wildcard src/paceline/ops/native/*.h) $(VENV)/.stamp-torch
	$(PIP) $(TORCH_CONSTRAINT) -e .
	@touch $@

$(VENV)/.stamp-dev: $(VENV)/.stamp-install
	$(PIP) $(TORCH_CONSTRAINT) -e '.[dev]'
	@touch $@

.venv-oldest/.stamp-oldest: pyproject.toml constraints/oldest.txt | .venv-oldest/.stamp-venv
	.venv-oldest/bin/python -m pip install --quiet --disable-pip-version-check -c constraints/oldest.txt $(TORCH_INDEX) -e '.[test]'
	@touch $@
