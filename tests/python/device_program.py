"""A rank of test_devices.py and test_mpi.py, which start it with the name of one of the functions below, and with the
backend if it is not muster.
"""

import ctypes
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import device_double
import device_faults
import device_training
import pytest
import test_backend_collectives as collectives
import torch
import torch.distributed as dist
from device_training import DELAY

import muster

NOT_REDUCED_BY_NCCL = (torch.int16, torch.uint16, torch.complex32)


def on_device(*shape: int, value: float) -> torch.Tensor:
    return torch.empty(shape, device=device_double.DEVICE).fill_(value)


def torchs_calls(rank: int) -> None:
    """What test_backend_collectives.py does with tensors of the CPU, with tensors of the device."""
    torch.set_default_device(device_double.DEVICE)
    if os.environ["MUSTER_NCCL_LIBRARY"]:
        collectives.REDUCED = [dtype for dtype in collectives.REDUCED if dtype not in NOT_REDUCED_BY_NCCL]
    collectives.check_moves_at_rank(rank)
    collectives.reductions(rank)
    for check in (
        collectives.uneven,
        collectives.shared_memory,
        collectives.strides,
        collectives.premultiplied_sums,
        collectives.messages,
        collectives.batched,
    ):
        check(rank)


def streams(rank: int) -> None:
    """Collectives wait for the kernels before them in the current stream, and what follows them sees the result."""
    size = dist.get_world_size()
    total = size * (size + 1) / 2
    wide = torch.zeros(1000, 2, device=device_double.DEVICE)
    dist.all_reduce(wide[:, 0])  # the first collective forms the group on the device
    wide.fill_(rank + 1)
    device_double.set_kernel_delay(DELAY)
    work = dist.all_reduce(wide[:, 0], async_op=True)  # its result is copied back, by a kernel after the collective
    assert work is not None
    while not work.is_completed():
        time.sleep(0.001)  # tidy: allow(sleep) without a wait
    work.wait()
    assert wide[:, 0].clone().cpu().unique().tolist() == [total]

    tensor = on_device(1000, value=rank + 1)
    dist.all_reduce(tensor)
    copied = tensor.clone()
    assert copied.cpu().unique().tolist() == [total]

    stream = torch.Stream(device_double.DEVICE)
    with stream:
        tensor = on_device(1000, value=rank + 1)
        work = dist.all_reduce(tensor, async_op=True)
        assert work is not None
    work.wait()
    assert tensor.cpu().unique().tolist() == [total], "another stream than that of the call"

    # A kernel that was launched before the call writes the output. It must not run after the call.
    with stream:
        received = on_device(4, value=-1.0)
        work = dist.irecv(received, (rank - 1) % size)
    assert work is not None
    dist.send(torch.full((4,), float(rank)), (rank + 1) % size)  # from the CPU: waits for no kernel
    work.wait()
    torch.accelerator.synchronize()
    assert received.cpu().unique().tolist() == [(rank - 1) % size]

    # The program may drop its tensors before the end.
    works = [dist.all_reduce(on_device(50_000, value=1.0), async_op=True) for _ in range(5)]
    for work in works:
        assert work is not None
        work.wait()
        (result,) = work.get_future().value()
        assert result.cpu().unique().tolist() == [size]


def large(rank: int) -> None:
    """Through the host, large tensors are copied in pieces while the collective runs."""
    size = dist.get_world_size()
    total = size * (size + 1) // 2
    count = (5 << 20) + 3  # the last piece is short
    for dtype in (torch.float32, torch.int64, torch.complex64):
        tensor = torch.empty(count, dtype=dtype, device=device_double.DEVICE)
        tensor.fill_(0)
        device_double.set_kernel_delay(DELAY)
        tensor.fill_(rank + 1)  # still runs when the call begins
        work = dist.all_reduce(tensor, async_op=True)
        assert work is not None
        work.wait()
        assert (tensor.cpu() == total).all()
        device_double.set_kernel_delay(0)
    tensor = (torch.arange(count, dtype=torch.float64) * (rank + 1)).to(device_double.DEVICE)
    dist.all_reduce(tensor, op=dist.ReduceOp.AVG)
    assert torch.allclose(tensor.cpu(), torch.arange(count, dtype=torch.float64) * (total / size))
    matrix = torch.ones(4096, 2048, device=device_double.DEVICE)
    dist.all_reduce(matrix.t())  # in no order that pieces could have
    assert matrix.cpu().unique().tolist() == [size]
    if not os.environ["MUSTER_NCCL_LIBRARY"]:
        tensor = torch.ones(count, device="cpu" if rank == 0 else device_double.DEVICE)
        dist.all_reduce(tensor)
        assert tensor.cpu().unique().tolist() == [size]
        with pytest.raises(NotImplementedError, match="a tensor on meta has no data"):
            muster.group().all_reduce(torch.empty(count, device="meta"))


