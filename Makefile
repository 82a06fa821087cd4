# Every target does its own set-up: a machine with Python >= 3.11 and git is enough.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# The packages as a wheel has them, their hot modules compiled; before our own folder on the path, for children as well.
COMPILED := build/compiled
BUILT := $(COMPILED)/.ready
AS_BUILT := PYTHONSAFEPATH=1 PYTHONPATH=$(CURDIR)/$(COMPILED):$(CURDIR):$(CURDIR)/tests/envoy:$(CURDIR)/tests/engine
WORKERS ?= auto

.PHONY: help setup demo compiled test test-engine wire fuzz fuzz-lane bench-policies bench-disturbances bench-live bench-fidelity bench-view bench-late bench-late-live bench-binding bench-classes bench-flood bench-overhead bench-tail bench-stages bench-streams bench-soak bench-loop bench-start lint format examples clean

help: ## show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 28

setup: $(READY) ## make .venv with everything in it

$(READY): pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) not found"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "$(PYTHON) is too old: Pointsman needs Python 3.11 or newer (make PYTHON=python3.12 ...)"; exit 1; }
	@echo "installing into $(VENV): one to two minutes"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[dev,demo,embedded]'
	@touch $@

$(BUILT): $(READY) hatch_build.py $(shell find extproc policies vllm_adapters ! -name '*.pyc' ! -name __pycache__)
	@echo "compiling into $(COMPILED): a minute or two"
	@$(BIN)/python hatch_build.py $(COMPILED)
	@touch $@

compiled: $(BUILT) ## the packages with their hot modules compiled, in build/compiled

demo: $(READY) ## four simulated engines behind a real Envoy: round robin, then the default policy
	$(BIN)/pointsman demo

# Tests start hundreds of processes; each would compile all our modules anew.
unexport PYTHONDONTWRITEBYTECODE

PYTEST := pytest -q -n $(WORKERS) --maxprocesses 4 --no-loadscope-reorder --durations 20

test: $(BUILT) ## every test as users run us, compiled; the fast ones interpreted as well; and the coverage gate
	$(BIN)/coverage erase
	$(BIN)/coverage run -m $(PYTEST) tests/unit tests/conformance $(ARGS)
	$(AS_BUILT) $(BIN)/coverage run -m $(PYTEST) $(ARGS)
	@$(BIN)/coverage combine --quiet
	$(BIN)/coverage report

wire: $(BUILT) ## what gateways can rely on, over every transport
	$(AS_BUILT) $(BIN)/pytest -q tests/conformance

test-engine: $(BUILT) ## the tests over real vLLM servers on CPU; makes their environment (3 GB) on the first run
	$(AS_BUILT) $(BIN)/pytest -s tests/engine

fuzz: $(BUILT) ## 50,000 generated requests through the whole path
	$(AS_BUILT) FUZZ_EXAMPLES=50000 $(BIN)/pytest -q --timeout 3000 tests/unit/extproc/test_fuzz.py

fuzz-lane: $(BUILT) ## 2,000 sessions of 30 streams from python-h2, at our own HTTP/2 and at both transports
	$(AS_BUILT) FUZZ_SESSIONS=2000 $(BIN)/pytest -q --timeout 3000 tests/unit/extproc/wire/test_http2.py tests/conformance/test_hostile_bytes.py

BENCH_POLICIES := default,least-request,round-robin,cache-aware,smg-cache-aware,aibrix-prefix,llm-d-default,dynamo-kv@exact,lmetric,preble-e2
BENCH := --offline --engines 8 --resume .bench

bench-policies: $(READY) ## the tables of docs/benchmarks.md: make bench-policies TRACE=FILE [ARGS=...]
	@test -n "$(TRACE)" || { echo "name a trace: make bench-policies TRACE=conversation_trace.jsonl"; exit 1; }
	$(BIN)/pointsman replay "$(TRACE)" $(BENCH) --policies $(BENCH_POLICIES) --index engine \
	  --load 0.8,0.95,1.05 --seeds 3 $(ARGS)

bench-disturbances: $(READY) ## five disturbances of fleet or traffic: make bench-disturbances TRACE=FILE [ARGS=...]
	@test -n "$(TRACE)" || { echo "name a trace: make bench-disturbances TRACE=conversation_trace.jsonl"; exit 1; }
	$(BIN)/pointsman replay "$(TRACE)" $(BENCH) --disturbances \
	  --policies $(BENCH_POLICIES),power-of-two,consistent-hash,weighted,long-prompts $(ARGS)

