"""Collectives over MPI from Python, through muster.Group and torch.distributed, against mpi4py on the same buffers and
the same MPI.

`muster bench mpi --python` starts this module with the launcher of each MPI.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from muster.bench.collectives import time_row
from muster.bench.jobs import MPIS
from muster.bench.report import BenchFailedError, Row

_LIBRARIES = {"openmpi": "libmpi.so.40", "mpich": "libmpi.so.12"}  # as mpi4py looks for them
_DEBIAN_MPICH = Path("/usr/lib", sysconfig.get_config_var("MULTIARCH") or "", "libmpich.so.12")
OPS = ("all_reduce", "broadcast", "all_gather", "all_to_all", "barrier")


def rows(mpi: str, ranks: int, ops: list[str], sizes: list[int], quick: bool, timeout: float) -> Iterator[Row]:
    """mpi: "openmpi" or "mpich"."""
    words = ["-m", __name__, ",".join(ops), ",".join(map(str, sizes)), *(["--quick"] if quick else [])]
    # Open MPI refuses to run as root, and more ranks than cores, unless it is told to.
    allowed = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "OMPI_MCA_rmaps_base_oversubscribe")
    environment = {**os.environ, **dict.fromkeys(allowed, "1")}
    command = [f"mpirun.{mpi}", "-n", str(ranks), sys.executable, *words]
    try:
        with _mpich_soname_alias() as directory:
            environment["LD_LIBRARY_PATH"] = os.pathsep.join([directory, os.environ.get("LD_LIBRARY_PATH", "")])
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        raise BenchFailedError(f"{' '.join(command)} takes longer than {timeout:g} s") from None
    if done.returncode != 0:
        raise BenchFailedError(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    for line in done.stdout.splitlines():
        if not line.startswith("{"):  # a warning of MPI
            continue
        result = json.loads(line)
        microseconds = {name: 1e6 * seconds for name, seconds in result["seconds"].items()}
        peer = microseconds.pop("mpi4py")
        yield time_row(f"mpi-python-{mpi}", result["op"], ranks, result["bytes"], microseconds, "mpi4py", peer)


@contextlib.contextmanager
def _mpich_soname_alias() -> Iterator[str]:
    """A directory for LD_LIBRARY_PATH. Debian gives MPICH another name."""
    with tempfile.TemporaryDirectory() as directory:
        if _DEBIAN_MPICH.exists():
            Path(directory, _LIBRARIES["mpich"]).symlink_to(_DEBIAN_MPICH)
        yield directory


def available(mpi: str) -> bool:
    """True if mpirun and a library that mpi4py finds are installed."""
    if shutil.which(f"mpirun.{mpi}") is None:
        return False
    if mpi == "mpich" and _DEBIAN_MPICH.exists():
        return True
    with contextlib.suppress(OSError):
        ctypes.CDLL(_LIBRARIES[mpi], mode=ctypes.RTLD_GLOBAL)
        return True
    return False


def _main() -> None:
    """At each rank."""
    import torch
    import torch.distributed as dist

    from muster.bench.timing import interleave

    parser = argparse.ArgumentParser()
    parser.add_argument("ops")
    parser.add_argument("sizes")
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("muster-mpi")
    rounds, seconds = (3, 0.05) if arguments.quick else (9, 0.2)
    for op in arguments.ops.split(","):
        for size in map(int, arguments.sizes.split(",") if op != "barrier" else ["0"]):
            taken = interleave(_variants(op, size), rounds, seconds)
            if dist.get_rank() == 0:
                print(json.dumps({"op": op, "bytes": size, "seconds": taken}), flush=True)
    dist.destroy_process_group()


def _variants(op: str, size: int) -> dict[str, Callable[[], Any]]:
    import torch
    import torch.distributed as dist

    import muster

    MPI = importlib.import_module("mpi4py.MPI")  # noqa: N806
    comm, ranks = MPI.COMM_WORLD, dist.get_world_size()
    tensor, whole = torch.ones(size // 4), torch.ones(size // 4 * ranks)
    blocks = torch.ones(max(size // 4 // ranks, 1) * ranks)
    received = torch.empty_like(blocks)
    array, gathered = tensor.numpy(), whole.numpy()
    group = muster.group()
    calls: dict[str, tuple[Callable[[], Any], ...]] = {
        "all_reduce": (
            partial(group.all_reduce, tensor),
            partial(dist.all_reduce, tensor),
            partial(comm.Allreduce, MPI.IN_PLACE, array),
        ),
        "broadcast": (
            partial(group.broadcast, tensor, 0),
            partial(dist.broadcast, tensor, 0),
            partial(comm.Bcast, array, 0),
        ),
        "all_gather": (
            partial(group.all_gather_into_tensor, whole, tensor),
            partial(dist.all_gather_into_tensor, whole, tensor),
            partial(comm.Allgather, array, gathered),
        ),
        "all_to_all": (
            partial(group.all_to_all_single, received, blocks),
            partial(dist.all_to_all_single, received, blocks),
            partial(comm.Alltoall, blocks.numpy(), received.numpy()),
        ),
        "barrier": (group.barrier, dist.barrier, comm.Barrier),
    }
    return dict(zip(("muster", "torch.distributed", "mpi4py"), calls[op], strict=True))


def found() -> list[str]:
    """The MPIs whose launchers are installed. Raises BenchFailedError if there is none, or no mpi4py."""
    mpis = list(filter(available, MPIS))
    if not mpis or importlib.util.find_spec("mpi4py") is None:
        raise BenchFailedError("--python needs mpi4py (pip install mpi4py) and mpirun.openmpi or mpirun.mpich")
    return mpis


if __name__ == "__main__":
    _main()