def two_devices(rank: int) -> None:
    torch.accelerator.set_device_index(rank % 2)
    tensor = torch.full((8,), float(rank), device=f"{device_double.DEVICE}:{rank % 2}")
    dist.all_reduce(tensor)
    assert tensor.device.index == rank % 2
    assert tensor.cpu().unique().tolist() == [sum(range(dist.get_world_size()))]


def groups(rank: int) -> None:
    """Groups that are made from the first one take the device's tensors, too."""
    size = dist.get_world_size()
    every = [dist.new_group(), dist.new_group(backend="muster"), dist.split_group(split_ranks=[list(range(size))])]
    for group in every:
        for device in ("cpu", device_double.DEVICE):
            tensor = torch.ones(3, device=device)
            dist.all_reduce(tensor, group=group)
            assert tensor.cpu().tolist() == [size] * 3
    objects: list[object] = [None] * size
    dist.all_gather_object(objects, rank)
    assert objects == list(range(size))
    dist.barrier()
    group = muster.group()
    tensor = torch.ones(3, device=device_double.DEVICE)
    group.all_reduce(tensor)
    assert tensor.cpu().tolist() == [size] * 3


def batches_of_messages(rank: int) -> None:
    """Ranks send to each other and receive at once. Once the group is formed, in one kernel of NCCL."""
    size = dist.get_world_size()
    for formed in (False, True):
        if formed:
            dist.all_reduce(torch.ones(1, device=device_double.DEVICE))
        for dtype in (torch.float32, torch.complex64):
            sent = [
                torch.full((50_000,), 10.0 * rank + peer, dtype=dtype).to(device_double.DEVICE) for peer in range(size)
            ]
            received = [torch.empty_like(sent[0]) for _ in range(size)]
            received[0] = torch.empty(2, 50_000, dtype=dtype, device=device_double.DEVICE).t()[:, 0]  # with strides
            calls = [
                dist.P2POp(call, tensors[peer], peer)
                for peer in range(size)
                if peer != rank
                for call, tensors in ((dist.isend, sent), (dist.irecv, received))
            ]
            for work in dist.batch_isend_irecv(calls):
                work.wait()
            for peer in range(size):
                if peer != rank:
                    assert (received[peer].cpu() == 10 * peer + rank).all()


def graph(rank: int) -> None:
    """A graph captures collectives, and runs them again with other values."""
    size = dist.get_world_size()
    x, gathered = on_device(1000, value=0), on_device(size * 1000, value=0)
    parts, wide = [on_device(10, value=0) for _ in range(2)], on_device(1000, 2, value=0)
    with pytest.raises(ValueError, match="make one before the capture"):
        capture(lambda: dist.all_reduce(x))
    dist.all_reduce(x)
    device_double.set_kernel_delay(10 * DELAY)
    works = [dist.all_reduce(torch.zeros(1000, device=device_double.DEVICE), async_op=True) for _ in range(5)]

    def step() -> None:
        while works[0] is not None and not works[0].is_completed():
            time.sleep(0.001)  # tidy: allow(sleep) a work ends, and others are pending
        y = torch.empty_like(x)
        y.copy_(x)
        dist.all_reduce(y)
        work = dist.all_gather_into_tensor(gathered, y, async_op=True)
        with dist._coalescing_manager(async_ops=False):
            for each in parts:
                dist.all_reduce(each)
        wide[:, 0].copy_(x)
        dist.all_reduce(wide[:, 0])  # with strides: its memory is copied
        assert work is not None
        work.wait()

    captured = capture(step)
    if device_double.IS_DOUBLE:
        assert works[-1] is not None
        assert not works[-1].is_completed(), "a thread has looked for its end during the capture"
    device_double.set_kernel_delay(0)
    for work in works:
        assert work is not None
        work.wait()
    for value in (1, 5):
        x.fill_(rank + value)
        for each in parts:
            each.fill_(value)
        captured.replay()
        torch.accelerator.synchronize()
        total = sum(range(value, value + size))
        assert gathered.cpu().unique().tolist() == [total]
        assert wide[:, 0].cpu().unique().tolist() == [total]
        assert all(each.cpu().unique().tolist() == [value * size] for each in parts)
    dist.all_reduce(x)  # calls go on as before
    assert x.cpu().unique().tolist() == [total]


