"""Times with tensors on a device, beside torch's: `python tests/python/device_bench.py PART`.

staged  an all_reduce of 64 MiB through the host, beside its parts: copies, and the all_reduce on the host
calls   an all_reduce of one element over NCCL: how long the call takes, and how long it takes until it has ended.
        Beside it, on a GPU, torch's backend for NCCL. With --ranks 1 it is the overhead alone
start   from the command to the end of the first all_reduce, 8 workers: `muster run`, over NCCL, beside torchrun,
        over torch's backend for NCCL, or over Gloo with a copy to the host where there is none

The device is the double of tests/torch/device_double, whose copies then take as long as over a bus of 4 GB/s. With
MUSTER_TEST_DEVICE=cuda, as in `make gpu`, it is a GPU, which all ranks share.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import device_double
import torch
import torch.distributed as dist

BYTES, ROUNDS = 64 << 20, 15
RATE = 4_000_000_000  # bytes per second
CALLS = 200
BUILD = Path(os.environ.get("MUSTER_BUILD_DIR", Path(__file__).resolve().parents[2] / "build/release"))
NCCL = str(BUILD / "tests/nccl/libfake_nccl.so") if device_double.IS_DOUBLE else "libnccl.so.2"
PEER = "gloo" if device_double.IS_DOUBLE else "nccl"


def slowest(seconds: float) -> float:
    """Of all ranks."""
    took = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(took, op=dist.ReduceOp.MAX)
    return took.item()


def milliseconds(body: Callable[[], object]) -> float:
    """The median of the slowest rank."""
    times = []
    for _ in range(ROUNDS + 3):
        dist.barrier()
        begin = time.perf_counter()
        body()
        torch.accelerator.synchronize()
        times.append(slowest(time.perf_counter() - begin) * 1000)
    return statistics.median(times[3:])


def staged() -> None:
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
    bound = max(times.values())
    whole = milliseconds(lambda: dist.all_reduce(on_device))
    if dist.get_rank() == 0:
        for name, took in times.items():
            print(f"{name}: {took:.1f} ms")
        print(f"all_reduce on the device, through the host: {whole:.1f} ms, {bound / whole:.0%} of the slowest part")


def calls() -> None:
    dist.init_process_group("muster")
    groups = {"muster": dist.group.WORLD}
    if not device_double.IS_DOUBLE:
        groups["torch's NCCL"] = dist.new_group(backend="cpu:muster,cuda:nccl")
    tensor = torch.ones(1, device=device_double.DEVICE)

    def microseconds(group: dist.ProcessGroup | None) -> tuple[float, float]:
        """Of a call, and of a call and its end."""
        dist.all_reduce(tensor, group=group)
        torch.accelerator.synchronize()
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(CALLS):
            dist.all_reduce(tensor, group=group)
        called = time.perf_counter() - begin
        torch.accelerator.synchronize()
        ended = time.perf_counter() - begin
        return slowest(called) / CALLS * 1e6, slowest(ended) / CALLS * 1e6

    rounds = [{name: microseconds(group) for name, group in groups.items()} for _ in range(ROUNDS)]  # in turn
    for name in groups:
        called, ended = (statistics.median(each[name][i] for each in rounds) for i in range(2))
        if dist.get_rank() == 0:
            print(f"all_reduce of one element, {dist.get_world_size()} ranks, {name}: {called:.1f} us for the call, "
                  f"{ended:.1f} us with its end")  # fmt: skip


def first_all_reduce() -> None:
    """A rank of `start`."""
    backend = os.environ["MUSTER_BENCH_BACKEND"]
    dist.init_process_group(backend)
    tensor = torch.ones(8, device=device_double.DEVICE)
    result = tensor.cpu() if backend == "gloo" else tensor
    dist.all_reduce(result)
    assert result.cpu()[0].item() == dist.get_world_size()
    if dist.get_rank() == 0:
        print("took", time.time() - float(os.environ["MUSTER_BENCH_BEGIN"]), flush=True)


def start() -> None:
    launchers = {"muster": ["muster", "run"], PEER: ["torchrun"]}
    times: dict[str, list[float]] = {backend: [] for backend in launchers}
    for _ in range(5):
        for backend, launcher in launchers.items():
            variables = {
                "MUSTER_BENCH_BACKEND": backend,
                "MUSTER_BENCH_BEGIN": str(time.time()),
                "OMP_NUM_THREADS": "1",
            }
            done = subprocess.run(
                [*launcher, "--nproc-per-node", "8", __file__, "first_all_reduce"],
                env={**os.environ, "MUSTER_NCCL_LIBRARY": NCCL, **variables},
                check=True,
                capture_output=True,
                text=True,
            )
            times[backend].append(float(done.stdout.split("took ")[1].split()[0]))
    print("command to the first all_reduce, 8 workers:")
    for backend, took in times.items():
        print(f"{' '.join(launchers[backend])} with {backend}: {min(took):.2f} to {max(took):.2f} s")
    print(f"{statistics.median(times[PEER]) / statistics.median(times['muster']):.1f}x")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["staged", "calls", "start", "first_all_reduce"])
    parser.add_argument("--ranks", type=int, default=2, help="of staged and calls")
    arguments = parser.parse_args()
    if arguments.part == "start":
        start()
    elif "RANK" not in os.environ:
        library = NCCL if arguments.part == "calls" else ""
        command = ["muster", "run", "--nproc-per-node", str(arguments.ranks), *sys.argv]
        sys.exit(subprocess.run(command, env={**os.environ, "MUSTER_NCCL_LIBRARY": library}).returncode)
    else:
        device_double.load()
        {"staged": staged, "calls": calls, "first_all_reduce": first_all_reduce}[arguments.part]()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
