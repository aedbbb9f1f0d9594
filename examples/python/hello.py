"""The smallest job: an all_reduce adds up the ranks' numbers.

    muster run --nproc-per-node 4 examples/python/hello.py

docs/reference/collectives.md lists the other calls.
"""

import torch
import torch.distributed as dist

dist.init_process_group("muster")
numbers = torch.tensor([float(dist.get_rank())])
dist.all_reduce(numbers)
print(f"rank {dist.get_rank()} of {dist.get_world_size()}: the sum is {numbers.item():g}")
dist.destroy_process_group()