def graph_beside_copies(rank: int) -> None:
    """A large all_reduce ends while a graph captures other kernels."""
    tensor, source, copy = (on_device(count, value=0) for count in (5 << 20, 10, 10))
    dist.all_reduce(tensor)
    device_double.set_kernel_delay(DELAY)
    tensor.fill_(rank)
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None

    def step() -> None:
        copy.copy_(source)
        while not work.is_completed():
            time.sleep(0.001)  # tidy: allow(sleep) without a wait

    captured = capture(step)
    device_double.set_kernel_delay(0)
    source.fill_(3)
    captured.replay()
    torch.accelerator.synchronize()
    assert copy.cpu().unique().tolist() == [3]
    assert tensor.cpu().unique().tolist() == [sum(range(dist.get_world_size()))]


def capture(step: Callable[[], object]) -> torch.accelerator.Graph:
    made = torch.accelerator.Graph()
    with torch.Stream(device=device_double.DEVICE):
        made.capture_begin()
        try:
            step()
        finally:
            made.capture_end()
    return made


def errors(rank: int) -> None:
    """Of a group whose tensors go through the host."""
    device = on_device(3, value=1)
    dist.all_reduce(device)
    with pytest.raises(ValueError, match=r"a graph cannot capture it, because tensors on .* go through the host"):
        capture(lambda: dist.all_reduce(device))
    with pytest.raises(NotImplementedError, match="a tensor on meta has no data"):
        muster.group().all_reduce(torch.empty(3, device="meta"))
    with pytest.raises(muster.MismatchError, match=r"all_reduce #2 \(float32\[4\], sum\)"):
        dist.all_reduce(torch.ones(3 + rank % 2, device=device_double.DEVICE))


def reconfigured(rank: int) -> None:
    """The ranks form groups by reconfigure(), which torch has from 2.14 on."""
    torchs, group = vars(dist), dist.group.WORLD
    own = torchs["_get_reconfigure_handle"](group)
    store = dist.distributed_c10d._get_default_store()
    store.set(f"handle {rank}", own)
    handles = [store.get(f"handle {each}").decode() for each in range(3)]
    for uuid, members in ((1, handles), (2, handles[::-1]), (3, handles[:2])):
        if own not in members:
            return
        torchs["_reconfigure"](uuid, members).wait()
        tensor = torch.full((10,), dist.get_rank() + 1.0, device=device_double.DEVICE)
        dist.all_reduce(tensor)
        assert tensor.cpu().unique().tolist() == [sum(range(len(members) + 1))]
        if os.environ["MUSTER_NCCL_LIBRARY"]:
            formed = {each["transport"] for each in muster.dump(1) if each["group"].startswith(f"reconfigured-{uuid}-")}
            assert "nccl" in formed


def nccl(rank: int) -> None:
    """Which calls go over NCCL, and the order of kernels without a wait on the host."""
    size = dist.get_world_size()
    tensor = torch.ones(1000, device=device_double.DEVICE)
    dist.all_reduce(tensor)  # forms the group
    device_double.set_kernel_delay(20 * DELAY)
    works = [dist.all_reduce(tensor, async_op=True) for _ in range(4)]
    last = works[-1]
    assert last is not None
    if device_double.IS_DOUBLE:
        assert not last.is_completed(), "a call does not wait for its kernel"
    last.wait()
    device_double.set_kernel_delay(0)
    assert tensor.cpu().unique().tolist() == [float(size**5)]
    device_double.set_kernel_delay(20 * DELAY)
    tensor.fill_(1)
    work = dist.all_reduce(tensor, async_op=True)
    device_double.set_kernel_delay(0)
    assert work is not None
    states = []
    while not work.is_completed():
        states += [group["operations"][-1]["state"] for group in muster.dump(1) if group["transport"] == "nccl"]
    if device_double.IS_DOUBLE:
        assert list(dict.fromkeys(states))[:2] == ["queued", "running"], states
    dumped = subprocess.run(["muster", "dump", str(os.getpid())], capture_output=True, text=True, check=True).stdout
    assert re.search(
        rf'group "0/device" of {size} over nccl.*\n.*done .* all_reduce #1 \(float32\[1000\], sum\)', dumped
    )
    if torch.accelerator.device_count() > 1:
        with pytest.raises(ValueError, match=r"where its first one ran; this tensor is on .*:1"):
            dist.all_reduce(torch.ones(3, device=f"{device_double.DEVICE}:1"))
    mixed = [torch.ones(3, device=device_double.DEVICE), *(torch.ones(3) for _ in range(size - 1))]
    with pytest.raises(ValueError, match="this tensor is on cpu"):
        dist.all_gather(mixed, mixed[0])
    with pytest.raises(NotImplementedError, match="NCCL cannot reduce int32 by band"):
        dist.all_reduce(torch.ones(3, dtype=torch.int32, device=device_double.DEVICE), op=dist.ReduceOp.BAND)
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [size] * 3, "the CPU's tensors go over muster"


