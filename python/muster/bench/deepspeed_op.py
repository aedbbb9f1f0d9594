"""DeepSpeed's all_reduce in shared memory, made for inference on CPUs, as a peer of `muster bench collectives`."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from muster._group import process_group_of
from muster.bench.operations import Call, Tensors


def all_reduce(tensors: Tensors, _: Any) -> Call:
    return functools.partial(_operator(), tensors.output)


@functools.cache
def _operator() -> Callable[[torch.Tensor], Any]:
    """Compiles the operator, which takes a minute the first time, and connects it to those of the other ranks."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    pid = torch.tensor([os.getpid()])
    dist.broadcast(pid, 0, process_group_of(None))
    # The operator reads these. It uses shared memory if all ranks are local, and names it after the address.
    os.environ.update(LOCAL_SIZE=str(ranks), MASTER_ADDR="muster-bench", MASTER_PORT=str(int(pid)))
    from deepspeed.comm.torch import build_shm_op  # type: ignore[import-not-found,import-untyped]

    library = build_shm_op()
    if library is None:
        raise RuntimeError("DeepSpeed cannot compile its operator here")
    library.initialize(ranks, rank)
    dist.barrier()  # all ranks have opened the memory, so its name can go
    Path(f"/dev/shm/deepspeed_allreduce_buffer_{os.getuid()}_muster-bench_{int(pid)}_{rank}").unlink()
    if library.vector_kernel_level() < 1:
        raise RuntimeError("DeepSpeed's operator needs AVX2")
    return torch.ops.deepspeed.inference_all_reduce_
