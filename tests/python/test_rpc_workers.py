"""muster.rpc: futures and coroutines, and workers that come, go and die."""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import forks
import pytest
import torch
from conftest import Run
from launching import Launch, free_port, wait_until
from rpc_workers import run_workers

import muster
from muster import rpc
from muster.rpc import _agent, _calls, _leaving

forks.preload("muster.rpc")


@rpc.export
def first_of(value: Any) -> Any:
    return value


class OwnError(Exception):
    pass


rpc.export(OwnError)


# ---- futures, coroutines


def test_a_callback_that_fails_keeps_no_other_from_running(caplog: pytest.LogCaptureFixture) -> None:
    future: rpc.Future[int] = rpc.Future()
    called: list[rpc.Future[int]] = []
    future.add_done_callback(lambda done: done.wait().nothing)  # type: ignore[attr-defined]
    future.add_done_callback(called.append)
    future.set_result(1)
    assert called == [future]
    assert "AttributeError" in caplog.text


@rpc.export
def fail_at_length(shift: int) -> None:
    raise ValueError("." * shift + "ä" * 5000)


def _reads_long_errors(rank: int) -> None:
    for shift in range(2):
        with pytest.raises(ValueError, match=r"^\.?ä{2000,2048}$"):
            rpc.rpc_sync(f"w{1 - rank}", fail_at_length, (shift,))


def test_long_error_messages_end_with_a_whole_character() -> None:
    run_workers(2, _reads_long_errors)


@rpc.export
async def add_slowly(a: int, b: int) -> int:
    await asyncio.sleep(0.01)
    return a + b


@rpc.export
async def ask_others(names: list[str], value: int) -> list[int]:
    return list(
        await asyncio.gather(*(_await(rpc.rpc_async(name, add_slowly, (value, n))) for n, name in enumerate(names)))
    )


async def _await(future: rpc.Future[int]) -> int:
    return await future


@rpc.export
async def fail_slowly() -> None:
    await asyncio.sleep(0.01)
    raise OwnError("late")


@rpc.export
@rpc.functions.async_execution
def forward(to: str, value: int) -> rpc.Future[int]:
    return rpc.rpc_async(to, first_of, (value,)).then(lambda future: future.wait() + 1)


@rpc.export
@rpc.functions.async_execution
def later(kind: str) -> Any:
    if kind == "none":
        return 5
    future: Any = {"torch": torch.futures.Future, "concurrent": concurrent.futures.Future, "own": rpc.Future}[kind]()
    threading.Timer(0.02, lambda: future.set_result(kind)).start()
    return future


@rpc.export
async def without_data() -> torch.Tensor:
    return torch.ones(1, device="meta")


@rpc.export
def nap(seconds: float) -> float:
    time.sleep(seconds)  # tidy: allow(sleep) stands for work
    return seconds


@rpc.export
def nested(path: list[str]) -> list[str]:
    return [*rpc.rpc_sync(path[0], nested, (path[1:],)), rpc.get_worker_info().name] if path else []


