# Every verb sets up what it needs. TORCH_INDEX may name an index that has torch's CPU build.
PYTHON ?= python3
TORCH ?= torch==2.13.0
TORCH_INDEX ?=
# make matrix TORCH='2.9 2.15' PYTHONS='python3.11 python3.13'
PYTHONS ?= $(PYTHON)
MATRIX ?= $(HOME)/.cache/fleetlight-matrix
VENV := .venv
BIN := $(VENV)/bin
PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest

.PHONY: demo quick test test-gate test-all test-engines test-browser reading matrix check types style chaos bench gpu docs pages outputs release-check sbom clean

demo: $(VENV)/.demo  ## a real distributed run: Wide&Deep on 2 parameter servers and 2 workers
	$(BIN)/fleetrun --server_num 2 --worker_num 2 --log_dir log/demo \
	  examples/wide_deep/train_fleet.py --samples 800000
	@echo "demo: the logs are log/demo/workerlog.0, workerlog.1, serverlog.0 and serverlog.1"
	@echo "demo: to watch such a job in a browser, type"
	@echo "  $(BIN)/fleetrun --dashboard --server_num 2 --worker_num 2 examples/wide_deep/train_fleet.py"
	@echo "demo: or in a second terminal, while a job runs: $(BIN)/fleetlight top"

quick: $(VENV)/.ready  ## the fast tests in about a minute, or those of one room: make quick ROOM=ps/server
	$(PYTEST) -n 2 --dist worksteal --hypothesis-profile quick \
	  -m 'not multiprocess and not long and not slow and not style' $(if $(ROOM),tests/$(ROOM))

test: $(VENV)/.ready  ## every test function but the long ones, one case of each slow one, two at a time
	$(PYTEST) -n 2 --dist worksteal --hypothesis-profile test -m 'not long and not style'

test-engines: $(VENV)/.ready  ## jobs on real engines; without an engine its tests are skipped
	$(PYTEST) -rs tests/engines

test-browser: $(VENV)/.ready  ## the live page in Chromium; without one its tests are skipped
	$(BIN)/pip install --quiet --group browser
	$(PYTEST) -rs tests/dashboard/test_browser.py

test-gate: $(VENV)/.ready  ## those of the long tests that CI runs: kills, partitions, resume, TLS, export
	$(PYTEST) -n 2 --dist worksteal -m gate

test-all: $(VENV)/.ready  ## the whole suite: all cases, new examples of each property, engines, browser
	$(PYTEST) -n 2 --dist worksteal -m 'not style' --ignore tests/engines
	$(MAKE) --no-print-directory test-engines test-browser
	$(BIN)/python -m tests.reading --check

reading: $(VENV)/.ready  ## what a reader opens of the package on real paths: make reading ARGS='pull -v'
	$(BIN)/python -m tests.reading $(ARGS)

matrix:  ## the contract tests on several versions of torch and Python, written to docs/versions.md
	$(PYTHON) -m tests.matrix --folder '$(MATRIX)' --torch '$(patsubst torch==%,%,$(TORCH))' --pythons '$(PYTHONS)'

check: $(VENV)/.ready  ## format, lint, types, layers and shape
	$(BIN)/ruff format --check --quiet .
	$(BIN)/ruff check --quiet .
	$(BIN)/lint-imports
	$(MAKE) --no-print-directory -j 2 types style
	$(BIN)/python -m tests.reading fast --check

types: $(VENV)/.ready
	$(BIN)/mypy

style: $(VENV)/.ready
	$(PYTEST) -q -m style tests/test_*.py tests/tidy tests/security/test_no_pickle.py

chaos: $(VENV)/.ready  ## try what goes wrong, or one way of it: make chaos WHAT=killing ARGS='--kills 100 --seed 1'
	@for what in $(or $(WHAT),simulation fuzzing killing moving whole harming); do \
	  OMP_NUM_THREADS=1 $(BIN)/python -m tests.chaos.$$what $(ARGS) || exit 1; done

bench: $(VENV)/.ready  ## one benchmark: make bench NAME=eager_vs_ddp ARGS=...
	@test -n "$(NAME)" || { echo "make bench NAME=..., one of:"; ls benchmarks/*.py; exit 2; }
	$(BIN)/python -m benchmarks.$(NAME) $(ARGS)

gpu: $(VENV)/.ready  ## the tests that need a GPU, and their benchmark; without a GPU a line says so
	@if $(BIN)/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then \
	  $(PYTEST) -m gpu && $(BIN)/python -m benchmarks.gpu $(ARGS); \
	else $(BIN)/python -c 'import torch; \
	  print("make gpu: torch", torch.__version__, "sees no GPU; nothing was run")'; fi

pages: $(VENV)/.ready  ## write the pages and charts of docs/ that are made from code and results
	$(BIN)/python -m pages

outputs: $(VENV)/.ready  ## run the commands that pages print and write their outputs, in minutes: make outputs PAGE=docs/quickstart.md
	$(BIN)/python -m pages outputs $(PAGE) $(ARGS)

docs: $(VENV)/.ready  ## the documentation as a site in site/, warnings are errors
	$(BIN)/pip install --quiet --editable '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

release-check: $(VENV)/.ready  ## build and try what a release publishes; PYTHONS='python3.10 python3.13' tries others
	$(BIN)/pip install --quiet --group release
	$(BIN)/python -m release.check --torch '$(TORCH)' --pythons '$(PYTHONS)'

# in an environment of their own, which has neither pip nor tools of developers
sbom: $(VENV)/.ready  ## the packages that Fleetlight runs with, as CycloneDX JSON in dist/
	$(BIN)/pip install --quiet --group release
	$(BIN)/python -m venv --clear --without-pip build/sbom
	$(BIN)/pip --python build/sbom install --quiet $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) '$(TORCH)'
	$(BIN)/pip --python build/sbom install --quiet .
	rm build/sbom/lib/*/site-packages/fleetlight-*/direct_url.json  # the path of this folder
	mkdir -p dist
	$(BIN)/cyclonedx-py environment --output-reproducible -o dist/fleetlight.cdx.json build/sbom

clean:
	rm -rf $(VENV) build dist site log output .pytest_cache .mypy_cache .ruff_cache

# what training and the live page need
$(VENV)/.demo: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 14))' || \
	  { echo "Fleetlight needs Python 3.10 to 3.14; $(PYTHON) is $$($(PYTHON) -V 2>&1)." \
	         "Say which one to use: make PYTHON=python3.11 ..."; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1'  # the first with --group
	$(BIN)/pip install --quiet $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) '$(TORCH)'
	$(BIN)/pip install --quiet --editable '.[dashboard]'
	@$(BIN)/python -c 'import torch; print("torch", torch.__version__, \
	  "for CUDA " + torch.version.cuda if torch.version.cuda else "for CPU")'
	@touch $@

# what tests and checks need besides
$(VENV)/.ready: $(VENV)/.demo
	$(BIN)/pip install --quiet --editable . --group test --group test-extras --group lint
	@touch $@
