# Every target installs what it needs, and no more, in a virtual environment in .venv: the versions of constraints.txt.
# Needs only make and Python 3.11 or newer; another interpreter: make test PYTHON=python3.12

PYTHON ?= python3
ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip --disable-pip-version-check install --quiet --no-compile --constraint constraints.txt
READY := $(VENV)/.ready-
TORCH := $(shell grep '^torch==' constraints.txt)

.DEFAULT_GOAL := help
.NOTPARALLEL:
# pip compiles nothing, for it would take 15 seconds: modules are compiled and kept when they are first imported.
unexport PYTHONDONTWRITEBYTECODE
# What `make test` runs: most behaviors once. tests/README.md says what each marker means.
QUICK := not (slow or deep or waits or alone or root or bench or gpu) or smoke
PYTEST := $(BIN)/python -m pytest

.PHONY: help demo test test-all test-products test-torch test-oldest works-with mutants soak bench bench-peers figures lint format docs dist clean

help: ## Show this list
	@awk 'BEGIN { FS = ":.*## " } /^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' Makefile

demo: $(READY)cli ## Train with and without overlap on this machine and compare; make demo ARGS="--nproc 3"
	$(BIN)/undertow demo $(ARGS)

test: $(READY)test ## Run most behaviors once (3 minutes); make test ARGS="tests/unit -k plan"
	$(PYTEST) -n 3 --dist worksteal -m "$(QUICK)" $(ARGS)

test-all: $(READY)test $(READY)integrations ## Run everything, torch's own tests of its class too (25 minutes)
	$(PYTEST) -n 3 --dist worksteal --no-unexpected-skips -m "not alone"
	$(PYTEST) --no-unexpected-skips -m alone $$(grep -rl --include="test_*.py" mark.alone tests)

test-products: $(READY)test ## Run tests with every two values of their parameters together: before a release
	$(PYTEST) -n 3 --dist worksteal --thorough -m "not (slow or waits or alone or root or bench)" $(ARGS)

test-torch: $(READY)test ## Run torch's own tests of its class with ours in its place, and compare with what is recorded
	PYTHONPATH=tests $(BIN)/python -m torch_suite $(ARGS)

test-oldest: $(READY)test ## Run a short set of tests with the oldest torch and numpy that are supported
	$(BIN)/python .ci/oldest.py $(ARGS)

works-with: $(READY)test $(READY)integrations ## Run the tests with frameworks, and write docs/integrations/works-with.md from their results
	$(PYTEST) -n 2 --dist worksteal --junitxml out/frameworks.xml tests/frameworks tests/runner tests/faults/test_nodes.py
	PYTHONPATH=tests $(BIN)/python -m frameworks out/frameworks.xml

mutants: $(READY)test ## Change the source in one place after the other, and tell which tests notice (hours)
	PYTHONPATH=tests $(BIN)/python -m mutants $(ARGS)

soak: $(READY)test ## Train with 200 faults at random places; make soak ARGS="--seed 7 --injections 20"
	PYTHONPATH=tests $(BIN)/python -m soak $(ARGS)

bench: $(READY)bench ## Measure host overhead, Muon and steps over shaped links (root, iproute2, an idle machine, 2 hours); make bench ARGS="--quick"
	$(BIN)/python -m benchmarks $(ARGS)

bench-peers: $(READY)bench ## Make the virtual environments of Megatron-core and DeepSpeed, for benchmarks.shaped; make bench-peers ARGS="megatron"
	$(BIN)/python -m benchmarks.shaped.install $(ARGS)

figures: $(READY)bench ## Write the tables of README and docs from results of make bench; measures nothing; make figures ARGS="--pictures"
	$(BIN)/python -m benchmarks figures $(ARGS)

lint: $(READY)lint ## Check style, types and the layers of the architecture
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/mypy --untyped-calls-exclude=torch examples/*.py
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports

format: $(READY)lint ## Rewrite the sources in the project's format
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

docs: $(READY)docs ## Build the documentation in out/site; a warning is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

dist: $(READY)release ## Build the wheel and the source archive in dist, and check them and the workflows
	rm -rf dist build
	$(BIN)/python -m build --no-isolation --outdir dist
	$(BIN)/twine check --strict dist/*
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml

clean: ## Remove outputs and caches; the virtual environment stays
	rm -rf out build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find src tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} +

# .ready-EXTRA: the packages of that extra are in the environment.
$(READY)%: $(VENV)/.torch pyproject.toml constraints.txt
	@echo "Installing Undertow with its extra $* ..."
	@$(PIP_INSTALL) --no-build-isolation $(TORCH) --editable '.[$*]'
	@touch $@

# torch goes in first and alone: left to the resolver among the others, another build of it with gigabytes of CUDA packages may be
# chosen and fetched before the wheel that is already here is looked at. It requires setuptools, which builds
# Undertow in the environment itself: to make another one for the build would take 6 seconds.
$(VENV)/.torch: constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo "Undertow needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) --version 2>&1)." >&2; \
		echo "Name another interpreter, for example: make $(or $(MAKECMDGOALS),help) PYTHON=python3.12" >&2; \
		exit 1; }
	@test -x $(BIN)/pip || { echo "Making a virtual environment in $(VENV) ..."; $(PYTHON) -m venv $(VENV); } || { \
		echo "Python cannot make virtual environments here. On Debian and Ubuntu: apt-get install python3-venv" >&2; \
		exit 1; }
	@echo "Installing $(TORCH) (large; the first time takes a minute or more) ..."
	@$(PIP_INSTALL) $(TORCH)
	@touch $@
