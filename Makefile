# PYTHON names the Python to make .venv with; ARGS goes to the command behind demo, test and bench.
PYTHON ?= python3
ARGS ?=

# A process that finds its modules compiled starts in half the time, and tests start many of them.
unexport PYTHONDONTWRITEBYTECODE

python := .venv/bin/python
installed := .venv/.installed
lock := $(python) -m uv pip compile --quiet --universal --generate-hashes --python-version 3.11 \
	--no-emit-index-url --custom-compile-command "make lock"
# Tests wait for two thirds of their time, so six processes keep two processors busy. Each has servers
# of its own, in memory where there is room.
processes := --numprocesses 6 --dist worksteal
hot_tests := tests/unit/test_frame_reader.py tests/unit/test_fold.py tests/unit/test_copydata.py \
	tests/unit/test_transactions.py tests/property/test_compiled.py tests/property/test_blocks.py \
	tests/property/test_fold.py tests/property/test_copydata.py
build_tools := uv hatchling editables setuptools Cython

.PHONY: help demo test screens image matrix torture fleet sanitize nightly check fix reference docs bench lock release
.DEFAULT_GOAL := help

help:
	@echo "make demo       demonstrates streamer on this machine; ARGS='--seconds 60 --keep'"
	@echo "make test       runs the test suite; ARGS='-x tests/unit' selects tests"
	@echo "make screens    takes pictures of every page, in build/screens"
	@echo "make image      builds the wheel as the Dockerfile does, and runs program and demo from it; TEST_PYTHONS=python3.12:python3.14"
	@echo "make matrix     runs integration and fault tests with several servers and settings; ARGS=--all takes all"
	@echo "make torture    runs random work with random faults; SECONDS=300 SEED=1 WORKERS=1,8 STREAMING=off POSTGRES=16:18"
	@echo "make fleet      shares tenants of two clusters among replicas and kills them; SOURCES=60 REPLICAS=3"
	@echo "make sanitize   tests the extension module with bounds checks and an address sanitizer"
	@echo "make nightly    runs tests with many examples and asyncio's debug mode, the sanitizer, the image, the matrix, torture, and the fleet"
	@echo "make check      checks lint, format and types"
	@echo "make fix        fixes lint and format where the tools can"
	@echo "make docs       builds the documentation as a site, in build/docs"
	@echo "make reference  writes the generated parts of docs/reference, and config.example.yaml"
	@echo "make bench      measures against PostgreSQL's own subscription; ARGS='--only insert,mix --rounds 5'"
	@echo "make release    prepares the release of a version: VERSION=0.2.0; CONTRIBUTING.md has the next steps"
	@echo "make lock       resolves the lock files again; ARGS=--upgrade takes the newest versions"

demo: $(installed)
	@scripts/with_java.sh $(python) -m streamer demo $(ARGS)

test: $(installed)
	@scripts/with_java.sh scripts/with_chromium.sh $(python) -m pytest $(processes) --ignore tests/image $(ARGS)

# Every page in good and in bad state, light, dark and on a phone; the tests also measure that each fits.
screens: $(installed)
	@mkdir -p build/screens
	@SCREENSHOTS=$(CURDIR)/build/screens scripts/with_java.sh scripts/with_chromium.sh \
		$(python) -m pytest tests/browser --numprocesses 2 --dist worksteal $(ARGS)

image: $(installed)
	@scripts/with_java.sh scripts/with_tini.sh $(python) -m pytest tests/image $(ARGS)

matrix: $(installed)
	@scripts/with_java.sh $(python) -m tests.matrix $(ARGS)

torture: $(installed)
	@$(python) -m tests.torture $(if $(SECONDS),--seconds $(SECONDS)) $(if $(SEED),--seed $(SEED)) \
		$(if $(WORKERS),--workers $(WORKERS)) $(if $(STREAMING),--streaming $(STREAMING)) \
		$(if $(POSTGRES),--postgres $(POSTGRES)) $(ARGS)

fleet: $(installed)
	@scripts/with_java.sh scripts/with_chromium.sh $(python) -m tests.fleet $(if $(SOURCES),--sources $(SOURCES)) \
		$(if $(REPLICAS),--replicas $(REPLICAS)) $(ARGS)

# The extension module with bounds checks, under gcc's address sanitizer; the fast one comes back.
sanitize: $(installed)
	@$(python) hatch_build.py --checked >/dev/null
	@failed=0; \
	LD_PRELOAD="$$(gcc -print-file-name=libasan.so)" ASAN_OPTIONS=detect_leaks=0 PYTHONMALLOC=malloc \
		STREAMER_IMPLEMENTATION=compiled $(python) -m pytest -p no:cacheprovider $(hot_tests) || failed=1; \
	$(python) hatch_build.py >/dev/null; \
	exit $$failed

# Each part runs although one before it failed. The option is for loops of tests, which pytest-asyncio
# makes without a look at the variable; the variable is for programs.
nightly: $(installed)
	@failed=0; \
	PROPERTY_EXAMPLES=300 FUZZ_EXAMPLES=50 COMPARE_RUNS=10 TEST_COMBINATIONS=all TEST_LOCK_SECONDS=120 PYTHONASYNCIODEBUG=1 \
		$(MAKE) test ARGS='--asyncio-debug $(ARGS)' || failed=1; \
	$(MAKE) sanitize || failed=1; \
	$(MAKE) image || failed=1; \
	$(MAKE) matrix || failed=1; \
	$(MAKE) torture SECONDS=600 || failed=1; \
	$(MAKE) fleet || failed=1; \
	exit $$failed

check: $(installed)
	@$(python) -m ruff check
	@$(python) -m ruff format --check
	@$(python) -m mypy

fix: $(installed)
	@$(python) -m ruff check --fix
	@$(python) -m ruff format

# The variable silences the announcement that MkDocs 2 will drop themes; docs/decisions/security-and-page.md has more.
docs: $(installed)
	@NO_MKDOCS_2_WARNING=1 $(python) -m mkdocs build --strict
	@echo "open build/docs/index.html"

reference: $(installed)
	@$(python) -m scripts.reference

bench: $(installed)
	@scripts/with_java.sh $(python) -m benchmarks $(ARGS)

release: $(installed)
	@$(python) -m scripts.release $(VERSION)

lock: $(installed)
	@$(lock) $(ARGS) --output-file requirements.lock pyproject.toml
	@$(lock) $(ARGS) --output-file requirements-dev.lock --extra dev --extra docs pyproject.toml
	@printf '%s\n' $(build_tools) | \
		$(lock) $(ARGS) --no-annotate --output-file requirements-build.lock -

# Runs again when a requirement changes.
$(installed): scripts/setup.sh pyproject.toml requirements-dev.lock requirements-build.lock \
		tests/requirements-postgres.lock tests/requirements-validators.lock hatch_build.py streamer/compiled/_compiled.pyx
	@PYTHON="$(PYTHON)" scripts/setup.sh
	@touch $@
