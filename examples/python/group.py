"""muster.Group: the same collectives as torch.distributed without its dispatcher, for many small calls.

    muster run --nproc-per-node 2 examples/python/group.py

It has no autograd and no graph capture: see docs/reference/collectives.md.
"""

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

import muster

CALLS = 2000


def seconds_per_call(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    for _ in range(CALLS):
        call()
    return (time.perf_counter() - begin) / CALLS


dist.init_process_group("muster")
group = muster.group()  # the group of all ranks
token = torch.ones(2)
total = torch.ones(2)
group.all_reduce(total)
assert total.tolist() == [group.size] * 2
through_torch = seconds_per_call(lambda: dist.all_reduce(token, dist.ReduceOp.MAX))
direct = seconds_per_call(lambda: group.all_reduce(token, op="max"))
if dist.get_rank() == 0:
    print(f"8 bytes: torch.distributed {1e6 * through_torch:.1f} us, muster.Group {1e6 * direct:.1f} us")
dist.destroy_process_group()