def _futures(rank: int) -> None:
    if rank != 0:
        return
    assert rpc.rpc_sync("w1", add_slowly, (1, 2)) == 3
    assert rpc.rpc_sync("w1", ask_others, (["w0", "w1", "w2"], 10)) == [10, 11, 12]
    with pytest.raises(OwnError, match="late"):
        rpc.rpc_sync("w1", fail_slowly)
    assert rpc.rpc_sync("w1", forward, ("w2", 4)) == 5
    assert rpc.rpc_sync("w0", forward, ("w0", 4)) == 5  # to itself
    with pytest.raises(RuntimeError, match="meta"):
        rpc.rpc_sync("w1", without_data)
    for kind in ("torch", "concurrent", "own"):
        assert rpc.rpc_sync("w2", later, (kind,)) == kind
    with pytest.raises(TypeError, match="async_execution"):
        rpc.rpc_sync("w2", later, ("none",))
    assert asyncio.run(_await(rpc.rpc_async("w1", nap, (0.05,)))) == 0.05
    calls = [rpc.rpc_async("w1", nap, (0.01,)) for _ in range(20)]
    assert [each.value() for each in rpc.collect_all(calls).wait()] == [0.01] * 20
    seen: list[float] = []
    chained = rpc.rpc_async("w1", nap, (0.02,)).then(lambda future: seen.append(future.value()))
    chained.wait()
    assert seen == [0.02]
    with pytest.raises(ZeroDivisionError):
        rpc.rpc_async("w1", nap, (0.0,)).then(lambda future: 1 / 0).wait()
    with pytest.raises(RuntimeError, match="not done"):
        rpc.rpc_async("w1", nap, (0.2,)).value()
    assert rpc.rpc_sync("w1", nested, (["w2", "w0", "w1", "w2"],)) == ["w1", "w0", "w2", "w1"]
    with pytest.raises(muster.TimeoutError, match='worker "w1"'):
        rpc.rpc_sync("w1", nap, (1.0,), timeout=0.1)
    canceled = rpc.rpc_async("w1", nap, (1.0,))
    canceled.cancel()
    with pytest.raises(muster.AbortedError):
        canceled.wait()
    assert rpc.rpc_one_way("w1", nap, (0.1,)).wait() is None
    assert rpc.rpc_sync(rpc.get_worker_info("w2"), first_of, (3,), timeout=0) == 3


def test_futures_and_coroutines() -> None:
    run_workers(3, _futures)


def _many_threads(rank: int) -> int:
    if rank != 0:
        return 0
    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        sums = threads.map(lambda n: sum(rpc.rpc_sync("w1", first_of, (n,)) for _ in range(200)), range(8))
        return sum(sums)


def test_several_threads_call_at_once() -> None:
    assert run_workers(2, _many_threads) == [200 * 28, 0]


# ---- coming, going and dying


_released = threading.Event()  # of this process


@rpc.export
def release() -> None:
    _released.set()


def _watches_too_late(rank: int) -> None:
    _, other = (worker.name for worker in rpc.workers())
    if other == f"w{rank}":
        assert _released.wait(60)
        return
    call = _calls.rpc_async

    def call_once_it_has_left(to: Any, func: Any, *arguments: Any, **options: Any) -> Any:
        if func is _leaving.watch:
            rpc.rpc_one_way(other, release)
            wait_until(lambda: len(rpc.workers()) == 1)
        return call(to, func, *arguments, **options)

    _calls.rpc_async = call_once_it_has_left  # type: ignore[assignment]


def test_a_worker_that_has_left_before_it_is_watched_leaks_nothing() -> None:
    run_workers(2, _watches_too_late)


@rpc.export
def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _dies_while_others_leave(rank: int) -> Any:
    if rank == 2:
        assert _released.wait(60)
        die()
    if rank == 0:
        rpc.rpc_one_way("w2", release)
    with pytest.raises(muster.Error, match="w2"):
        rpc.shutdown()
    rpc.init_rpc(f"again{rank}", store=torch.distributed.HashStore())  # run_workers() shuts it down


def test_a_worker_that_dies_ends_the_shutdown_of_the_others() -> None:
    run_workers(3, _dies_while_others_leave, lost=(2,))


@rpc.export
def shuts_down() -> bool:
    return _agent.current().leaving.shutting_down.done()


@rpc.export
def hold() -> None:
    assert _released.wait(60)


def _dies_in_its_own_shutdown(rank: int) -> Any:
    if rank == 2:
        for other in ("w0", "w1"):
            wait_until(functools.partial(rpc.rpc_sync, other, shuts_down))
        pending = rpc.rpc_async("w1", hold)
        threading.Thread(target=rpc.shutdown, daemon=True).start()
        wait_until(lambda: _agent.current().leaving.shutting_down.done())
        assert not pending.done()
        die()
    with pytest.raises(muster.Error, match="w2"):
        rpc.shutdown()
    _released.set()
    rpc.init_rpc(f"again{rank}", store=torch.distributed.HashStore())


