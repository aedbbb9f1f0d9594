"""The time of an all_reduce of 64 MiB on a device, through the host, beside those of its parts.

`muster run --nproc-per-node 2 tests/python/device_bench.py` takes the double, whose copies then take as long as over a
bus of 4 GB/s. With MUSTER_TEST_DEVICE=cuda, as in `make gpu`, it takes a GPU.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import device_double
import torch
import torch.distributed as dist

BYTES, ROUNDS = 64 << 20, 15
RATE = 4_000_000_000  # bytes per second


def milliseconds(body: Callable[[], object]) -> float:
    """The median of the slowest rank."""
    times = []
    for _ in range(ROUNDS + 3):
        dist.barrier()
        begin = time.perf_counter()
        body()
        torch.accelerator.synchronize()
        took = torch.tensor(time.perf_counter() - begin)
        dist.all_reduce(took, op=dist.ReduceOp.MAX)
        times.append(took.item() * 1000)
    return statistics.median(times[3:])


def main() -> None:
    device_double.load()
    dist.init_process_group("muster")
    on_device = torch.empty(BYTES // 4, device=device_double.DEVICE).fill_(1)
    on_host = torch.empty(BYTES // 4, pin_memory=True)
    device_double.set_copy_rate(RATE)
    parts = {
        "copy to the host": lambda: on_host.copy_(on_device, non_blocking=True),
        "copy to the device": lambda: on_device.copy_(on_host, non_blocking=True),
        "all_reduce on the host": lambda: dist.all_reduce(on_host),
    }
    times = {name: milliseconds(body) for name, body in parts.items()}
    slowest = max(times.values())
    staged = milliseconds(lambda: dist.all_reduce(on_device))
    if dist.get_rank() == 0:
        for name, took in times.items():
            print(f"{name}: {took:.1f} ms")
        print(
            f"all_reduce on the device, through the host: {staged:.1f} ms, {slowest / staged:.0%} of the slowest part"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
