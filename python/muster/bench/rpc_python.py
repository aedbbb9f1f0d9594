"""The part of `muster bench rpc` in Python: the same program over muster.rpc and over torch.distributed.rpc.

As a program (python -m muster.bench.rpc_python NAME) it runs all cases over one library, and prints lines of
{case: figure}.
"""

from __future__ import annotations

import functools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from muster import rpc as muster_rpc
from muster.bench.report import BenchFailedError, Row

LIBRARIES = ("muster", "tensorpipe")
_ECHOES = (("64 KiB", 64 << 10), ("1 MiB", 1 << 20), ("64 MiB", 64 << 20))
_REFERENCES = {  # TensorPipe copies these
    "argument of 64 KiB, by reference": 64 << 10,
    "argument of 64 MiB, by reference": 64 << 20,
}
_BACKWARD = "backward, there and back"
SMALL_MESSAGES = (*_REFERENCES, _BACKWARD)  # cases that need no more than a round trip of a small message
_IN_FLIGHT = 256
_TRAINERS, _ROWS, _WIDTH, _TABLE_ROWS = 4, 128, 64, 100_000
_TIMEOUT = 600.0  # of one library


def python_rows(quick: bool) -> Iterator[Row]:
    """The libraries take turns."""
    figures: dict[str, list[dict[str, float]]] = {name: [] for name in LIBRARIES}
    for _ in range(1 if quick else 3):
        for name in LIBRARIES:
            figures[name].append(_run(name, quick))
    for case in figures["muster"][0]:
        ours, theirs = (statistics.median(run[case] for run in figures[name]) for name in LIBRARIES)
        rate = case.startswith(("calls", "pulls"))
        yield Row(
            "rpc",
            f"Python: {case}",
            1 + _TRAINERS if case.startswith("pulls") else 2,
            "rate" if rate else "round trip",
            "1/s" if rate else "us",
            ours,
            theirs,
            "TensorPipe",
            ratio=ours / theirs if rate else -1.0,
        )


def _run(name: str, quick: bool) -> dict[str, float]:
    command = [sys.executable, "-m", __name__, name, *(["--quick"] if quick else [])]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT)
    except subprocess.TimeoutExpired:
        raise BenchFailedError(f"calls over {name} took more than {_TIMEOUT:g} s") from None
    if done.returncode != 0:
        raise BenchFailedError(f"calls over {name} failed:\n{done.stderr}")
    return {case: figure for line in done.stdout.splitlines() for case, figure in json.loads(line).items()}


# ---- the program


def echo(value: Any) -> Any:
    return value


def count_of(value: torch.Tensor) -> int:
    return value.numel()


def double(value: torch.Tensor) -> torch.Tensor:
    return 2 * value


def pull(rows: torch.Tensor) -> torch.Tensor:
    return _table().index_select(0, rows)


_tables: list[torch.Tensor] = []


def _table() -> torch.Tensor:
    if not _tables:
        _tables.append(torch.rand(_TABLE_ROWS, _WIDTH))
    return _tables[0]


def _join(library: str, name: str, rank: int, size: int, path: str) -> Any:
    """Returns the module with rpc_sync() and so on."""
    if library == "muster":
        store = dist.FileStore(path)
        muster_rpc.init_rpc(name, rank=rank, world_size=size, store=store, allow=__name__)
        return muster_rpc
    import torch.distributed.rpc as torch_rpc

    options = torch_rpc.TensorPipeRpcBackendOptions(init_method=f"file://{path}")
    torch_rpc.init_rpc(name, rank=rank, world_size=size, rpc_backend_options=options)
    return torch_rpc


def _calls_main(rank: int, library: str, path: str, quick: bool) -> None:
    torch.set_num_threads(1)
    rpc = _join(library, f"w{rank}", rank, 2, path)
    if rank == 0:
        print(json.dumps(_measure_calls(rpc, quick)), flush=True)
    rpc.shutdown()