def test_a_worker_that_dies_in_its_own_shutdown_ends_that_of_the_others() -> None:
    run_workers(3, _dies_in_its_own_shutdown, lost=(2,))


def _left_early(rank: int) -> Any:
    if rank == 2:
        rpc.shutdown(graceful=False)
    else:
        wait_until(lambda: len(rpc.workers()) == 2)
        with pytest.raises(muster.PeerLostError, match="1 of 3 workers left early"):
            rpc.shutdown()
    rpc.init_rpc(f"again{rank}", store=torch.distributed.HashStore())


def test_a_worker_that_has_left_early_ends_the_shutdown_of_the_others() -> None:
    run_workers(3, _left_early)


def _dies_in_a_call(rank: int) -> Any:
    if rank == 2:
        _released.wait(60)
    if rank == 0:
        pending = rpc.rpc_async("w2", nap, (30.0,))
        start = time.monotonic()
        with pytest.raises(muster.PeerLostError, match="w2"):
            rpc.rpc_sync("w2", die)
        with pytest.raises(muster.PeerLostError, match="w2"):
            pending.wait()
        assert time.monotonic() - start < 20, "the calls did not wait for their timeout"
        rpc.rpc_sync("w1", release)  # the others live on
    assert rank == 0 or _released.wait(60)
    with pytest.raises(muster.Error, match="w2"):
        rpc.shutdown()
    rpc.init_rpc(f"again{rank}", store=torch.distributed.HashStore())


def test_a_worker_that_dies_fails_only_its_own_calls() -> None:
    run_workers(3, _dies_in_a_call, lost=(2,))


def _calls_until_the_end(rank: int) -> None:
    for _ in range(50):
        for to in range(3):
            rpc.rpc_async(f"w{to}", nested, ([f"w{(to + 1) % 3}", f"w{rank}"],))


def test_shutdown_waits_for_pending_calls() -> None:
    run_workers(3, _calls_until_the_end)


@rpc.export
def start_a_chain(path: list[str]) -> None:
    if path:
        time.sleep(0.05)  # tidy: allow(sleep) stands for work
        rpc.rpc_sync(path[0], start_a_chain, (path[1:],))


def _chains_until_the_end(rank: int) -> Any:
    return rpc.rpc_async(f"w{(rank + 1) % 4}", start_a_chain, ([f"w{n % 4}" for n in range(rank, rank + 6)],)).done()


def test_shutdown_lets_chains_of_calls_end() -> None:
    run_workers(4, _chains_until_the_end)


def _comes_and_goes(rank: int) -> list[str]:
    if rank == 1:
        assert _released.wait(60)
        rpc.shutdown()
        with pytest.raises(RuntimeError, match="init_rpc"):
            rpc.rpc_sync("w0", first_of, (1,))
        rpc.init_rpc("w1b", store=torch.distributed.HashStore())
        return []
    rpc.rpc_sync("w1", release)  # waits until it has joined
    return []


def test_workers_come_and_go_without_a_world_size() -> None:
    run_workers(2, _comes_and_goes, fixed=False)


def _in_a_fork(rank: int) -> None:
    child = os.fork()
    if child == 0:
        try:
            rpc.rpc_sync("w0", first_of, (1,))
        except RuntimeError as error:
            os._exit(7 if "forked" in str(error) else 8)
        os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    with pytest.raises(ValueError, match="already"):
        rpc.init_rpc("second")


def test_a_forked_child_is_told_that_it_is_no_worker() -> None:
    run_workers(1, _in_a_fork)


def test_wrong_arguments_of_init_rpc() -> None:
    with pytest.raises(ValueError, match="no backend"):
        rpc.init_rpc("w", backend="gloo")
    with pytest.raises(TypeError, match="Options"):
        rpc.init_rpc("w", rpc_backend_options=5)
    with pytest.raises(ValueError, match="device_maps"):
        rpc.init_rpc("w", rpc_backend_options=SimpleNamespace(rpc_timeout=1, device_maps={"w1": {0: 0}}))
    with pytest.raises(RuntimeError, match="init_rpc"):
        rpc.rpc_sync("w", first_of)
    with pytest.raises(muster.ArgumentError, match="name"):
        rpc.init_rpc("", store=torch.distributed.HashStore())
    assert not rpc.is_initialized()


