# The commands: make run, make test. The others serve people who change the code.
#   make run      set everything up and start the broker with its embedded defaults
#   make test     set everything up and run all tests (T=path or K=word narrows, ARGS= passes through)
#   make test-fast  the tests that need no JVM and no browser, kill nothing and are short
#   make check    format, lint, types, architecture, generated pages
#   make bench    run the benchmarks, print the table, write bench/results.json and docs/explanation/benchmarks.md (B=name narrows)
#   make screenshots  the pictures of the Console in docs/images, from a broker with `penstock demo`
#   make docs     build the docs site into site/; open site/index.html
#   make spark    install Java and PySpark, for pipelines
#   make soak     the tests' long forms: more kills, more rounds
#   make flaky    run tests many times, alone and beside load, and print what failed how often (T=path, RUNS=10)
#   make lock     compile the pinned requirements again

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
UV     := VIRTUAL_ENV=$(VENV) $(BIN)/uv
# Half of the tests wait for servers rather than compute: one worker more than two cores.
WORKERS := 3
PYTEST = $(BIN)/python -m pytest -q --no-header $(if $(T)$(K),,-n $(WORKERS) --dist loadgroup)
SITE   := site
SHELL  := /bin/bash

.PHONY: run test test-fast check bench screenshots docs soak lock fmt flaky spark java chromium test-programs clean
.DEFAULT_GOAL := help

help:
	@sed -n '1,12s/^# \{0,1\}//p' Makefile

$(BIN)/uv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Penstock needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) -V 2>&1). Try: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@echo "Setting up $(VENV) ..."
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check 'uv>=0.5'

$(VENV)/.run: requirements/run.txt pyproject.toml | $(BIN)/uv
	@$(UV) pip install --quiet --require-hashes -r requirements/run.txt
	@$(UV) pip install --quiet --no-deps -e .
	@touch $@

$(VENV)/.dev: requirements/dev.txt pyproject.toml | $(BIN)/uv
	@$(UV) pip install --quiet --require-hashes -r requirements/dev.txt
	@$(UV) pip install --quiet --no-deps -e .
	@touch $@ $(VENV)/.run

run: $(VENV)/.run
	@exec $(BIN)/penstock serve $(ARGS)

spark: $(VENV)/.dev java

java:
	@tools/java $(VENV)

chromium:
	@tools/chromium $(VENV)

test-programs:
	@tools/test-programs $(VENV)

test: $(VENV)/.dev java chromium test-programs
	@$(PYTEST) $(T) $(if $(K),-k '$(K)') $(ARGS)

test-fast: WORKERS := 4
test-fast: $(VENV)/.dev
	@TEST_FORM=short $(PYTEST) -m 'not spark and not browser and not chaos and not long' $(T) $(if $(K),-k '$(K)') $(ARGS)

soak: $(VENV)/.dev java chromium test-programs
	@PENSTOCK_SOAK=1 $(PYTEST) --timeout 7200 $(T) $(if $(K),-k '$(K)') $(ARGS)

check: $(VENV)/.dev
	@$(BIN)/ruff format --check --quiet . || { echo "Run 'make fmt' to format."; $(BIN)/ruff format --check .; }
	@$(BIN)/ruff check --quiet .
	@$(BIN)/mypy --no-error-summary
	@$(BIN)/lint-imports --no-cache > $(VENV)/lint-imports.log 2>&1 || { cat $(VENV)/lint-imports.log; exit 1; }
	@tools/javascript/check $(VENV)
	@$(BIN)/python tools/reference --check || { echo "Run '.venv/bin/python tools/reference' to write them again."; exit 1; }
	@echo "check: format, lint, types, architecture and the reference are fine"

# Runs tests many times, alone and beside load, and prints what failed how often (T=path, RUNS=10).
RUNS := 10
flaky: $(VENV)/.dev java chromium test-programs
	@$(BIN)/python tools/flaky $(T) --runs $(RUNS) $(ARGS)

fmt: $(VENV)/.dev
	@$(BIN)/ruff format --quiet . && $(BIN)/ruff check --quiet --fix .
	@tools/javascript/check $(VENV) --fix

bench: $(VENV)/.dev
	@$(BIN)/python -m bench $(B) $(ARGS)

screenshots: $(VENV)/.dev chromium
	@$(BIN)/python tools/screenshots

docs: $(VENV)/.dev
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict -d $(abspath $(SITE)) > $(VENV)/docs.log 2>&1 || { cat $(VENV)/docs.log; exit 1; }
	@echo "open $(SITE)/index.html"

lock: $(BIN)/uv
	@for set in "run --extra server" "dev --extra server --extra connect --extra otel --extra celery --extra django --group dev"; do set -- $$set; name=$$1; shift; \
	  $(UV) pip compile --quiet --upgrade --universal --python-version 3.11 --generate-hashes --no-header --no-annotate \
	    "$$@" pyproject.toml -o requirements/$$name.txt; done

clean:
	@rm -rf $(VENV) .mypy_cache .ruff_cache .hypothesis dist build site
