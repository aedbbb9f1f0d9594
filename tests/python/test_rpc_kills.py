"""muster.rpc while its server is killed again and again: no call that was acknowledged is lost or runs twice."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections import Counter
from pathlib import Path

import forks
import torch.distributed as dist
from launching import wait_until

import muster
from muster import rpc

forks.preload("muster.rpc")

CALLS, THREADS = 10_000, 8
_TIMEOUT = 60.0


@rpc.export
def put(path: str, number: int) -> int:
    """Appends a line to a file. Returns the number."""
    with open(path, "a") as log:
        log.write(f"{number}\n")
    return number


@rpc.export
def is_there() -> bool:
    return True


def _await_server() -> None:
    """Calls to a worker that has died fail at once, until another one has its name."""

    def answers() -> bool:
        try:
            return bool(rpc.rpc_sync("server", is_there))
        except muster.Error:
            return False

    wait_until(answers)


def _join(name: str, store: str) -> None:
    options = rpc.Options(rpc_timeout=_TIMEOUT, join_timeout=_TIMEOUT)
    rpc.init_rpc(name, rpc_backend_options=options, store=dist.FileStore(store), world_size=0)


def _serve(store: str) -> None:
    _join("server", store)
    threading.Event().wait()


class Servers:
    """Starts the server, and starts it again under the same name each time it was killed."""

    def __init__(self, store: str) -> None:
        self._store = store
        self._lock = threading.Lock()
        self.kills = 0
        self._start()

    def _start(self) -> None:
        self._process = forks.Process(target=_serve, args=(self._store,))
        self._process.start()

    def kill(self) -> None:
        with self._lock:
            os.kill(self._process.pid, signal.SIGKILL)
            self._process.join()
            self.kills += 1
            self._start()

    def end(self) -> None:
        with self._lock:
            self._process.kill()
            self._process.join()


def test_acknowledged_calls_run_once(tmp_path: Path) -> None:
    log, store = tmp_path / "log", str(tmp_path / "store")
    servers = Servers(store)
    acknowledged: list[int] = []
    failed: list[int] = []
    errors: Counter[str] = Counter()
    numbers = iter(range(CALLS))
    lock = threading.Lock()
    choose = random.Random(18)

    def call() -> None:
        while True:
            with lock:
                number = next(numbers, None)
                kills = number is not None and choose.random() < 30 / CALLS
            if number is None:
                return
            if kills:
                servers.kill()
            try:
                answer = rpc.rpc_sync("server", put, (str(log), number))
                assert answer == number
                with lock:
                    acknowledged.append(number)
            except muster.Error as error:
                with lock:
                    failed.append(number)
                    errors[type(error).__name__] += 1
                _await_server()

    try:
        _join("client", store)
        threads = [threading.Thread(target=call) for _ in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        rpc.shutdown()
    finally:
        servers.end()
    runs = Counter(int(line) for line in log.read_text().split())
    assert servers.kills > 10
    assert len(acknowledged) + len(failed) == CALLS, "every call has ended"
    assert {number for number in acknowledged if runs[number] != 1} == set()
    assert {number for number in failed if runs[number] > 1} == set()
    assert set(errors) <= {"PeerLostError"}, errors
    assert len(failed) <= servers.kills * THREADS, "only calls that the server had when it was killed fail"
