"""The backend "muster-mpi", started by the launchers of Open MPI and MPICH."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from mpi_launchers import MPICH, OPEN_MPI, Launcher, command_of, launcher, run_program

__all__ = ["launcher"]  # a fixture
PROGRAM = Path(__file__).with_name("mpi_program.py")


def run(
    launcher: Launcher, *arguments: str, ranks: int = 3, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return run_program(launcher, str(PROGRAM), *arguments, ranks=ranks, env=env)


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
