"""Jobs of a real Slurm: `muster run` in a job step, and ranks of MPI that srun starts."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import slurm
from mpi_launchers import OPEN_MPI, OPEN_MPI_5, TIMEOUT, Launcher, launcher

__all__ = ["launcher"]  # a fixture
pytestmark = pytest.mark.slow
PROGRAM = Path(__file__).with_name("mpi_program.py")
OF_PYTEST = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "MUSTER_STORE")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Skips the tests if it cannot be started, or fails them if MUSTER_REQUIRE_SLURM is set."""
    with contextlib.ExitStack() as stack:
        try:
            environment = stack.enter_context(slurm.cluster(tmp_path_factory.mktemp("slurm")))
        except slurm.CannotStartError as error:
            if os.environ.get("MUSTER_REQUIRE_SLURM"):
                raise
            pytest.skip(str(error))
        yield {name: value for name, value in environment.items() if name not in OF_PYTEST}


def run(cluster: dict[str, str], *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**cluster, "OMP_NUM_THREADS": "1", **variables}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT)


def test_muster_run_takes_its_node_from_a_job_step(cluster: dict[str, str], built_programs: Path, root: Path) -> None:
    hello = str(root / "examples/python/hello.py")
    done = run(cluster, "srun", "--nodes=1", str(built_programs / "muster"), "run", "--nproc-per-node=2", hello)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "taken from Slurm job" in done.stderr, done.stderr
    assert sorted(re.findall(r"rank (\d) of 2: the sum is 1", done.stdout)) == ["0", "1"], done.stdout


def test_the_batch_script_of_the_documents_runs(
    cluster: dict[str, str], built_programs: Path, root: Path, tmp_path: Path
) -> None:
    script, hello, output = root / "examples/clusters/slurm.sh", root / "examples/python/hello.py", tmp_path / "out"
    path = f"{built_programs}:{cluster['PATH']}"
    words = ["sbatch", "--wait", "--nodes=1", f"--output={output}", str(script), str(hello)]
    done = run(cluster, *words, PATH=path)
    assert done.returncode == 0, done.stdout + done.stderr + output.read_text()
    assert output.read_text().count("the sum is 1") == 2, output.read_text()


def test_srun_starts_ranks_of_mpi(cluster: dict[str, str], launcher: Launcher) -> None:
    kind = "pmix" if launcher in (OPEN_MPI, OPEN_MPI_5) else "pmi2"
    listed = run(cluster, "srun", "--mpi=list")
    if kind not in listed.stdout + listed.stderr:
        pytest.skip(f"this Slurm has no {kind}")
    words = ["srun", f"--mpi={kind}", "--ntasks=2", "--overcommit", sys.executable, str(PROGRAM), "everything"]
    done = run(cluster, *words, MUSTER_MPI_LIBRARY=launcher.library)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(re.findall(r"rank (\d) of 2 is done", done.stdout)) == ["0", "1"]
