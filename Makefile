# make demo    set everything up, build, and train on real data with two processes
# make test    the same set-up, then lint, C++ tests and the quick Python tests
# make test-slow   the Python tests that kill, install, measure and run the documents; CI runs these, fuzz and soak, too
# make bench   muster beside its peers, in one run        make format   clang-format and ruff over the sources
# make asan, make tsan   the core's tests under sanitizers, with TORCH=ON muster::torch's too (slow)
# make non-unity   all sources and tests compiled one by one, because a unity build hides missing includes (slow)
# make tidy    clang-tidy over the core (slow)
# make gpu     the tests of tensors on a device, on a GPU, with NCCL, and its times beside torch's. Needs torch with CUDA
# make arm64   the core's tests for arm64, cross-compiled and run under qemu-user (Debian)
# make peer    PyTorch's own tests of c10d and DDP, all of them, over muster, at 2 and at 4 ranks
# make matrix  make test and make peer with each supported release of torch, and a build with the oldest: hours; .ci/weekly
# make fuzz    the fuzz targets alone under AddressSanitizer and UBSan, a minute each at most
# make soak    the tests that go on for as long as they may, for SECONDS=1800 in all; prints their figures
# make nightly more of everything that is drawn from a seed or bounded elsewhere: hours (docs/project/testing.md)
# make frameworks   installs Accelerate, Lightning, Ray and others in .venv, and runs docs/integrations.md
# make docs    the documentation as a site, out/site/index.html
# make wheel   dist/torch_muster-*.whl, for the releases TORCHES="2.13.0 2.14.1 2.15.0" if they are given. MANYLINUX=ON:
#              for all Linux systems with glibc 2.28 or later
# make clean   remove build/, dist/ and out/
SHELL := /bin/bash
export PATH := $(CURDIR)/.venv/bin:$(PATH)
PYTHON3 ?= python3
STAGE := python3 tools/stage.py
JOBS ?= $(shell nproc)
PYTEST ?=

.PHONY: demo test test-slow bench format asan tsan non-unity fuzz soak arm64 gpu peer frameworks matrix nightly wheel docs tidy clean setup build lint
.DEFAULT_GOAL := demo
.NOTPARALLEL:  # stages write to the screen one after the other

# A release (make test TORCH=2.15.0): set-up installs it, instead of the default. The sanitizers build muster::torch with
# any value but OFF.
TORCH ?= OFF
DEFAULT_TORCH := $(shell sed -n 's/^TORCH = "\(.*\)".*/\1/p' tools/setup.py)
WITH_TESTS := --tests
demo: WITH_TESTS :=
setup:
	@$(PYTHON3) tools/setup.py $(WITH_TESTS) $(filter 2.%,$(TORCH))

WERROR ?= OFF
build: setup
	@$(STAGE) configure -- cmake --preset release -DMUSTER_WERROR=$(WERROR)
	@$(STAGE) build -- cmake --build --preset release -j $(JOBS)

demo: setup  # builds what it runs, and no tests
	@$(STAGE) configure -- cmake --preset release -DMUSTER_WERROR=$(WERROR)
	@$(STAGE) build -- cmake --build --preset release --target muster _C -j $(JOBS)
	muster run --nproc-per-node 2 examples/python/digits.py

lint: setup
	@$(STAGE) tidy --summary . -- python3 tools/tidy.py
	@$(STAGE) ruff -- ruff check .
	@$(if $(filter-out $(DEFAULT_TORCH),$(filter 2.%,$(TORCH))),echo 'mypy checks the sources with torch $(DEFAULT_TORCH) only',$(STAGE) mypy -- mypy)

RUN_PYTEST := --summary '(passed|skipped).* in ' -- python3 -m pytest -n $(shell expr $(JOBS) + 2) --dist loadfile --no-loadscope-reorder
test: lint build
	@$(STAGE) ctest --summary 'tests passed|Total Test time' -- ctest --preset release -j $$(($(JOBS) + 4))
	@$(STAGE) pytest $(RUN_PYTEST) tests/python -m 'not slow and not weekly' $(PYTEST)

