# `make` lists the targets. Settings: VENV, VARIANT=auto|cpu|cuda, PYTHON (to make the venv with), NPROC, ARGS.
VENV    ?= .venv
VARIANT ?= auto
NPROC   ?= 2
ARGS    ?=

BIN      := $(VENV)/bin
PY       := $(BIN)/python
STAMP    := $(VENV)/.installed
TORCHRUN := OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone
SOURCES  := hybridengine tests benchmarks examples

.DEFAULT_GOAL := help
.PHONY: help run install constraints docs-site install-cuda install-sglang install-peers lint test test-sglang test-slow test-gpu test-faults mutants gpu-smoke cuda-coverage families bench-peers bench-reshard bench-sleep bench-placement bench-separate bench-algorithms bench-sandbox bench-rewards bench-gpu docs structure clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

run: $(STAMP)  ## install, then train the embedded model by GRPO (ARGS="seed=2 output_dir=outputs/seed2" overrides)
	$(TORCHRUN) --nproc-per-node $(NPROC) -m hybridengine.train +experiment=quickstart $(ARGS)

install: $(STAMP)  ## make .venv: the CPU set, or the CUDA set where nvidia-smi finds a GPU

install-cuda:  ## make .venv with the CUDA set, whatever this machine has; needs a driver for CUDA 13
	scripts/install.sh cuda $(VENV)
	@touch $(STAMP)

# Runs again when what is to be installed changes; the code itself is installed editable.
$(STAMP): pyproject.toml scripts/install.sh $(wildcard setup.py scripts/constraints-*.txt)
	scripts/install.sh $(VARIANT) $(VENV)
	@touch $@

SGLANG_STAMP := .venv-sglang/.installed

install-sglang: $(SGLANG_STAMP)  ## make .venv-sglang: SGLang, whose pins conflict with vLLM's

$(SGLANG_STAMP): scripts/install_sglang.sh $(STAMP)
	scripts/install_sglang.sh $(VARIANT) $(VENV) .venv-sglang
	@touch $@

install-peers: $(STAMP)  ## make .venv-peers: TRL beside the same torch and vLLM
	scripts/install_peers.sh $(VENV) .venv-peers

lint: $(STAMP)  ## ruff and mypy
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/mypy

test: lint  ## ruff, mypy and every test that needs neither a GPU nor minutes
	OMP_NUM_THREADS=1 $(PY) -m pytest -m "not slow and not gpu" $(ARGS)

test-sglang: $(SGLANG_STAMP)  ## SGLang and engines in processes of their own: contract, deaths
	OMP_NUM_THREADS=1 $(PY) -m pytest -m "not slow and not gpu" tests/unit/engines/rollout/remote/test_engine.py \
		tests/unit/schedule/test_worker.py tests/unit/engines/rollout/sglang/test_sampler.py tests/engines/test_separate.py \
		tests/e2e/test_separate.py tests/e2e/test_engine_death.py $(ARGS)

test-slow: $(STAMP)  ## the long tests
	OMP_NUM_THREADS=1 $(PY) -m pytest -m "slow and not gpu" $(ARGS)

test-faults: $(STAMP)  ## kill -9 at 100 random moments, 10,000 configurations (ARGS="--kills 20 --fuzz 0"); JSON in the last line
	OMP_NUM_THREADS=1 $(PY) -m tests.faults $(ARGS)

mutants: $(STAMP)  ## small faults put into a copy of the code: does a test notice each? JSON in the last line
	$(PY) -m tests.mutants $(ARGS)

cuda-coverage: $(STAMP)  ## without a GPU: which lines that only a GPU reaches do the tests execute?
	$(PY) -m tests.cuda.coverage_report $(ARGS)

# On a machine that has a CUDA torch and vLLM already, nothing is installed: make gpu-smoke PY=python3
GPU_STAMP := $(if $(filter command line,$(origin PY)),,$(STAMP))
# Every file with tests that need a GPU; others need packages that a GPU machine may not have.
GPU_TESTS := tests/gpu tests/unit/memory tests/engines/test_residency_engines.py

gpu-smoke: $(GPU_STAMP)  ## on one GPU: the whole program, check by check; dated results (ARGS="--only quickstart,sleep-1")
	$(PY) -m tests.gpu.smoke $(ARGS)

test-gpu: $(GPU_STAMP)  ## the tests that need a CUDA GPU
	OMP_NUM_THREADS=2 $(PY) -m pytest -m gpu $(GPU_TESTS) $(ARGS)

bench-gpu: $(GPU_STAMP)  ## on one GPU: copies, weights between processes, offloading, a 1.5B model beside its bill; dated results
	$(PY) -m benchmarks.bench_gpu $(ARGS)

families: $(STAMP)  ## which model families run: tiny models of each, scored by every side (ARGS="gemma2 --tp 2")
	OMP_NUM_THREADS=1 $(PY) -m benchmarks.families $(ARGS)

bench-peers: install-peers  ## the same job through TRL, arms interleaved
	OMP_NUM_THREADS=1 $(PY) -m benchmarks.bench_step $(ARGS)

bench-reshard: $(STAMP)  ## training layout to inference layout: bytes and seconds
	OMP_NUM_THREADS=1 $(PY) -m benchmarks.bench_reshard $(ARGS)

bench-sleep: $(STAMP)  ## memory that comes and goes: seconds, bytes freed, peak of a step
	OMP_NUM_THREADS=1 $(PY) -m benchmarks.bench_sleep $(ARGS)

bench-placement: $(STAMP)  ## colocated or disaggregated, under which schedule: real runs, and the simulator against them
	OMP_NUM_THREADS=1 $(PY) -m benchmarks.bench_placement $(ARGS)

bench-separate: $(SGLANG_STAMP)  ## weights into an engine in processes of its own: bytes and seconds
	OMP_NUM_THREADS=1 $(PY) -m benchmarks.bench_separate $(ARGS)

bench-algorithms: $(STAMP)  ## learning curves of every algorithm, three seeds; GRPO beside TRL's where .venv-peers is
	OMP_NUM_THREADS=1 $(PY) -W ignore -m benchmarks.bench_algorithms $(ARGS)

bench-sandbox: $(STAMP)  ## the code sandbox: HumanEval, hostile programs, programs per second
	OMP_NUM_THREADS=1 $(PY) -m benchmarks.bench_sandbox $(ARGS)

bench-rewards: $(STAMP)  ## what scoring costs generation: in worker processes, in threads
	OMP_NUM_THREADS=1 $(PY) -m benchmarks.bench_rewards $(ARGS)

structure: $(STAMP)  ## sizes, arrows between packages, what a new algorithm touches; JSON in the last line
	OMP_NUM_THREADS=1 $(PY) -m tests.structure

docs: $(STAMP)  ## write docs/config.md from the schema
	$(PY) -m hybridengine.tools.config_docs docs/config.md

docs-site: $(STAMP)  ## the documentation as a site in build/site; a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --site-dir build/site

constraints: $(STAMP)  ## write this environment's versions as the tested ones (scripts/constraints-cpu.txt)
	$(PY) scripts/constraints.py $(if $(filter auto,$(VARIANT)),cpu,$(VARIANT)) scripts/constraints-$(if $(filter auto,$(VARIANT)),cpu,$(VARIANT)).txt

clean:  ## remove build products and caches; leaves .venv and outputs
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find hybridengine tests benchmarks examples -name __pycache__ -type d -exec rm -rf {} +
