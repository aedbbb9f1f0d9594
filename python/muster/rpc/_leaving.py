"""How the workers of a job of fixed size end together: each waits until all others have called shutdown().

The worker with the lowest id collects the arrivals: each worker calls leave() there, which returns when all have
arrived. To notice a worker that dies instead, the collector calls watch() at each worker that has not arrived. watch()
returns when the worker shuts down, and fails with the worker.
"""

from __future__ import annotations

import threading
from typing import Any

from muster.rpc import _calls, functions
from muster.rpc._agent import workers
from muster.rpc._functions import export
from muster.rpc._future import Future


class _State:
    """Of this process. A new one for each worker that it becomes."""

    def __init__(self) -> None:
        self.shutting_down: Future[None] = Future()
        self.lock = threading.Lock()
        self.arrivals: dict[str, Future[None]] = {}  # at the collector, by name
        self.failure: BaseException | None = None


_state = _State()


def reset() -> None:
    global _state
    _state = _State()


def leave_together(name: str, world_size: int, timeout: float) -> None:
    """Returns when all workers have called it. Raises what has ended a worker before that."""
    _state.shutting_down.set_result(None)
    collector = workers()[0]
    _calls.rpc_sync(collector, leave, (name, world_size), timeout=timeout)


@export
@functions.async_execution
def watch() -> Future[None]:
    return _state.shutting_down


@export
@functions.async_execution
def leave(name: str, world_size: int) -> Future[None]:
    state = _state
    done: Future[None] = Future()
    with state.lock:
        first = not state.arrivals
        state.arrivals[name] = done
        everyone = list(state.arrivals.values()) if len(state.arrivals) == world_size else []
        failure = state.failure
    if failure is not None:
        done.set_exception(failure)
    for arrival in everyone:
        if not arrival.done():
            arrival.set_result(None)
    if first and not everyone:
        threading.Thread(target=_watch_others, args=(state,), name="muster-rpc-leave", daemon=True).start()
    return done


def _watch_others(state: _State) -> None:
    for worker in workers():
        if worker.name not in state.arrivals:
            _calls.rpc_async(worker, watch, timeout=0).add_done_callback(lambda future: _on_end(state, future))


def _on_end(state: _State, future: Future[Any]) -> None:
    try:
        future.wait()
    except Exception as error:
        with state.lock:
            state.failure = error
            arrivals = [arrival for arrival in state.arrivals.values() if not arrival.done()]
        for arrival in arrivals:
            arrival.set_exception(error)
