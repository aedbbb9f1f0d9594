"""The backend "muster-mpi", started by the launchers of Open MPI and MPICH, and by `muster run`."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
from hosts import run_on, two_hosts
from mpi_launchers import (
    MPICH,
    OPEN_MPI,
    OPEN_MPI_5,
    TIMEOUT,
    WITH_PMI_1,
    Launcher,
    command_of,
    launcher,
    run_program,
)

__all__ = ["launcher"]  # a fixture
PROGRAM = Path(__file__).with_name("mpi_program.py")
DEVICE_PROGRAM = Path(__file__).with_name("device_program.py")


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
    other = OPEN_MPI if launcher in WITH_PMI_1 else MPICH
    if command_of(other) is None:
        pytest.skip(f"{other} is not installed")
    done = run(launcher, "everything", env={"MUSTER_MPI_LIBRARY": other.library})
    assert done.returncode != 0
    assert re.search(r"MPI has 1 ranks.*but (OMPI_COMM_WORLD_SIZE|PMI_SIZE|PMI_RANK)=", output_of(done)), output_of(
        done
    )


@pytest.mark.parametrize("takes_memory", ["0", "1"])
def test_mpi_moves_memory_of_a_device(launcher: Launcher, takes_memory: str, release_build: Path) -> None:
    if launcher not in (OPEN_MPI, MPICH):
        pytest.skip("device_mpi.cpp is linked to libraries of the system")
    library = release_build / f"tests/mpi/libdevice_{launcher}.so"
    assert library.exists(), f"not built: cmake has found no {launcher.library}"
    variables = {
        "MUSTER_MPI_LIBRARY": str(library),
        "MUSTER_MPI_DEVICE_MEMORY": takes_memory,
        "MUSTER_NCCL_LIBRARY": "",
    }
    done = run_program(launcher, str(DEVICE_PROGRAM), "over_mpi", "muster-mpi", env=variables)
    assert done.returncode == 0, output_of(done)


def test_a_wrong_setting_of_device_memory_is_refused(launcher: Launcher) -> None:
    done = run(launcher, "everything", env={"MUSTER_MPI_DEVICE_MEMORY": "yes"})
    assert done.returncode != 0
    assert "MUSTER_MPI_DEVICE_MEMORY=yes: set it to 0 or 1" in output_of(done), output_of(done)


def test_a_missing_library_is_named(launcher: Launcher) -> None:
    done = run(launcher, "everything", env={"MUSTER_MPI_LIBRARY": "/missing/libmpi.so"})
    assert done.returncode != 0
    assert "MUSTER_MPI_LIBRARY: /missing/libmpi.so: cannot open shared object file" in output_of(done)


def run_by_muster(launcher: Launcher, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "MUSTER_MPI_LIBRARY": launcher.library, **env}
    command = ["muster", "run", "--nproc-per-node", "3", *arguments]
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=TIMEOUT)


def remains(temporary: Path) -> list[Path]:
    """What MPI has left there."""
    return [each for each in temporary.iterdir() if not each.name.startswith("torchinductor")]


def segments() -> set[Path]:
    """Open MPI's shared memory, of all jobs."""
    return {each for kind in ("sm", "vader") for each in Path("/dev/shm").glob(f"{kind}_segment.*")}


def test_muster_run_starts_ranks(built_programs: Path, launcher: Launcher, tmp_path: Path) -> None:
    before = segments()
    # Ranks of one host must find each other's shared memory.
    shared_memory = {OPEN_MPI: {"OMPI_MCA_btl": "self,vader"}, OPEN_MPI_5: {"OMPI_MCA_btl": "self,sm"}}
    env = {"TMPDIR": str(tmp_path), **shared_memory.get(launcher, {})}
    done = run_by_muster(launcher, str(PROGRAM), "everything", **env)
    assert done.returncode == 0, output_of(done)
    assert sorted(re.findall(r"rank (\d) of \d is done", done.stdout)) == ["0", "1", "2"]
    assert not remains(tmp_path)
    assert segments() <= before


RESTARTS = """
import os, signal, torch, torch.distributed as dist
dist.init_process_group("muster-mpi")
total = torch.ones(100_000)
dist.all_reduce(total)
if os.environ["MUSTER_GENERATION"] == "0" and dist.get_rank() == 1:
    os.kill(os.getpid(), signal.SIGKILL)
dist.barrier()
print("sum", total[-1].item())
dist.destroy_process_group()
"""


def test_muster_run_restarts_ranks(built_programs: Path, launcher: Launcher, tmp_path: Path) -> None:
    script, temporary = tmp_path / "restarts.py", tmp_path / "temporary"
    script.write_text(RESTARTS)
    temporary.mkdir()
    before = segments()
    done = run_by_muster(launcher, "--max-restarts", "1", str(script), TMPDIR=str(temporary))
    assert done.returncode == 0, output_of(done)
    assert done.stdout.count("sum 3.0") == 3, output_of(done)
    assert not remains(temporary)
    assert segments() <= before