test-slow: build
	@$(STAGE) "slow pytest" $(RUN_PYTEST) -m slow $(PYTEST)

# One that this machine cannot run (mpi without MPI, network without root) says so, and costs the others nothing.
BENCHES := collectives mpi network ddp ddp-network rpc store startup-load graph
BENCH_collectives := collectives --ranks 2,4,8 --buffers warm,cold
BENCH_mpi := mpi --buffers warm,cold
BENCH_ddp-network := ddp --network
bench: build
	@mkdir -p out; left=; \
	$(foreach b,$(BENCHES),muster bench $(or $(BENCH_$(b)),$(b)) \
	  --json out/$(b).json --markdown out/$(b).md --plot out/$(b).png || left="$$left $(b)"; ) \
	test -z "$$left" || { echo "make bench: not measured:$$left" >&2; exit 1; }

asan tsan: setup
	@$(STAGE) "$@ configure" -- cmake --preset $@ -DMUSTER_BUILD_TORCH=$(if $(filter OFF,$(TORCH)),OFF,ON)
	@$(STAGE) "$@ build" -- cmake --build --preset $@ -j $(JOBS)
	@$(STAGE) "$@ ctest" --summary 'tests passed|Total Test time' -- ctest --preset $@ -j $(JOBS)

non-unity: setup
	@$(STAGE) "$@ configure" -- cmake --preset tidy -DMUSTER_BUILD_TORCH=ON
	@$(STAGE) "$@ build" -- cmake --build build/tidy -j $(JOBS)

FUZZ_SEED ?= 1
FUZZ_SECONDS ?= 60
fuzz: setup
	@$(STAGE) "fuzz configure" -- cmake --preset fuzz -DMUSTER_FUZZ_SEED=$(FUZZ_SEED) -DMUSTER_FUZZ_SECONDS=$(FUZZ_SECONDS)
	@$(STAGE) "fuzz build" -- cmake --build --preset fuzz --target fuzzers muster -j $(JOBS)
	@$(STAGE) "fuzz ctest" --summary 'tests passed|Total Test time' -- ctest --preset fuzz -R fuzz -j $(JOBS)

SECONDS ?= 1800
soak: build
	@python3 tools/soak.py --seconds $(SECONDS)

ARM64_TESTS := base_test reduce_test compress_test execution_test process_link_test host_comm_test host_collectives_test \
  group_test group_mismatch_test
# What cannot be under qemu-user: deaths are its own, and it keeps no limit on memory.
ARM64_WITHOUT := *DeathTest*:*GroupWithoutArena*
ARM64_NAMES := $(subst $(eval) ,|,$(ARM64_TESTS))
arm64: setup
	@$(STAGE) "arm64 packages" -- python3 tools/arm64.py
	@$(STAGE) "arm64 configure" -- cmake --preset arm64
	@$(STAGE) "arm64 build" -- cmake --build --preset arm64 --target $(ARM64_TESTS) -j $(JOBS)
	@GTEST_FILTER='-$(ARM64_WITHOUT)' $(STAGE) "arm64 ctest" --summary 'tests passed|Total Test time' -- ctest --preset arm64 -R '^($(ARM64_NAMES))$$' -j $(JOBS)

gpu: build
	@MUSTER_TEST_DEVICE=cuda $(STAGE) gpu --summary '(passed|skipped).* in ' -- python3 -m pytest -rs tests/python/test_devices.py $(PYTEST)
	@for part in staged "calls --ranks 1" calls start; do \
	  MUSTER_TEST_DEVICE=cuda python3 tests/python/device_bench.py $$part || exit 1; done

