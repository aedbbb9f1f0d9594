"""Tests `muster run` in containers: limits of a cgroup, no directory to write to, no network."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

import pytest
from hosts import skip
from launching import Launch, marked_processes, wait_until

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
        return skip(f"this process cannot make a cgroup with the {controller} controller")

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
        skip("this process cannot make a network namespace")
    jobs = [launch("--no-python", "/bin/true", before=before) for before in ([], isolated)]
    assert [job.finish() for job in jobs] == [0, 0], "".join(job.err for job in jobs)
    assert ["the loopback interface is down" in job.err for job in jobs] == [False, True]


# What `docker run --read-only --tmpfs /run` makes when a user without root's rights calls it.
CONTAINER = """
ip link set lo up
mount -t tmpfs -o size=64m shm /dev/shm
mount -t tmpfs -o size=1m run /run
mount -o remount,bind,ro /
! mountpoint -q /tmp || mount -o remount,bind,ro /tmp
exec "$0" "$@"
"""
NAMESPACES = ["--user", "--map-root-user", "--mount", "--pid", "--fork", "--mount-proc", "--net", "--ipc", "--uts",
              "--cgroup", "--kill-child"]  # fmt: skip
TRAINING = """
import torch
import torch.distributed as dist
print('threads', os.environ['OMP_NUM_THREADS'], flush=True)
dist.init_process_group('muster')
for length in (1, 1 << 20):
    data = torch.full((length,), float(rank + 1))
    dist.all_reduce(data)
    assert data.eq(3).all()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 1))
model(torch.ones(4, 8)).sum().backward()
print('gradient', model.module.weight.grad.sum().item(), flush=True)
dist.destroy_process_group()
"""


@pytest.fixture
def container(limit: Limit) -> list[str]:
    """A command that runs its arguments in a container: 1 CPU, 4 GiB, and a file system of which only /run and /dev/shm
    can be written.
    """
    words = ["unshare", *NAMESPACES, "sh", "-ec", CONTAINER]
    if not shutil.which("unshare") or subprocess.run([*words, "true"], capture_output=True).returncode:
        skip("this process cannot make a container")
    cpu = limit("cpu", {"cpu.max": "100000 100000", "cpu.cfs_quota_us": "100000"})
    memory = limit("memory", {"memory.max": f"{4 << 30}", "memory.limit_in_bytes": f"{4 << 30}"})
    return [*cpu, *memory, *words]


def test_a_job_runs_in_a_container(container: list[str], launch: Launch, script: Callable[[str], Path]) -> None:
    pytest.importorskip("torch")
    job = launch("--nproc-per-node=2", script(TRAINING), before=container)
    assert job.finish() == 1
    assert re.search(r"cannot create a directory in /tmp: Read-only file system; set TMPDIR to a directory", job.err)
    job = launch("--nproc-per-node=2", script(TRAINING), before=container, env={"TMPDIR": "/run"})
    assert job.finish() == 0, job.err
    assert job.out.count("threads 1\n") == 2, job.out
    assert job.out.count("gradient 32.0\n") == 2, job.out
    assert job.left_behind() == []


def test_a_container_is_stopped_by_sigterm(container: list[str], launch: Launch) -> None:
    """The launcher is PID 1 there, and the kernel gives that process no signal without a handler."""
    code = "trap 'echo handled; exit 0' TERM; echo ready; while true; do sleep 0.1; done"
    job = launch("--no-python", "sh", "-c", code, before=container, env={"TMPDIR": "/run"})
    job.expect("ready")
    (launcher,) = (pid for pid in marked_processes(job.mark) if is_first(pid))
    os.kill(launcher, signal.SIGTERM)
    job.finish()
    assert "handled" in job.out
    assert job.left_behind() == []


def is_first(pid: int) -> bool:
    """True if the process is PID 1 of its own namespace."""
    with contextlib.suppress(OSError):
        numbers = re.search(r"^NSpid:(.*)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
        return numbers is not None and numbers.group(1).split()[1:] == ["1"]
    return False
