# make demo    set everything up, build, and train on real data with two processes
# make test    the same set-up, then lint, C++ tests and Python tests; CI runs this and make fuzz
# make bench   muster beside its peers, in one run        make format   clang-format and ruff over the sources
# make asan, make tsan   the core's tests under sanitizers   make tidy    clang-tidy over the core (slow)
# make peer    PyTorch's own tests of c10d and DDP, all of them, over muster, at 2 and at 4 ranks
# make fuzz    the fuzz targets alone under AddressSanitizer and UBSan, a minute each at most
# make wheel   dist/torch_muster-*.whl                    make clean    remove build/, dist/ and out/
SHELL := /bin/bash
export PATH := $(CURDIR)/.venv/bin:$(PATH)
PYTHON3 ?= python3
STAGE := python3 tools/stage.py
JOBS ?= $(shell nproc)
PYTEST ?=

.PHONY: demo test bench format asan tsan fuzz peer wheel tidy clean setup build lint
.DEFAULT_GOAL := demo
.NOTPARALLEL:  # stages write to the screen one after the other

setup:
	@$(PYTHON3) tools/setup.py

build: setup
	@$(STAGE) configure -- cmake --preset release
	@$(STAGE) build -- cmake --build --preset release -j $(JOBS)

demo: build
	muster run --nproc-per-node 2 examples/python/digits.py

lint: setup
	@$(STAGE) tidy --summary . -- python3 tools/tidy.py
	@$(STAGE) ruff -- ruff check .
	@$(STAGE) mypy -- mypy

test: lint build
	@$(STAGE) ctest --summary 'tests passed|Total Test time' -- ctest --preset release -j $$(($(JOBS) + 1))
	@$(STAGE) pytest --summary '(passed|skipped).* in ' -- python3 -m pytest -n $(JOBS) --dist loadfile $(PYTEST)

bench: build
	@mkdir -p out
	muster bench collectives --ranks 2,4,8 --buffers warm,cold \
	  --json out/collectives.json --markdown out/collectives.md --plot out/collectives.png
	muster bench mpi --buffers warm,cold --json out/mpi.json --markdown out/mpi.md --plot out/mpi.png
	muster bench network --json out/network.json --markdown out/network.md --plot out/network.png
	muster bench store --json out/store.json --markdown out/store.md --plot out/store.png
	muster bench storm --json out/storm.json --markdown out/storm.md --plot out/storm.png

asan tsan: setup
	@$(STAGE) "$@ configure" -- cmake --preset $@
	@$(STAGE) "$@ build" -- cmake --build --preset $@ -j $(JOBS)
	@$(STAGE) "$@ ctest" --summary 'tests passed|Total Test time' -- ctest --preset $@ -j $(JOBS)

fuzz: setup
	@$(STAGE) "fuzz configure" -- cmake --preset asan
	@$(STAGE) "fuzz build" -- cmake --build --preset asan --target fuzzers -j $(JOBS)
	@$(STAGE) "fuzz ctest" --summary 'tests passed|Total Test time' -- ctest --preset asan -R fuzz -j $(JOBS)

peer: build
	@for ranks in 2 4; do MUSTER_PEER=all MUSTER_PEER_RANKS=$$ranks $(STAGE) "peer, $$ranks ranks" \
	  --summary '(passed|skipped).* in ' -- python3 -m pytest tests/peer -q $(PYTEST) || exit 1; done

wheel: setup
	@CXX=$(if $(filter environment,$(origin CXX)),$(CXX),c++) $(STAGE) wheel -- pip wheel . --no-deps --no-build-isolation --wheel-dir dist
	@ls dist/*.whl

needs-%:
	@command -v $* > /dev/null || { echo "$* is missing: apt-get install $*"; exit 1; }

format: setup needs-clang-format
	@git ls-files -co --exclude-standard '*.h' '*.cpp' | xargs clang-format -i
	@ruff check --fix --quiet . ; ruff format --quiet .

tidy: setup needs-clang-tidy
	@$(STAGE) "tidy configure" -- cmake --preset tidy
	@$(STAGE) clang-tidy -- run-clang-tidy -quiet -p build/tidy -j $(JOBS) '/src/muster/.*\.cpp$$'

clean:
	rm -rf build dist out
