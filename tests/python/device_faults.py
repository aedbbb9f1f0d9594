"""What ranks of device_program.py do when a rank, a kernel or NCCL fails."""

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import device_double
import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

import muster


def _store() -> dist.Store:
    return c10d._get_default_store()


def _formed() -> torch.Tensor:
    """A tensor that all ranks have reduced: the group over NCCL is formed, and no kernel runs."""
    tensor = torch.ones(1000, device=device_double.DEVICE)
    dist.all_reduce(tensor)
    torch.accelerator.synchronize()
    return tensor


@contextlib.contextmanager
def _memory_is_freed() -> Iterator[None]:
    """Soon after the block: a thread may still drop the tensors of a call that has failed."""
    before, deadline = device_double.used_bytes(), time.monotonic() + 30
    yield
    torch.accelerator.synchronize()
    while device_double.used_bytes() != before:
        assert time.monotonic() < deadline
        time.sleep(0.01)  # tidy: allow(sleep) there is no event for it


def _all_reduce_until_it_fails(tensor: torch.Tensor) -> None:
    """On a device, a call fails if an earlier one has failed."""
    for _ in range(1000):
        dist.all_reduce(tensor)
        torch.accelerator.synchronize()


def _all_reduce_fails() -> None:
    """In a function, because the error keeps the tensor."""
    with pytest.raises(muster.errors.Error, match="rank 1"):
        _all_reduce_until_it_fails(torch.ones(1000, device=device_double.DEVICE))


def _all_reduce_within_a_second(tensor: torch.Tensor) -> None:
    work = muster.group().all_reduce(tensor, async_op=True, timeout=1)
    assert work is not None
    work.wait(timedelta(seconds=30))  # without a timeout, it does not wait for the device


def left(rank: int) -> None:
    """Rank 1 ends while the others wait for it."""
    tensor = _formed()
    if rank == 1:
        sys.exit(0)
    with pytest.raises(muster.errors.Error, match="rank 1"):
        _all_reduce_until_it_fails(tensor)


def killed(rank: int) -> None:
    """Rank 1 dies, while kernels of the others wait for it. They get an error, and go on without it."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # of the launcher, which ends the other ranks
    tensor = _formed()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with _memory_is_freed():
        _all_reduce_fails()
    dist.shrink_group([1], shrink_flags=c10d.SHRINK_ABORT)
    dist.all_reduce(tensor.fill_(1))
    assert tensor.cpu().unique().tolist() == [2]
    print(f"rank {rank} goes on")
    dist.barrier()


def _kernel_ends_at_its_deadline() -> None:
    tensor = torch.ones(1000, device=device_double.DEVICE)
    work: Any = muster.group().all_reduce(tensor, async_op=True, timeout=1)
    del tensor
    result = work.get_future_result()
    assert not result.done(), "the kernel still runs"
    torch.accelerator.synchronize()
    with pytest.raises(muster.errors.Error, match=r"all_reduce #2 \(float32\[1000\], sum\)"):
        work.wait(timedelta(seconds=30))
    assert result.wait() != 0


def kernel_that_hangs(rank: int) -> None:
    """A rank's kernel never ends. All ranks get an error at the deadline, and the device is free again."""
    tensor = _formed()
    if rank == 0:
        ctypes.CDLL(os.environ["MUSTER_NCCL_LIBRARY"]).fake_nccl_let_next_kernel(1)
    with _memory_is_freed():
        _kernel_ends_at_its_deadline()
    with pytest.raises(muster.errors.Error):
        dist.all_reduce(tensor)


def shrunk_while_a_kernel_hangs(rank: int) -> None:
    """The other ranks exclude a rank that hangs, long before the timeout."""
    tensor = _formed()
    if rank == 1:
        _store().wait(["shrunk"])
        os._exit(0)
    dist.all_reduce(tensor, async_op=True)  # its kernel waits for rank 1
    dist.shrink_group([1], shrink_flags=c10d.SHRINK_ABORT)
    dist.all_reduce(tensor.fill_(1))
    assert tensor.cpu().unique().tolist() == [2]
    dist.barrier()
    _store().set("shrunk", "")


def late(rank: int) -> None:
    """Rank 1 does not come. All ranks, also rank 1 later, get an error that names it."""
    tensor = _formed()
    if rank == 1:
        _store().wait(["failed"])
    expected = r"ranks 0, 2 are at all_reduce #2 .* at .*device_faults.py:\d+; rank 1 .* has not arrived, last seen at"
    with pytest.raises(muster.errors.Error, match=expected) as raised:
        _all_reduce_within_a_second(tensor)
    assert raised.value.rank == 1
    _store().set("failed", "")


def stopped(rank: int) -> None:
    """Rank 1 is stopped."""
    tensor = _formed()
    if rank == 1:
        _store().set("pid", str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
    with pytest.raises(muster.errors.Error, match=r"rank 1 .* is stopped, by a signal or a debugger") as raised:
        _all_reduce_within_a_second(tensor)
    assert raised.value.rank == 1
    if rank == 0:
        os.kill(int(_store().get("pid")), signal.SIGCONT)


def one_gpu_for_two_ranks(rank: int) -> None:
    """NCCL fails at rank 1. Every rank says so, at each call, and tensors of the CPU can still be reduced."""
    ctypes.CDLL(os.environ["MUSTER_NCCL_LIBRARY"]).fake_nccl_fail_init(1)
    tensor = torch.ones(3, device=device_double.DEVICE)
    for _ in range(2):
        with pytest.raises(muster.errors.Error, match=r"Duplicate GPU .* each rank needs a GPU of its own") as raised:
            _all_reduce_until_it_fails(tensor)
        assert raised.value.rank == 1
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [3] * 3


def no_library(rank: int) -> None:
    """Rank 1 has no NCCL."""
    if rank == 1:
        os.environ["MUSTER_NCCL_LIBRARY"] = "libmissing.so"
    with pytest.raises(muster.errors.Error, match=r"NCCL cannot be loaded: libmissing.so: .* install it") as raised:
        dist.all_reduce(torch.ones(3, device=device_double.DEVICE))
    assert raised.value.rank == 1


def abort_of_the_forming(rank: int) -> None:
    """A thread aborts the group while NCCL starts, which rank 1 never ends."""
    ctypes.CDLL(os.environ["MUSTER_NCCL_LIBRARY"]).fake_nccl_hang_init(1)
    assert dist.group.WORLD is not None
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))

    def abort() -> None:
        time.sleep(0.5)  # tidy: allow(sleep) the other thread is in the call, most likely
        backend.abort()

    thread = threading.Thread(target=abort)
    thread.start()
    with pytest.raises(muster.errors.Error, match="aborted by its user"):
        dist.all_reduce(torch.ones(3, device=device_double.DEVICE))
    thread.join()
