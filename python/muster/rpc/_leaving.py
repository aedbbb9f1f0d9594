"""How the workers of a job of fixed size end together: each waits until all others have called shutdown().

The worker with the lowest id collects the arrivals: each worker calls leave() there, which returns when all have
arrived. To notice a worker that dies instead, the collector calls watch() at each worker that has not arrived. watch()
fails with the worker. Before the collector arrives itself, watch() returns when the worker begins to shut down, because
the collector first waits for its own calls. After that it returns when the worker has left.
"""

from __future__ import annotations

import functools
import threading
from typing import Any

from muster import errors as muster_errors
from muster.rpc import _agent, _calls, functions
from muster.rpc._agent import workers
from muster.rpc._functions import export
from muster.rpc._future import Future

# How long the collector waits, after a worker has died, until all others know.
_REPORT_TIME = 5.0


class State:
    """What a worker knows of the end of its job. It ends with the worker: a failure keeps the call that has failed."""

    def __init__(self) -> None:
        self.shutting_down: Future[None] = Future()
        self.left: Future[None] = Future()
        self.lock = threading.Lock()
        self.arrivals: dict[str, Future[None]] = {}  # at the collector, by name
        self.lost: set[str] = set()
        self.failure: BaseException | None = None
        self.all_known = threading.Event()  # each worker has arrived, or is lost
        self.watching: list[threading.Thread] = []  # at the collector

    def note(self, world_size: int) -> None:
        if len(self.arrivals.keys() | self.lost) >= world_size:
            self.all_known.set()


def leave_together(name: str, world_size: int, timeout: float) -> None:
    """Returns when all workers have called it. Raises what has ended a worker before that."""
    state = _agent.current().leaving
    state.shutting_down.set_result(None)
    try:
        _agent.current().agent.wait_for_calls(timeout)  # so functions that these calls run find all workers
        collector = workers()[0]
        try:
            _calls.rpc_sync(collector, leave, (name, world_size), timeout=timeout)
        except BaseException:
            if collector.name == name:
                state.all_known.wait(_REPORT_TIME)
            raise
    finally:
        state.left.set_result(None)
        for thread in state.watching:
            thread.join()  # a thread that is in a call when the interpreter ends would abort the process


@export
@functions.async_execution
def watch(until_left: bool) -> Future[None]:
    state = _agent.current().leaving
    return state.left if until_left else state.shutting_down


@export
@functions.async_execution
def leave(name: str, world_size: int) -> Future[None]:
    state = _agent.current().leaving
    done: Future[None] = Future()
    with state.lock:
        first = not state.arrivals
        state.arrivals[name] = done
        everyone = list(state.arrivals.values()) if len(state.arrivals) == world_size else []
        failure = state.failure
        state.note(world_size)
        itself = name == _agent.current().agent.name
        if (first or itself) and not everyone:
            thread = threading.Thread(target=_watch_others, args=(state, world_size, itself), name="muster-rpc-leave")
            state.watching.append(thread)
            thread.start()
    if failure is not None:
        done.set_exception(failure.with_traceback(None))  # all workers get the same exception
    for arrival in everyone:
        if not arrival.done():
            arrival.set_result(None)
    return done


def _watch_others(state: State, world_size: int, until_left: bool) -> None:
    try:
        present = workers()
    except muster_errors.Error:
        return  # the store is gone, but the workers may still be able to leave
    missing = world_size - len({worker.name for worker in present} | state.arrivals.keys())
    if missing > 0:
        _fail(state, world_size, muster_errors.PeerLostError(f"{missing} of {world_size} workers left early"))
    for worker in present:
        if worker.name not in state.arrivals and state.failure is None:
            future = _calls.rpc_async(worker, watch, (until_left,), timeout=0)
            future.add_done_callback(functools.partial(_on_end, state, world_size, worker.name, until_left))


def _on_end(state: State, world_size: int, name: str, until_left: bool, future: Future[Any]) -> None:
    try:
        future.wait()
    except Exception as error:
        _fail(state, world_size, error, name)
        return
    if until_left and name not in state.arrivals:
        left = muster_errors.PeerLostError(f"worker {name!r} left early: its shutdown() failed")
        _fail(state, world_size, left, name)


def _fail(state: State, world_size: int, error: Exception, *lost: str) -> None:
    with state.lock:
        state.failure = error
        state.lost.update(lost)
        arrivals = [arrival for arrival in state.arrivals.values() if not arrival.done()]
        state.note(world_size)
    for arrival in arrivals:
        arrival.set_exception(error.with_traceback(None))