bench-live: $(BUILT) ## the same order through a real Envoy: make bench-live TRACE=FILE [ARGS=...]
	@test -n "$(TRACE)" || { echo "name a trace: make bench-live TRACE=conversation_trace.jsonl"; exit 1; }
	$(AS_BUILT) $(BIN)/pointsman replay "$(TRACE)" --live --speed 2 --engines 4 --requests 600 --load 0.9 \
	  --policies round-robin,least-request,llm-d-default,smg-cache-aware,default $(ARGS)

bench-fidelity: $(BUILT) ## the simulator beside a real vLLM on CPU: make bench-fidelity [ARGS='--seeds 5']
	$(AS_BUILT) $(BIN)/python -m benchmarks.fidelity $(ARGS)

bench-view: $(BUILT) ## how late figures are, pushed and scraped, from a real vLLM on CPU: make bench-view [ARGS='--changes 300']
	$(AS_BUILT) $(BIN)/python -m benchmarks.view_age $(ARGS)

LATE := default,default+late,default+queue,smg-cache-aware,smg-cache-aware+queue

bench-late: $(READY) ## late binding offline, in overload and in a flood: make bench-late TRACE=FILE [ARGS=...]
	@test -n "$(TRACE)" || { echo "name a trace: make bench-late TRACE=conversation_trace.jsonl"; exit 1; }
	$(BIN)/pointsman replay "$(TRACE)" $(BENCH) --policies $(LATE) --load 0.95,1.05,1.1 --seeds 3 $(ARGS)
	for told in timed never; do $(BIN)/pointsman replay "$(TRACE)" $(BENCH) --policies default,default+late \
	  --load 1.05,1.1 --seeds 3 --first-tokens $$told $(ARGS) || exit 1; done
	$(BIN)/pointsman replay "$(TRACE)" $(BENCH) --policies $(LATE) --flood --load 0.6 --seeds 3 $(ARGS)

bench-late-live: $(BUILT) ## the same through a real Envoy: make bench-late-live TRACE=FILE [ARGS=...]
	@test -n "$(TRACE)" || { echo "name a trace: make bench-late-live TRACE=conversation_trace.jsonl"; exit 1; }
	$(AS_BUILT) $(BIN)/pointsman replay "$(TRACE)" --live --speed 2 --engines 4 --requests 600 --load 1.05,1.1 \
	  --policies default,default+late,smg-cache-aware $(ARGS)

bench-binding: $(BUILT) ## the CPU time of one pass of late binding: make bench-binding [ARGS='--passes 300']
	$(AS_BUILT) $(BIN)/python -m benchmarks.binding_pass $(ARGS)

bench-classes: $(BUILT) ## two classes at three times what engines can do, through a real Envoy
	$(AS_BUILT) $(BIN)/python -m benchmarks.classes $(ARGS)

bench-flood: $(BUILT) ## a tenant at twenty times its quota, through a real Envoy
	$(AS_BUILT) $(BIN)/python -m benchmarks.flood $(ARGS)

bench-streams: $(BUILT) ## thousands of slow streams through a real Envoy, by both transports
	$(AS_BUILT) $(BIN)/python -m benchmarks.streams $(ARGS)

bench-overhead: $(BUILT) ## CPU, throughput and latency of both transports beside a server that does nothing
	$(AS_BUILT) $(BIN)/python -m benchmarks.overhead $(ARGS)

bench-tail: $(BUILT) ## both transports under Poisson arrivals: p50, p99 and p99.9
	$(AS_BUILT) $(BIN)/python -m benchmarks.tail $(ARGS)

bench-stages: $(BUILT) ## the CPU time of each step of a decision: make bench-stages [ARGS='--slices 400']
	$(AS_BUILT) $(BIN)/python -m benchmarks.stages $(ARGS)

bench-soak: $(BUILT) ## twenty minutes of mixed load, churn, reloads and kills: make bench-soak [ARGS='--minutes 2']
	$(AS_BUILT) $(BIN)/python -m benchmarks.soak $(ARGS)

bench-loop: $(BUILT) ## how long many endpoints and large bodies keep the decision loop, and what they leave in memory
	$(AS_BUILT) $(BIN)/python -m benchmarks.loop $(ARGS)

bench-start: $(BUILT) ## how long `serve` takes until it is ready
	$(AS_BUILT) $(BIN)/python -m benchmarks.start $(ARGS)

lint: $(READY) ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY) ## let ruff put things in order
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

examples: $(READY) ## regenerate envoy/*.yaml
	$(BIN)/pointsman envoy --format bootstrap envoy/pointsman.yaml > envoy/bootstrap.yaml
	$(BIN)/pointsman envoy --format filters envoy/pointsman.yaml > envoy/filters.yaml

clean: ## remove everything that can be made again
	rm -rf $(VENV) .bench .coverage* .mypy_cache .ruff_cache .pytest_cache .hypothesis dist build
