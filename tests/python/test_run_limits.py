"""Tests `muster run` in containers: limits of a cgroup, no directory to write to, no network."""

import contextlib
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

import pytest
from launching import Launch, wait_until

CGROUPS = Path("/sys/fs/cgroup")
Limit = Callable[[str, Mapping[str, str]], list[str]]


@pytest.fixture
def limit() -> Iterator[Limit]:
    """limit(controller, files) makes a cgroup with those of the files that this version of cgroups has. Returns a
    command that runs its arguments in the cgroup. Name this fixture before `launch`, which ends the processes.
    """
    made: list[Path] = []

    def make(controller: str, files: Mapping[str, str]) -> list[str]:
        for base in (CGROUPS / controller, CGROUPS):
            path = base / f"muster-test-{os.getpid()}"
            with contextlib.suppress(OSError):
                path.mkdir()
                made.append(path)
                there = {path / name: text for name, text in files.items() if (path / name).exists()}
                for file, text in there.items():
                    file.write_text(text)
                if there:
                    return ["sh", "-c", f'echo $$ > {path}/cgroup.procs && exec "$0" "$@"']
        pytest.skip(f"this process cannot make a cgroup with the {controller} controller")

    def is_removed(path: Path) -> bool:
        with contextlib.suppress(OSError):  # a process that has just ended is still in it
            path.rmdir()
        return not path.exists()

    yield make
    for path in made:
        wait_until(partial(is_removed, path))


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one CPU is no more than the quota")
def test_a_cpu_quota_limits_the_number_of_workers(limit: Limit, launch: Launch) -> None:
    half = limit("cpu", {"cpu.max": "50000 100000", "cpu.cfs_quota_us": "50000"})
    job = launch("--nproc-per-node=cpu", "--no-python", "sh", "-c", "echo of $WORLD_SIZE", before=half)
    assert job.finish() == 0, job.err
    assert job.out == "[rank 0] of 1\n"


def test_the_out_of_memory_killer_is_named(limit: Limit, launch: Launch, script: Callable[[str], Path]) -> None:
    small = limit("memory", {"memory.max": f"{1 << 27}", "memory.limit_in_bytes": f"{1 << 27}", "memory.swap.max": "0"})
    job = launch("--nproc-per-node=2", script("if rank == 1: print(len(b'x' * (1 << 28)))\nsignal.pause()"),
                 before=small)  # fmt: skip
    assert job.finish() == 137
    assert re.search(r"rank 1 .* \(SIGKILL\): the kernel's out-of-memory killer ended it, the memory limit is 128 MiB",
                     job.err), job.err  # fmt: skip
    assert job.left_behind() == []


def test_a_read_only_file_system_is_named(launch: Launch) -> None:
    job = launch("-m", "platform", env={"TMPDIR": "/proc"})  # no user can make a directory there
    assert job.finish() == 1
    assert re.search(r"cannot create a directory in /proc: .*; set TMPDIR to a directory", job.err), job.err


def test_a_loopback_that_is_down_is_named(launch: Launch) -> None:
    isolated = ["unshare", "--map-root-user", "--net"]
    if not shutil.which("unshare") or subprocess.run([*isolated, "true"], stderr=subprocess.DEVNULL).returncode:
        pytest.skip("this process cannot make a network namespace")
    jobs = [launch("--no-python", "/bin/true", before=before) for before in ([], isolated)]
    assert [job.finish() for job in jobs] == [0, 0], "".join(job.err for job in jobs)
    assert ["the loopback interface is down" in job.err for job in jobs] == [False, True]
