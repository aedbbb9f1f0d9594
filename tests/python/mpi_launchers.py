"""Starts programs with the launchers of Open MPI and MPICH."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

TIMEOUT = 300  # seconds: ranks of MPI do not give up their cores, and other tests run beside them


@dataclass(frozen=True)
class Launcher:
    name: str
    commands: tuple[str, ...]
    library: str

    def __str__(self) -> str:
        return self.name


_PREFIX = Path(sys.prefix)  # tools/setup.py installs two there
OPEN_MPI = Launcher("open_mpi", ("mpirun.openmpi", "orterun"), "libmpi.so.40")
MPICH = Launcher("mpich", ("mpirun.mpich", "mpiexec.hydra"), "libmpich.so.12")
OPEN_MPI_5 = Launcher("open_mpi_5", (f"{_PREFIX}/open_mpi_5/bin/mpirun",), f"{_PREFIX}/open_mpi_5/lib/libmpi.so.40")
MPI_ABI = Launcher("mpi_abi", (f"{_PREFIX}/mpich_5/bin/mpirun",), f"{_PREFIX}/mpich_5/lib/libmpi_abi.so.0")
WITH_PMI_1 = MPICH, MPI_ABI
LAUNCHERS = OPEN_MPI, OPEN_MPI_5, MPICH, MPI_ABI


@pytest.fixture(params=LAUNCHERS, ids=str)
def launcher(request: pytest.FixtureRequest) -> Launcher:
    """Skips the test if there is no such launcher, or fails it if MUSTER_REQUIRE_MPI is set."""
    found: Launcher = request.param
    if command_of(found) is None:
        if os.environ.get("MUSTER_REQUIRE_MPI"):
            pytest.fail(f"{found} is not installed")
        pytest.skip(f"{found} is not installed")
    return found


def command_of(launcher: Launcher) -> str | None:
    return next(filter(None, map(shutil.which, launcher.commands)), None)


def run_program(
    launcher: Launcher, *arguments: str, ranks: int = 3, env: dict[str, str] | None = None, timeout: int = TIMEOUT
) -> subprocess.CompletedProcess[str]:
    """`arguments`: those of the Python interpreter."""
    variables = {
        **os.environ,
        **({"MUSTER_MPI_LIBRARY": launcher.library} if "/" in launcher.library else {}),
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",  # Open MPI 5
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMP_NUM_THREADS": "1",
        **(env or {}),
    }
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "MUSTER_STORE"):
        variables.pop(name, None)
    command = [command_of(launcher) or "", "-n", str(ranks), sys.executable, *arguments]
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=timeout)
