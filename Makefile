# Two commands do everything on a fresh machine: `make forecast` and `make test`.
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TOOLS := $(VENV)/.tools
# The oldest Triton we support, beside the environment's own: tests compile under both.
OLDEST_TRITON := 3.6.0
# The newest Python from 3.11 on that can make a virtual environment.
PYTHON ?= $(shell for p in python3.14 python3.13 python3.12 python3.11 python3; do \
	command -v $$p >/dev/null 2>&1 && $$p -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)

.PHONY: forecast test fuzz lint format golden kernels bench clean
.DELETE_ON_ERROR:

forecast: $(STAMP)
	$(BIN)/tilecast predict --machine b200 --batch 4 --heads 16 --heads-kv 16 --seqlen 8192 --head-dim 128 --causal --dtype bf16
	@echo
	$(BIN)/tilecast validate published

test: $(TOOLS)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest -n 2

$(STAMP): pyproject.toml
	@test -n "$(PYTHON)" || { echo "tilecast needs Python 3.11 or newer with its venv module: install them (Debian: apt-get install python3 python3-venv)" >&2; exit 2; }
	@$(PYTHON) -m venv $(VENV) >/dev/null 2>&1 || { rm -rf $(VENV); \
		echo "$(PYTHON) cannot make a virtual environment: install its venv module (Debian: apt-get install python3-venv)" >&2; exit 2; }
	$(BIN)/pip install --quiet --disable-pip-version-check -e .
	@touch $@

# What tests and checks need on top: torch and triton compile and interpret kernels without a GPU.
$(TOOLS): $(STAMP) constraints-dev.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints-dev.txt -e '.[dev]'
	@if [ "$$(uname -s)" = Linux ]; then \
		$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(VENV)/triton-3.6 triton==$(OLDEST_TRITON); fi
	@touch $@

# Property tests with fresh examples: what fails here is a bug that the fixed examples miss.
fuzz: $(TOOLS)
	$(BIN)/pytest -n 2 --fresh tests/unit/model tests/unit/explore tests/unit/emulator

lint: $(TOOLS)
	$(BIN)/ruff check .

format: $(TOOLS)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

golden: $(TOOLS)
	$(BIN)/pytest tests --update-golden

kernels: $(TOOLS)
	$(BIN)/tilecast ship

bench: $(STAMP)
	$(BIN)/python tools/benchmark_speed.py

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
