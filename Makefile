# Two commands do everything on a fresh machine: `make forecast` and `make test`.
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TOOLS := $(VENV)/.tools
# Without the plugins that other packages bring: ours, which users' suites find by its name, has pytest rewrite the assertions of all of
# tilecast in every process, which costs as much as reading the tests.
PYTEST := PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 $(BIN)/pytest -p xdist.plugin -p _hypothesis_pytestplugin
# The suite starts a hundred processes: what one has compiled the next one reads, whatever the shell says of bytecode.
export PYTHONDONTWRITEBYTECODE :=
# The oldest Triton we support, beside the environment's own: tests compile under both.
OLDEST_TRITON := 3.6.0
# The newest Python from 3.11 on that can make a virtual environment.
PYTHON ?= $(shell for p in python3.14 python3.13 python3.12 python3.11 python3; do \
	command -v $$p >/dev/null 2>&1 && $$p -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)

.PHONY: forecast test test-all accuracy fuzz lint format golden docs pictures kernels bench clean
.DELETE_ON_ERROR:

forecast: $(STAMP)
	$(BIN)/tilecast predict --machine b200 --batch 4 --heads 16 --heads-kv 16 --seqlen 8192 --head-dim 128 --causal --dtype bf16
	@echo
	$(BIN)/tilecast validate published

test: $(TOOLS)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(PYTEST) -n 2 --dist loadfile --no-loadscope-reorder

# And what repeats those tests with other numbers: more kernels compiled, under the older Triton too, all cases of long lists, slow commands.
test-all: $(TOOLS)
	$(PYTEST) -n 2 --dist loadfile --no-loadscope-reorder --whole --run-minutes

$(STAMP): pyproject.toml
	@test -n "$(PYTHON)" || { echo "tilecast needs Python 3.11 or newer with its venv module: install them (Debian: apt-get install python3 python3-venv)" >&2; exit 2; }
	@$(PYTHON) -m venv $(VENV) >/dev/null 2>&1 || { rm -rf $(VENV); \
		echo "$(PYTHON) cannot make a virtual environment: install its venv module (Debian: apt-get install python3-venv)" >&2; exit 2; }
	$(BIN)/pip install --quiet --disable-pip-version-check -e .
	@touch $@

# What tests and checks need on top, the two Tritons side by side: torch and triton compile and interpret kernels without a GPU.
$(TOOLS): $(STAMP) constraints-dev.txt
	@old=""; if [ "$$(uname -s)" = Linux ]; then \
		$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(VENV)/triton-3.6 triton==$(OLDEST_TRITON) & old=$$!; fi; \
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints-dev.txt -e '.[dev]' && { [ -z "$$old" ] || wait $$old; }
	@touch $@

# The accuracy that the README claims, computed again from the recorded tables.
accuracy: $(TOOLS)
	$(PYTEST) --accuracy tests/unit/validation/test_accuracy.py

# Property tests with fresh examples, and the one answer of all verbs over sixty shapes on each machine.
fuzz: $(TOOLS)
	$(PYTEST) -n 2 --fresh tests/unit/model tests/unit/explore tests/unit/emulator tests/unit/tilecast/test_one_answer.py

lint: $(TOOLS)
	$(BIN)/ruff check .

format: $(TOOLS)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Golden files, and the outputs that README.md and docs/ show (`pytest tests/unit/docs --update-golden` alone; --run-minutes: slow ones too).
golden: $(TOOLS)
	$(PYTEST) tests --update-golden

# One offline site: open docs/_build/index.html.
docs: $(TOOLS)
	$(BIN)/sphinx-build --fail-on-warning --keep-going --quiet --fresh-env -b html docs docs/_build
	@echo docs/_build/index.html

# The pictures that README.md and docs/ show, each by the command that a reader can give (about 20 minutes).
pictures: $(TOOLS)
	$(BIN)/tilecast validate published --clock short --picture docs/published-short.png > /dev/null
	$(BIN)/tilecast validate published --clock sustained --picture docs/published-sustained.png > /dev/null
	$(BIN)/tilecast validate measured --picture docs/h200-measured.png > /dev/null
	$(BIN)/tilecast validate ablations --picture docs/ablations.png > /dev/null
	$(BIN)/tilecast map --machine b200 --batch 4 --seqlen 8192 -o docs/asymmetry-b200-bf16.png > /dev/null
	$(BIN)/tilecast map --machine b200 --batch 4 --seqlen 8192 --dtype fp8 -o docs/asymmetry-b200-fp8.png > /dev/null
	$(BIN)/python tools/plot_kernels.py docs/h200-kernels.png

kernels: $(TOOLS)
	$(BIN)/tilecast ship

bench: $(STAMP)
	$(BIN)/python tools/benchmark_speed.py

clean:
	rm -rf $(VENV) build docs/_build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
