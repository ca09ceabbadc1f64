# Two commands matter: `make run` and `make test`. Each installs what it needs into .venv first, once.

PYTHON ?= $(firstword $(foreach name,python3 python3.14 python3.13 python3.12 python3.11,$(shell \
	$(name) -c 'import sys; print("$(name)") if (3, 11) <= sys.version_info[:2] <= (3, 14) else None' 2>/dev/null)))
VENV ?= .venv
EXPERIMENT ?= digits
ARGS ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
INSTALL := .ci/install $(BIN)/python
TORCH := $(shell grep '^torch==' constraints.txt)
# Modules are compiled when they are first imported, most of them never. What a run imports is compiled at once, so that it starts in
# half the time also where PYTHONDONTWRITEBYTECODE is set.
COMPILED := fedemu.ops.running.coordinator, fedemu.ops.assembly.trainer, fedemu.ops.assembly.behaviours, fedemu.ops.report.report, fedemu.ops.cli.commands
unexport PYTHONDONTWRITEBYTECODE
TYPED := build/typed

.PHONY: help run install test gpu lint docs screenshots wheel pins oldest clean
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

help: ## Say what can be made
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-9s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

run: install ## Install, then train 300 emulated devices (EXPERIMENT=digits, more options in ARGS="--rounds 5")
	@$(BIN)/fedemu run $(EXPERIMENT) $(ARGS)

install: $(VENV)/.installed ## Create .venv and install fedemu there with the versions of constraints.txt

test: $(VENV)/.tested ## Install what the tests need and run all in four processes, 10 to 20 minutes (or some: ARGS="-k fleet")
	$(BIN)/pytest $(or $(ARGS),-n 4 --dist loadfile --no-loadscope-reorder)

gpu: $(VENV)/.tested ## On a machine with an NVIDIA GPU: run the tests that need it, then the benchmarks
	$(BIN)/pytest -m gpu $(or $(ARGS),tests/algorithms tests/device)
	$(BIN)/fedemu bench gpu

lint: $(VENV)/.linted ## Check style (ruff) and types (mypy --strict, on the package as it installs)
	$(BIN)/ruff check .
	@rm -rf $(TYPED) build/lib build/bdist*
	@$(PIP) install --quiet --no-deps --no-build-isolation --target $(TYPED) .
	@bash -o pipefail -c 'MYPYPATH=$(TYPED) $(BIN)/mypy --config-file pyproject.toml -p fedemu \
		| sed "s#^$(TYPED)/fedemu/##"'

docs: $(VENV)/.documented ## Build the documentation as a site: build/site/index.html
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict
	@echo "build/site/index.html; to search it: python3 -m http.server --directory build/site"

screenshots: $(VENV)/.tested ## Take the pictures of the live page anew, with chromium
	@$(BIN)/python docs/images/make_screenshots.py

wheel: $(VENV)/.installed ## Build dist/fedemu-*.whl
	@rm -rf build/lib build/bdist* dist
	@$(PIP) wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .
	@ls dist/*.whl

pins: ## Renew constraints.txt from what an installation without it brings (torch stays as it is)
	@rm -rf build/pins && $(PYTHON) -m venv build/pins
	@build/pins/bin/python -m pip install --quiet uv $(TORCH) '.[flwr,language,test,lint,docs]'
	@{ head -2 constraints.txt; build/pins/bin/python -m pip freeze --all | grep -v -E '^(pip|fedemu)[ =]' \
		| sed -E 's/\+[a-z0-9.]+$$//' | sort -f; } > build/pins/constraints.txt
	@mv build/pins/constraints.txt constraints.txt && rm -rf build/pins

oldest: ## Run the tests with the oldest versions that pyproject.toml allows (some gigabytes; some: ARGS="-k fleet")
	@rm -rf build/oldest && $(PYTHON) -m venv build/oldest
	@.ci/oldest > build/oldest/constraints.txt
	@build/oldest/bin/python -m pip install --quiet --constraint build/oldest/constraints.txt --editable '.[test]'
	build/oldest/bin/pytest $(or $(ARGS),-n 4 --dist loadfile --no-loadscope-reorder)

clean: ## Remove the virtual environment and everything that was built (runs/ stays)
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "fedemu needs Python 3.11 to 3.14 as python3; found: $$(python3 --version 2>&1)" >&2; exit 2; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
		echo "$(PYTHON) can't make virtual environments; on Debian: apt-get install python3-venv" >&2; exit 2; }
	@echo "Creating $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV)

# With these stamps `make` installs again only if constraints.txt or pyproject.toml changed. The installation is editable, so changed
# sources need no new one.
$(VENV)/.installed: constraints.txt pyproject.toml | $(BIN)/python
	@echo "Installing $(TORCH), then fedemu and the rest (up to some minutes the first time)"
	@$(PIP) install --quiet --no-compile --constraint constraints.txt setuptools $(TORCH)
	@$(PIP) install --quiet --only-binary :all: --constraint constraints.txt uv || echo "uv is not to be had; pip takes minutes"
	@$(INSTALL) --no-build-isolation --editable .
	@$(BIN)/python -c 'import $(COMPILED)'
	@touch $@

$(VENV)/.tested: $(VENV)/.installed
	@echo "Installing what the tests need"
	@$(INSTALL) --no-build-isolation --editable '.[test]'
	@touch $@

$(VENV)/.linted: $(VENV)/.installed
	@echo "Installing the linters"
	@$(INSTALL) --no-build-isolation --editable '.[lint]'
	@touch $@

$(VENV)/.documented: $(VENV)/.installed
	@echo "Installing what the documentation needs"
	@$(INSTALL) --no-build-isolation --editable '.[docs]'
	@touch $@

# All of these at once: what all packages need is looked at once, and not three times.
$(VENV)/.complete: $(VENV)/.installed
	@echo "Installing what the tests, the linters and the documentation need"
	@$(INSTALL) --no-build-isolation --editable '.[test,lint,docs]'
	@touch $(VENV)/.tested $(VENV)/.linted $(VENV)/.documented $@