# Rank 2 does not start MPI: it is absent, or it stops or fails after the ranks have met.
STOPS = """
import datetime, os, signal, sys, muster._C, torch.distributed as dist
if os.environ["RANK"] == "2":
    if sys.argv[1] != "absent":
        store = muster._C.store_from_environment(datetime.timedelta(seconds=10))
        store.set("muster/mpi/rank 2", f"{os.getpid()} elsewhere another-host")
        store.get("muster/mpi/rank 1")
    if sys.argv[1] == "fails":
        sys.exit("rank 2 has failed")
    signal.pause()
dist.init_process_group("muster-mpi")
"""


@pytest.mark.parametrize("mode", ["absent", "stops"])
def test_a_rank_that_does_not_start_mpi_ends_the_start(
    built_programs: Path, launcher: Launcher, tmp_path: Path, mode: str
) -> None:
    script = tmp_path / "stops.py"
    script.write_text(STOPS)
    done = run_by_muster(launcher, str(script), mode, MUSTER_TIMEOUT="3")
    assert done.returncode != 0
    missing = "barrier" if launcher in WITH_PMI_1 else "host elsewhere in fence 0 did not come in time"
    complaints = {
        "absent": "rank 2 did not come in time while MPI started",
        "stops": f"cannot go on with MPI: .*{missing}",
    }
    assert re.search(complaints[mode], output_of(done)), output_of(done)


def test_a_rank_that_fails_before_mpi_has_started_ends_the_job(
    built_programs: Path, launcher: Launcher, tmp_path: Path
) -> None:
    script = tmp_path / "fails.py"
    script.write_text(STOPS)
    # A process that stays would keep the job until the test's timeout.
    done = run_by_muster(launcher, "--shutdown-timeout", str(2 * TIMEOUT), str(script), "fails")
    assert done.returncode != 0
    assert "rank 2 has failed" in output_of(done)
    assert "left behind" not in output_of(done)


TWO_HOSTS = """
import torch, torch.distributed as dist
dist.init_process_group("muster-mpi")
total = torch.full((300_000,), dist.get_rank() + 1.0)
dist.all_reduce(total)
print("sum", total[-1].item())
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_muster_run_starts_ranks_on_two_hosts(
    release_build: Path, launcher: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "two_hosts.py"
    script.write_text(TWO_HOSTS)
    monkeypatch.setenv("MUSTER_MPI_LIBRARY", launcher.library)
    with two_hosts() as hosts:
        (status, output), (other, other_output) = run_on(hosts, release_build / "src/muster/cli/muster", [script])
    assert (status, other) == (0, 0), output + other_output
    assert (output + other_output).count("sum 10.0") == 4, output + other_output


SLOW_END = """
import time, torch.distributed as dist
dist.init_process_group("muster-mpi")
rank = dist.get_rank()
dist.destroy_process_group()
if rank == 0:
    time.sleep(12)  # tidy: allow(sleep) it works, and no call waits for it
    print("saved a checkpoint")
"""


def test_ranks_that_have_ended_wait_for_a_slow_one(built_programs: Path, launcher: Launcher, tmp_path: Path) -> None:
    """As MPI_Finalize() does: the timeout is that of the start, and of calls."""
    script = tmp_path / "slow_end.py"
    script.write_text(SLOW_END)
    done = run_by_muster(launcher, str(script), MUSTER_TIMEOUT="8")
    assert done.returncode == 0, output_of(done)
    assert "saved a checkpoint" in done.stdout


FINALIZE = """
import os, sys, time, torch, torch.distributed as dist, muster
dist.init_process_group("muster-mpi")
rank = dist.get_rank()
if sys.argv[1] == "fails" and rank == 1:
    dist.group.WORLD._get_backend(torch.device("cpu")).abort()
if rank == 0:
    time.sleep(45)  # tidy: allow(sleep) longer than MPI_Finalize() waits after a failure
    print("saved a checkpoint")
"""


@pytest.mark.parametrize("mode", ["works", "fails"])
def test_finalize_has_a_deadline_after_a_failure_only(launcher: Launcher, tmp_path: Path, mode: str) -> None:
    if launcher not in (OPEN_MPI, MPICH):
        pytest.skip("the others would take as long again")
    script = tmp_path / "finalize.py"
    script.write_text(FINALIZE)
    done = run_program(launcher, str(script), mode, ranks=2)
    assert ("saved a checkpoint" in done.stdout) == (done.returncode == 0) == (mode == "works"), output_of(done)
    assert ("MPI_Finalize" in output_of(done)) == (mode == "fails"), output_of(done)
