# Needs Python 3.11 or later, make, and a network for the first `make setup`. Nothing has to be activated.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# Every package of the project that is there.
PACKAGES := $(patsubst %/__init__.py,%,$(wildcard $(addsuffix /__init__.py,\
	shuffle pyspark_shuffle perf tools)))
# Every benchmark: a module of perf/ with the arguments that all have. `make perf PERF=NAME` runs one.
PERF ?= $(patsubst perf/%.py,%,$(shell grep -ls '= report\.parser\b' perf/*.py))
# Two processes: most tests wait for another process, or use one core. Each has a Spark session of its own.
PYTEST_ARGS ?= --numprocesses 2 --dist worksteal

# Spark's workers run under the python3 of the PATH unless told otherwise, and that one has none of our packages.
export PYSPARK_PYTHON := $(CURDIR)/$(BIN)/python
export PYSPARK_DRIVER_PYTHON := $(CURDIR)/$(BIN)/python
WITH_JAVA = JAVA_HOME="$$($(BIN)/python tools/java_home.py)" && export JAVA_HOME &&

.DEFAULT_GOAL := help
.PHONY: help setup check format test test-long test-kafka perf demo reference proto clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(STAMP) ## build .venv with everything in it, and a Java runtime if the machine has none
	@# Asked again each time: the Java of the machine may have gone since.
	@java_home="$$($(BIN)/python tools/java_home.py --install)" && echo "ready: $(BIN)/shuffle, Java in $$java_home"

$(STAMP): pyproject.toml setup.py constraints.txt shuffle/support/native/kernels.c tools/java_home.py
	@command -v "$(PYTHON)" >/dev/null || { \
		echo "no '$(PYTHON)' on the PATH; give one with: make PYTHON=/path/to/python3.11 setup" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "$$("$(PYTHON)" --version) is too old: Python 3.11 or later is needed;" \
			"give one with: make PYTHON=/path/to/python3.11 setup" >&2; exit 1; }
	"$(PYTHON)" -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --build-constraint constraints.txt \
		--editable '.[delta,dev,iceberg,kafka,perf,spark]'
	$(BIN)/python tools/java_home.py --install >/dev/null
	@touch $(STAMP)

check: $(STAMP) ## ruff and mypy, changing nothing
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict $(PACKAGES)

format: $(STAMP) ## let ruff mend what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

test: check ## check, then every test but the long ones
	$(WITH_JAVA) $(BIN)/python -m pytest $(PYTEST_ARGS)

test-long: $(STAMP) ## the long tests only
	$(WITH_JAVA) $(BIN)/python -m pytest -m long --timeout 1800 $(PYTEST_ARGS)

test-kafka: $(STAMP) ## the tests with a real Kafka broker, the long ones too; they fail if it cannot be had
	$(WITH_JAVA) SHUFFLE_TEST_KAFKA=always $(BIN)/python -m pytest -m kafka --timeout 600 $(PYTEST_ARGS)

perf: $(STAMP) ## every benchmark, results and pictures also in perf/results
	@mkdir -p perf/results
	$(WITH_JAVA) for name in $(PERF); do echo "== $$(date +%T) perf.$$name"; \
		$(BIN)/python -m perf.$$name --json perf/results/$$name.json || exit 1; done

demo: $(STAMP) ## a small processor from beginning to end
	$(BIN)/shuffle demo

reference: $(STAMP) ## make the tables of docs/reference anew from the code
	$(BIN)/python -m tools.reference

proto: $(STAMP) ## generate statestore/wire/proto/*_pb2*.py again
	$(BIN)/python -m grpc_tools.protoc -I . --python_out=. --pyi_out=. --grpc_python_out=. shuffle/statestore/wire/proto/*.proto

clean: ## remove what make made, .venv too
	rm -rf $(VENV) build shuffle/support/native/*.so perf/results *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	rm -rf spark-warehouse metastore_db artifacts derby.log
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