def over_mpi(rank: int) -> None:
    """MPI that takes memory of the device gets it from calls that only move data: tests/mpi/device_mpi.cpp counts."""
    mpi = ctypes.CDLL(os.environ["MUSTER_MPI_LIBRARY"])
    double = torch.ops.muster_device_double
    functions = double.host_address_function(), double.current_device_function()
    mpi.device_mpi_take(1, *(ctypes.c_void_p(each) for each in functions))
    torch.accelerator.set_device_index(1)  # the threads of muster begin with device 0
    torchs_calls(rank)
    size, takes_memory = dist.get_world_size(), os.environ["MUSTER_MPI_DEVICE_MEMORY"] == "1"
    device_double.set_kernel_delay(DELAY)

    def check(call: Callable[[], torch.Tensor], buffers: int, expected: list[float]) -> None:
        before = mpi.device_mpi_buffers()
        assert call().tolist() == expected
        assert mpi.device_mpi_buffers() - before == (buffers if takes_memory else 0)

    def broadcast(stride: int) -> torch.Tensor:
        data = on_device(3 * stride, value=rank + 5)[::stride]
        dist.broadcast(data, src=1)
        return data

    def reduce() -> torch.Tensor:
        data = on_device(3, value=rank + 1)
        dist.all_reduce(data)
        return data

    def gather(begin: int) -> torch.Tensor:
        """The input lies in the output; in its own place for begin = 2 * rank."""
        data = on_device(2 * size, value=rank + 1)
        work = dist.all_gather_into_tensor(data, data[begin : begin + 2], async_op=True)
        assert work is not None
        work.wait()
        return data

    def message() -> torch.Tensor:
        data, received = on_device(4, value=rank), on_device(4, value=-1)
        works = [dist.isend(data, (rank + 1) % size), dist.irecv(received, (rank - 1) % size)]
        for work in works:
            assert work is not None
            work.wait()
        return received

    in_order = [float(each + 1) for each in range(size) for _ in range(2)]
    check(lambda: broadcast(stride=1), 1, [6.0] * 3)
    check(lambda: broadcast(stride=2), 0, [6.0] * 3)
    check(reduce, 0, [size * (size + 1) / 2] * 3)
    check(lambda: gather(begin=1), 2, in_order)
    check(lambda: gather(begin=2 * rank), 1, in_order)
    check(message, 2, [float((rank - 1) % size)] * 4)
    torch.accelerator.set_device_index(0)
    both = [torch.full((4,), value, device=f"{device_double.DEVICE}:1") for value in (float(rank), -1.0)]

    def message_of_the_other_device() -> torch.Tensor:
        works = [dist.isend(both[0], (rank + 1) % size), dist.irecv(both[1], (rank - 1) % size)]
        for work in works:
            assert work is not None
            work.wait()
        return both[1]

    check(message_of_the_other_device, 2, [float((rank - 1) % size)] * 4)
    # MPI takes memory of one device in a process.
    check(lambda: broadcast(stride=1), 0, [6.0] * 3)
    check(message, 0, [float((rank - 1) % size)] * 4)
    assert mpi.device_mpi_wrong_devices() == 0


if __name__ == "__main__":
    name = sys.argv[1]
    backend = sys.argv[2] if len(sys.argv) > 2 else "muster"
    device_double.load()
    named: Any = {"enable_reconfigure": True} if name == "reconfigured" else {}
    dist.init_process_group(backend, **named)
    run = {**globals(), **vars(device_training), **vars(device_faults)}[name]
    run(dist.get_rank())
    if not hasattr(device_faults, name):
        dist.destroy_process_group()
