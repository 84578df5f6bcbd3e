# Every target sets up what it needs. PYTHON chooses the interpreter (3.11 or newer), VENV where the environment lives.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
DOCS_VENV ?= .venv-docs
DOCS_READY := $(DOCS_VENV)/.ready
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
export HF_HUB_DISABLE_TELEMETRY := 1
unexport PYTHONDONTWRITEBYTECODE  # every process of a test would compile the package again

FIND_BROWSER := for name in chromium chromium-browser google-chrome google-chrome-stable; do command -v $$name && exit; done; false
AS_ROOT := $(if $(filter 0,$(shell id -u)),,sudo -n)
APT := $(AS_ROOT) env DEBIAN_FRONTEND=noninteractive apt-get -qq -o DPkg::Lock::Timeout=300
INSTALL_BROWSER = $(APT) update >/dev/null && $(APT) install -y --no-install-recommends chromium >/dev/null

.PHONY: demo test test-deep test-engines campaign check docs pictures build hashes bill clean browser

## demo: the main job on the model that ships with the package, offline: quantize, prove, serve, a first answer
demo: $(READY)
	rm -rf build/demo
	$(BIN)/quantry inspect demo
	$(BIN)/quantry run demo -o build/demo --yes --no-serve

## test: the whole test suite
test: $(READY) browser
	($(FIND_BROWSER)) >/dev/null || export QUANTRY_NO_BROWSER=1; $(BIN)/pytest -n auto --dist worksteal

## test-deep: what make test takes a sample of, in its whole depth
test-deep: $(READY) browser
	($(FIND_BROWSER)) >/dev/null || export QUANTRY_NO_BROWSER=1; \
	  QUANTRY_TEST_DEPTH=deep $(BIN)/pytest -n auto --dist worksteal -m "deep or sampled"

## browser: what the tests of reports look at pages with; Debian's chromium, installed where there is none
browser:
	@[ "$$QUANTRY_NO_BROWSER" = 1 ] || ($(FIND_BROWSER)) >/dev/null || \
	  { echo "installing chromium for the tests of reports"; $(INSTALL_BROWSER); } || \
	  echo "no chromium, and it cannot be installed here: the tests in a browser are left out"

## test-engines: real engines, each in its own environment, load and score what Quantry writes
test-engines: $(READY)
	$(BIN)/pytest -m engines tests/real_engines -s

## campaign: the worst day by the thousand, for hours; CAMPAIGN="kills --kills 20" runs a part of it
campaign: $(READY)
	PYTHONPATH=tests:benchmarks $(BIN)/python -m campaign $(CAMPAIGN)

## check: formatting, lint, types, import contract
check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

## docs: rewrites the generated pages and builds the site in build/site; a link that leads nowhere is an error
docs: $(READY) $(DOCS_READY)
	$(BIN)/python docs/make_pages.py
	rm -rf build/site
	$(DOCS_VENV)/bin/sphinx-build --quiet --fail-on-warning --keep-going --nitpicky -d build/site-doctrees docs build/site
	@echo "open build/site/index.html"

## pictures: runs the commands that README and docs show, and writes their pictures and outputs
pictures: $(READY) browser
	$(BIN)/python docs/make_pictures.py

## build: a wheel and a source archive in dist/
build: $(READY)
	$(BIN)/pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .

## hashes: writes hashes.txt for the versions of constraints.txt, and both in docs/; needs the package index
hashes:
	$(PYTHON) .ci/hash_packages.py

## bill: a software bill of materials (CycloneDX) of the installed environment in dist/
bill: $(READY)
	$(BIN)/python .ci/bill_of_materials.py dist/quantry.cdx.json

# every package by its hash, then torch and what its build needs by version: CPU, CUDA and ROCm builds share one
$(READY): pyproject.toml constraints.txt hashes.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Quantry needs Python 3.11 or newer, this is %d.%d: set PYTHON=python3.11" % sys.version_info[:2])'
	$(PYTHON) -m venv $(VENV) || { echo "python3-venv is missing: apt-get install python3-venv"; exit 1; }
	$(PIP) --no-deps --require-hashes --requirement hashes.txt
	$(PIP) --no-build-isolation --constraint constraints.txt --editable '.[dev]'
	touch $@

# what builds the site: pure Python, away from what Quantry itself needs
$(DOCS_READY): docs/constraints.txt docs/hashes.txt
	$(PYTHON) -m venv $(DOCS_VENV) || { echo "python3-venv is missing: apt-get install python3-venv"; exit 1; }
	$(DOCS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes --requirement docs/hashes.txt
	touch $@

clean:
	rm -rf $(VENV) $(DOCS_VENV) dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