FORKING_PROGRAM = """
import os
import sys
import torch.distributed as dist
from muster import rpc

rpc.init_rpc("alone", store=dist.HashStore())
ref, elsewhere = rpc.RRef([1]), rpc.remote("nobody", print, timeout=0.1)
child = os.fork()
if child == 0:
    del ref, elsewhere
    sys.exit(3)  # with all that an interpreter does at its end
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
assert ref.to_here() == [1]
rpc.shutdown()
"""


def test_a_forked_child_may_end_as_any_other(run: Run) -> None:
    run([sys.executable, "-c", FORKING_PROGRAM], timeout=60)


# ---- launched

PROGRAM = """
import os
import sys
import torch
import muster.rpc as rpc

def square(x):
    return x * x

def main(rank, size):
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=size)
    assert rpc.rpc_sync(f"worker{(rank + 1) % size}", square, (rank,)) == rank * rank
    rpc.shutdown()
    print(f"rank {rank} is done")

if __name__ == "__main__":
    if "spawn" in sys.argv:
        torch.multiprocessing.spawn(main, (3,), nprocs=3)
    else:
        main(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
"""


@pytest.fixture
def program(tmp_path: Path) -> str:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return str(path)


def test_a_job_of_muster_run(launch: Launch, program: str) -> None:
    job = launch("--nproc-per-node", "3", program)
    assert job.finish() == 0, job.err
    assert all(f"rank {rank} is done" in job.out for rank in range(3))


def test_the_reason_of_an_exit_without_shutdown_is_shown(launch: Launch, tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    path.write_text("from muster import rpc\nrpc.init_rpc('w')\nrpc.rpc_async('nobody', len)\nraise OSError('mine')")
    job = launch("--nproc-per-node", "1", str(path))
    assert job.finish() == 1
    assert "OSError: mine" in job.err and "pending" not in job.err, job.err


def test_a_program_of_multiprocessing_needs_no_launcher(run: Run, program: str) -> None:
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    output = run([sys.executable, program, "spawn"], env=os.environ | environment)
    assert all(f"rank {rank} is done" in output for rank in range(3))


STOCK_PROGRAM = """
import os
import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch.distributed.optim import DistributedOptimizer

class Layer:
    def __init__(self):
        self.weight = torch.ones(2, 2, requires_grad=True)

    def forward(self, x):
        return x @ self.weight

    def value(self):
        return self.weight.detach()

    def parameter(self):
        return rpc.RRef(self.weight)

rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
options = rpc.TensorPipeRpcBackendOptions(rpc_timeout=30, num_worker_threads=4)
rpc.init_rpc(
    f"worker{rank}", backend=rpc.BackendType.MUSTER, rank=rank, world_size=size, rpc_backend_options=options
)
if rank == 0:
    layer = rpc.remote("worker1", Layer)
    optimizer = DistributedOptimizer(torch.optim.SGD, [layer.rpc_sync().parameter()], lr=0.5)
    with dist_autograd.context() as context:
        loss = layer.rpc_sync().forward(torch.eye(2)).sum()
        dist_autograd.backward(context, [loss])
        optimizer.step(context)
    assert torch.equal(layer.rpc_sync().value(), torch.full((2, 2), 0.5))
rpc.shutdown()
print(f"rank {rank} is done")
"""


def test_torchs_own_rpc_runs_over_muster(launch: Launch, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(STOCK_PROGRAM)
    job = launch("--nproc-per-node", "2", str(program))
    assert job.finish() == 0, job.err
    assert all(f"rank {rank} is done" in job.out for rank in range(2))
    assert "unpickles" in job.err, "the consent is said"