def _measure_calls(rpc: Any, quick: bool) -> dict[str, float]:
    figures = {}
    count = 200 if quick else 2000
    figures["tiny call"] = 1e6 * _seconds_each(lambda: rpc.rpc_sync("w1", echo, (5,)), count)

    def many() -> None:
        for future in [rpc.rpc_async("w1", echo, (5,)) for _ in range(_IN_FLIGHT)]:
            future.wait()

    figures[f"calls, {_IN_FLIGHT} in flight"] = _IN_FLIGHT / _seconds_each(many, 5 if quick else 40)
    for name, size in _ECHOES:
        tensors = [torch.rand(size // 4) for _ in range(4)]  # in turn, so that none is in a cache
        sent = iter(range(1 << 30))
        rounds = max(4, min(count, (100 << 20) // size if quick else (1 << 30) // size))
        call = lambda tensors=tensors, sent=sent: rpc.rpc_sync("w1", echo, (tensors[next(sent) % 4],))  # noqa: E731
        figures[f"echo of {name}"] = 1e6 * _seconds_each(call, rounds)
    for name, size in _REFERENCES.items():
        argument: Any = torch.rand(size // 4)
        if rpc is muster_rpc:
            argument = muster_rpc.alias(muster_rpc.empty_shared(size // 4))
        call = functools.partial(rpc.rpc_sync, "w1", count_of, (argument,))
        rounds = count if rpc is muster_rpc else max(4, min(count, (1 << 30) // size))
        figures[name] = 1e6 * _seconds_each(call, rounds)
    figures[_BACKWARD] = 1e6 * _measure_backward(rpc, 50 if quick else 1000)
    return figures


def _measure_backward(rpc: Any, count: int) -> float:
    """The median time of backward() through one call of another worker."""
    if rpc is muster_rpc:
        autograd: Any = muster_rpc.autograd
    else:
        import torch.distributed.autograd as autograd  # type: ignore[no-redef]
    value = torch.ones(1, requires_grad=True)
    seconds = []
    for _ in range(count):
        with autograd.context() as context_id:
            result = rpc.rpc_sync("w1", double, (value,))
            start = time.perf_counter()
            autograd.backward(context_id, [result])
            seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def _seconds_each(call: Callable[[], Any], count: int) -> float:
    for _ in range(max(2, count // 20)):
        call()
    start = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - start) / count


def _server_main(rank: int, library: str, path: str, quick: bool) -> None:
    torch.set_num_threads(1)
    size = 1 + _TRAINERS
    rpc = _join(library, f"w{rank}", rank, size, path)
    if rank == 0:
        pulls = 100 if quick else 2000
        rpc.rpc_sync("w0", pull, (torch.arange(_ROWS),))
        start = time.perf_counter()
        for future in [rpc.rpc_async(f"w{trainer}", train, (library, pulls)) for trainer in range(1, size)]:
            future.wait()
        rate = _TRAINERS * pulls / (time.perf_counter() - start)
        print(json.dumps({f"pulls of {_ROWS} x {_WIDTH} floats, {_TRAINERS} trainers": rate}), flush=True)
    rpc.shutdown()


def train(library: str, pulls: int) -> None:
    if library == "muster":
        rpc: Any = muster_rpc
    else:
        import torch.distributed.rpc as rpc  # type: ignore[no-redef]
    for _ in range(pulls):
        rows = torch.randint(0, _TABLE_ROWS, (_ROWS,))
        assert rpc.rpc_sync("w0", pull, (rows,)).shape == (_ROWS, _WIDTH)


def main() -> None:
    library, quick = sys.argv[1], "--quick" in sys.argv
    for body, size in ((_calls_main, 2), (_server_main, 1 + _TRAINERS)):
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(body, (library, f"{folder}/store", quick), nprocs=size)


if __name__ == "__main__":
    main()
