"""The backend "muster-mpi", started by the launchers of Open MPI and MPICH."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("mpi_program.py")
TIMEOUT = 300  # seconds: ranks of MPI do not give up their cores, and other tests run beside them


@dataclass(frozen=True)
class Launcher:
    name: str
    commands: tuple[str, ...]
    library: str

    def __str__(self) -> str:
        return self.name


OPEN_MPI = Launcher("open_mpi", ("mpirun.openmpi", "orterun"), "libmpi.so.40")
MPICH = Launcher("mpich", ("mpirun.mpich", "mpiexec.hydra"), "libmpich.so.12")
LAUNCHERS = OPEN_MPI, MPICH


@pytest.fixture(params=LAUNCHERS, ids=str)
def launcher(request: pytest.FixtureRequest) -> Launcher:
    found: Launcher = request.param
    if command_of(found) is None:
        if os.environ.get("MUSTER_REQUIRE_MPI"):
            pytest.fail(f"{found} is not installed")
        pytest.skip(f"{found} is not installed")
    return found


def command_of(launcher: Launcher) -> str | None:
    return next(filter(None, map(shutil.which, launcher.commands)), None)


def run(
    launcher: Launcher, *arguments: str, ranks: int = 3, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    variables = {
        **os.environ,
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMP_NUM_THREADS": "1",
        **(env or {}),
    }
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "MUSTER_STORE"):
        variables.pop(name, None)
    command = [command_of(launcher) or "", "-n", str(ranks), sys.executable, str(PROGRAM), *arguments]
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=TIMEOUT)


def output_of(done: subprocess.CompletedProcess[str]) -> str:
    return done.stdout + done.stderr


@pytest.mark.parametrize("ranks", [1, 3])
def test_all_of_torch_distributed_runs_over_mpi(launcher: Launcher, ranks: int) -> None:
    done = run(launcher, "everything", ranks=ranks)
    assert done.returncode == 0, output_of(done)
    assert sorted(re.findall(r"rank (\d) of \d is done", done.stdout)) == [str(rank) for rank in range(ranks)]


@pytest.mark.parametrize(
    ("function", "complaint"),
    [
        ("wrong_rank", r"was given rank 7 of 9, but this is rank \d of 3 in .*MPI.*: leave out rank= and world_size="),
        ("other_size", r"MPI has 3 ranks and this is rank \d, but WORLD_SIZE=17: start all ranks with the launcher of"),
        ("raises", "RuntimeError: rank 1 has a bug"),
        ("stuck", r"ends the job: (all_reduce|barrier) #\d+ .*: it has not ended within its timeout"),
        ("killed", "(?i)kill"),
    ],
)
def test_errors_end_the_job_and_say_why(launcher: Launcher, function: str, complaint: str) -> None:
    done = run(launcher, function)
    assert done.returncode != 0
    assert re.search(complaint, output_of(done)), output_of(done)


def test_mpi_without_threads_is_refused(launcher: Launcher) -> None:
    done = run(launcher, "without_threads", launcher.library)
    assert done.returncode != 0
    assert "was initialized by the program without MPI_THREAD_MULTIPLE" in output_of(done)


def test_a_library_that_is_not_the_launchers_is_named(launcher: Launcher) -> None:
    other = OPEN_MPI if launcher is MPICH else MPICH
    if command_of(other) is None:
        pytest.skip(f"{other} is not installed")
    done = run(launcher, "everything", env={"MUSTER_MPI_LIBRARY": other.library})
    assert done.returncode != 0
    assert re.search(r"MPI has 1 ranks.*but (OMPI_COMM_WORLD_SIZE|PMI_SIZE|PMI_RANK)=", output_of(done)), output_of(
        done
    )


def test_a_missing_library_is_named(launcher: Launcher) -> None:
    done = run(launcher, "everything", env={"MUSTER_MPI_LIBRARY": "/missing/libmpi.so"})
    assert done.returncode != 0
    assert "MUSTER_MPI_LIBRARY: /missing/libmpi.so: cannot open shared object file" in output_of(done)