peer: build
	@for ranks in 2 4; do MUSTER_PEER=all MUSTER_PEER_RANKS=$$ranks $(STAGE) "peer, $$ranks ranks" \
	  --summary '(passed|skipped).* in ' -- python3 -m pytest tests/peer -q $(PYTEST) || exit 1; done

FRAMEWORKS ?= tests/frameworks/requirements_light.txt tests/frameworks/requirements.txt
frameworks: build
	@$(PYTHON3) tools/setup.py $(filter 2.%,$(TORCH)) --requirements $(FRAMEWORKS)
	@$(STAGE) frameworks $(RUN_PYTEST) tests/frameworks $(PYTEST)

MATRIX ?= 2.13.0 2.14.1 2.15.0
OLDEST ?= 2.11.0
matrix:
	@for release in $(MATRIX); do echo "torch $$release"; $(MAKE) --no-print-directory test peer TORCH=$$release || exit 1; done
	@echo "torch $(OLDEST), build only"; $(MAKE) --no-print-directory build TORCH=$(OLDEST)
	@$(MAKE) --no-print-directory setup

SEED ?= $(shell date +%Y%m%d)
ROUNDS ?= 50000
nightly: build peer
	@$(STAGE) "weekly pytest" $(RUN_PYTEST) tests/python -m weekly $(PYTEST)
	@MUSTER_SEED=$(SEED) MUSTER_ROUNDS=$(ROUNDS) $(STAGE) "simulated crashes" \
	  -- build/release/tests/collective/simulation_test --gtest_filter='*Crashes*:*CutOff*'
	@MUSTER_SEED=$(SEED) MUSTER_ROUNDS=$(ROUNDS) $(STAGE) "simulated tiers" -- build/release/tests/sim/store_tier_linear_test
	@MUSTER_SEED=$(SEED) MUSTER_WORKERS=100000 MUSTER_ROUNDS=1 $(STAGE) "simulated starts" -- build/release/tests/sim/store_start_up_test
	@MUSTER_KILL_CASES=all $(STAGE) "kills in collectives" -- build/release/tests/group/group_kill_test
	@MUSTER_MISMATCHES=all $(STAGE) "calls that differ" -- build/release/tests/group/group_mismatch_test
	@MUSTER_TEST_SLOW=1 MUSTER_DDP_EXAMPLES=500 $(STAGE) "DDP, more of it" --summary '(passed|skipped).* in ' \
	  -- python3 -m pytest tests/python/test_nn_ddp.py -q $(PYTEST)
	@MUSTER_RANKS=512 $(STAGE) "512 ranks" -- build/release/tests/group/group_test --gtest_filter='*ManyRanks*'
	@MUSTER_RANKS=512 $(STAGE) "512 ranks in a team" \
	  -- build/release/tests/collective/host_collectives_test --gtest_filter='*OfManyRanks*'
	@MUSTER_TEST_HUGE=1 $(STAGE) "tensors over 4 GiB" --summary '(passed|skipped).* in ' \
	  -- python3 -m pytest -q tests/python/test_backend_collectives.py -k 4_gib
	@$(MAKE) --no-print-directory fuzz FUZZ_SEED=$(SEED) FUZZ_SECONDS=$$(($(ROUNDS) / 100))
	@$(MAKE) --no-print-directory asan tsan TORCH=ON
	@if command -v apt-get > /dev/null; then $(MAKE) --no-print-directory arm64; else echo "arm64: left out, Debian only"; fi

docs:
	@$(PYTHON3) tools/setup.py --docs $(filter 2.%,$(TORCH))
	@$(STAGE) configure -- cmake --preset release
	@$(STAGE) build -- cmake --build --preset release --target muster _C -j $(JOBS)
	@NO_MKDOCS_2_WARNING=1 $(STAGE) docs --summary '^(WARNING|ERROR)' -- mkdocs build

TORCHES ?=
wheel: setup
	@$(STAGE) wheel --summary . -- python3 tools/build_wheel.py $(if $(filter ON,$(MANYLINUX)),--manylinux) $(TORCHES)

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
