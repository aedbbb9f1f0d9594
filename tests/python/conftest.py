"""Fixtures for several test files: the built binary, and a way to run programs that shows their output on failure."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import forkserver_program
import pytest
from launching import Job, Launch, find_muster

if TYPE_CHECKING:
    from ranks import RankPool

ROOT = Path(__file__).resolve().parents[2]
Run = Callable[..., str]

# A shell starts background processes with these signals ignored, and nohup does so with the last one. `muster run`
# would keep ignoring them, and the tests that send them would hang.
for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)

# `make test` leaves tests/peer and these files to `make test-slow`: they build packages and examples, kill processes at
# many moments, run the blocks of all documents, measure, or start ranks of MPI, which do not give up their cores. The
# slowest files begin first, so that at the end all test processes have work.
SLOW_FILES = (
    "install",
    "wheel",
    "hosts",
    "kills",
    "rpc_kills",
    "rpc_faults",
    "mpi",
    "docs_run",
    "graph_agreement",
    "graph_blocking",
    "graph_chunks",
    "graph_compiled",
    "graph_backend",
    "graph_ddp",
    "graph_faults",
    "graph_runner",
    "graph_parallel",
    "graph_random",
    "graph_ranks",
    "graph_seed",
    "bench",
    "zygote",
    "import",
    "stock_tcpstore",
    "demo",
    "forkserver",
    "forkserver_warm",
    "tutorial",
    "pytest_plugin",
    "testing",
    "bench_processes",
    "docs",
    "run_nodes",
    "clusters",
    "restart",
    "examples",
    "example_pipeline",
    "rpc_autograd_idle",
    "soak_launch",
    "soak_network",
    "seeds",
    "bench_collectives",
    "bench_ddp",
    "bench_graph",
    "bench_store",
    "bench_launch",
)


# Each of these takes minutes. `make test-slow` leaves them to `make nightly`.
WEEKLY = (
    "test_bench_graph.py",
    "test_bench_processes.py",
    "test_bench_rpc.py",
    "test_graph_random.py::test_random_graphs[any order]",
    "test_graph_ranks.py::test_a_mesh_of_1024_ranks_never_waits_for_ever",
    "test_install.py::test_installed_headers_of_the_core_compile",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {f"test_{name}": place for place, name in enumerate(SLOW_FILES)}
    for item in items:
        if f"{item.path.name}::{item.name}".startswith(WEEKLY):
            item.add_marker(pytest.mark.weekly)
        elif item.path.stem in places:
            item.add_marker(pytest.mark.slow)
    items.sort(key=lambda item: places.get(item.path.stem, len(places)))


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def release_build() -> Path:
    """The build directory of preset release, or MUSTER_BUILD_DIR."""
    folder = Path(os.environ.get("MUSTER_BUILD_DIR", ROOT / "build/release"))
    if not (folder / "src/muster/cli/muster").exists():
        pytest.fail(f"{folder} holds no muster binary: `make build` first")
    return folder


@pytest.fixture
def built_programs(release_build: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the built programs. `muster bench` finds them there during this test."""
    folder = release_build / "src/muster/cli"
    monkeypatch.setenv("MUSTER_BIN", str(folder / "muster"))
    return folder


@pytest.fixture(scope="session")
def run() -> Run:
    """run(command, ...) returns its standard output. A status other than 0 fails the test and shows all its output."""

    def run_command(
        command: Sequence[str | Path], timeout: float = 300, env: Mapping[str, str] | None = None, cwd: Path = ROOT
    ) -> str:
        words = [str(word) for word in command]
        done = subprocess.run(
            words, env={**os.environ, **(env or {})}, cwd=cwd, timeout=timeout, capture_output=True, text=True
        )
        if done.returncode != 0:
            pytest.fail(f"{' '.join(words)} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}", pytrace=False)
        return done.stdout

    return run_command


@pytest.fixture(scope="module")
def server_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """In memory if there is room: etcd fails requests when a busy disk takes seconds to write its log."""
    memory = Path("/dev/shm")
    if not memory.is_dir() or shutil.disk_usage(memory).free < 1 << 30:
        yield tmp_path_factory.mktemp("server")
        return
    with tempfile.TemporaryDirectory(prefix="test-server-", dir=memory) as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def torch_prefix(run: Run) -> str:
    """The prefix in which find_package(Torch) looks."""
    return run([sys.executable, "-c", "import torch.utils; print(torch.utils.cmake_prefix_path)"]).strip()


@pytest.fixture(scope="session")
def muster() -> str:
    found = find_muster()
    if found is None:
        pytest.fail("there is no muster binary: build it, or name it with MUSTER_BIN")
    return found


@pytest.fixture(scope="module")
def runtime() -> Iterator[Path]:
    """A short path, because the paths of sockets are below it."""
    with tempfile.TemporaryDirectory(prefix="muster-") as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def without_users_zygote(runtime: Path) -> Iterator[None]:
    """Tests use no zygote that the user keeps warm."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(runtime))
        yield


@pytest.fixture(scope="module")
def ranks() -> Iterator["RankPool"]:
    """Two ranks that live for all tests of a file."""
    from ranks import RankPool  # imported here, because it imports torch, which not all files need

    pool = RankPool(2)
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def run_environment() -> dict[str, str]:
    """The variables that launch() adds to the environment. A test file may override them."""
    return {"MUSTER_PYTHON": sys.executable}


@pytest.fixture
def jobs() -> Iterator[list[Job]]:
    """The test's end kills what is left of the jobs in this list."""
    started: list[Job] = []
    yield started
    for job in started:
        job.close()


@pytest.fixture
def launch(muster: str, run_environment: dict[str, str], jobs: list[Job]) -> Launch:
    """launch(words...) starts `muster run words...`."""

    def start(
        *words: str | Path, env: dict[str, str] | None = None, stdin: int | None = None, before: Sequence[str] = ()
    ) -> Job:
        jobs.append(Job([*before, muster, "run", *words], {**run_environment, **(env or {})}, stdin))
        return jobs[-1]

    return start


@pytest.fixture
def run_to_end(jobs: list[Job]) -> Callable[..., Job]:
    """run_to_end(words, environment) returns the program's job after its end. It left no process behind."""

    def start(words: Sequence[str | Path], env: dict[str, str] | None = None) -> Job:
        jobs.append(Job(words, env))
        jobs[-1].finish()
        assert jobs[-1].left_behind() == []
        return jobs[-1]

    return start


@pytest.fixture
def program(tmp_path: Path, jobs: list[Job]) -> Callable[..., Job]:
    """program(text) starts a script that has these lines in its main part, after functions that tests need."""

    def start(text: str, functions: str = "", **env: str) -> Job:
        path = tmp_path / "program.py"
        lines = "".join(f"    {line}\n" for line in text.strip().splitlines())
        path.write_text(f"{forkserver_program.PRELUDE}{functions}\nif __name__ == '__main__':\n{lines}")
        jobs.append(Job([sys.executable, path], env))
        return jobs[-1]

    return start


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], Path]:
    """script(text) makes a file: the lines with which workers' scripts begin, then the text."""

    def write(text: str) -> Path:
        path = tmp_path / "script.py"
        path.write_text("import json, os, signal, subprocess, sys, time\nrank = int(os.environ['RANK'])\n" + text)
        return path

    return write
