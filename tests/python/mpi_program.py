"""A rank of test_mpi.py. A launcher of MPI starts it with the name of one of the functions below."""

import ctypes
import os
import signal
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

import muster


def everything() -> None:
    dist.init_process_group("muster-mpi")
    rank, size = dist.get_rank(), dist.get_world_size()
    assert muster.transport() == "mpi"
    assert os.environ["RANK"] == str(rank)
    assert os.environ["LOCAL_RANK"] == str(rank)
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.uint8, torch.bool):
        tensor = torch.ones(1000, dtype=dtype)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        assert torch.equal(tensor, torch.ones(1000, dtype=dtype))
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.complex64):
        tensor = torch.full((3, 5), rank + 1, dtype=dtype).t()  # not contiguous
        work = dist.all_reduce(tensor, async_op=True)
        assert work is not None
        work.wait()
        assert torch.equal(tensor, torch.full((5, 3), size * (size + 1) // 2, dtype=dtype))
    average = torch.tensor([float(rank)])
    dist.all_reduce(average, op=dist.ReduceOp.AVG)
    assert average.item() == (size - 1) / 2
    gathered = [torch.empty(4) for _ in range(size)]
    dist.all_gather(gathered, torch.full((4,), float(rank)))
    assert [each[0].item() for each in gathered] == list(range(size))
    part = torch.empty(2)
    dist.reduce_scatter_tensor(part, torch.arange(2.0 * size))
    assert part.tolist() == [2.0 * size * rank, size * (2.0 * rank + 1)]
    exchanged = torch.empty(size)
    dist.all_to_all_single(exchanged, torch.arange(float(size)) + 10 * rank)
    assert exchanged.tolist() == [10.0 * other + rank for other in range(size)]
    objects: list[object] = [None] * size
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": other} for other in range(size)]

    right, left = (rank + 1) % size, (rank - 1) % size
    received = torch.empty(100_000)
    messages = [
        dist.P2POp(dist.isend, torch.full((100_000,), float(rank)), right),
        dist.P2POp(dist.irecv, received, left),
    ]
    for message in dist.batch_isend_irecv(messages):
        message.wait()
    assert received[0].item() == left

    pair = dist.new_group(sorted({0, size - 1}))
    if rank in (0, size - 1):
        tensor = torch.tensor([rank])
        dist.all_reduce(tensor, group=pair)
        assert tensor.item() == size - 1
    ours = dist.new_group(backend="muster")  # over muster's own links
    tensor = torch.ones(10)
    dist.all_reduce(tensor, group=ours)
    assert tensor[0].item() == size
    assert size == 1 or muster.transport(ours) == "shm"

    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 1))
    model(torch.full((4, 8), float(rank))).sum().backward()
    gradient = next(model.parameters()).grad
    assert gradient is not None
    assert torch.allclose(gradient, torch.full((1, 8), 4.0 * (size - 1) / 2))
    dist.barrier()
    dist.destroy_process_group()
    print(f"rank {rank} of {size} is done", flush=True)


def wrong_rank() -> None:
    dist.init_process_group("muster-mpi", rank=7, world_size=9)


def other_size() -> None:
    os.environ["WORLD_SIZE"] = "17"
    dist.init_process_group("muster-mpi")


def raises() -> None:
    dist.init_process_group("muster-mpi")
    if dist.get_rank() == 1:
        raise RuntimeError("rank 1 has a bug")
    dist.barrier()


def stuck() -> None:
    dist.init_process_group("muster-mpi", timeout=timedelta(seconds=5))
    dist.barrier()
    if dist.get_rank() == 1:
        signal.pause()
    dist.all_reduce(torch.ones(10))


def killed() -> None:
    dist.init_process_group("muster-mpi")
    dist.barrier()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(10))


def without_threads() -> None:
    library = ctypes.CDLL(sys.argv[2], mode=ctypes.RTLD_GLOBAL)
    provided = ctypes.c_int()
    library.MPI_Init_thread(None, None, 0, ctypes.byref(provided))
    dist.init_process_group("muster-mpi")


if __name__ == "__main__":
    globals()[sys.argv[1]]()
