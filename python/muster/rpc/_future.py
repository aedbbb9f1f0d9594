"""The result of a call, now or later."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import threading
from collections.abc import Callable, Generator, Iterable
from types import TracebackType
from typing import Any, Generic, TypeVar

from muster import _C

T = TypeVar("T")
_log = logging.getLogger("muster.rpc")


class Future(Generic[T]):
    """A result that is pending, with the methods of torch.futures.Future. It can also be awaited.

    rpc_async() returns one. A program can create one itself, and set its result later. Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._value: Any = None
        self._error: BaseException | None = None
        self._traceback: TracebackType | None = None
        self._callbacks: list[Callable[[], None]] = []

    def done(self) -> bool:
        """True once there is a result or an exception."""
        return self._ended.is_set()

    def wait(self) -> T:
        """Waits, and returns the result or raises the exception."""
        self._ended.wait()
        if self._error is not None:
            raise self._error.with_traceback(self._traceback)  # else each raise would add lines to it
        return self._value

    def value(self) -> T:
        """The result of a future that is done. RuntimeError if it is not."""
        if not self.done():
            raise RuntimeError("the future is not done: use wait()")
        return self.wait()

    def set_result(self, result: T) -> None:
        """RuntimeError if the future has a result already."""
        self._finish(result, None)

    def set_exception(self, exception: BaseException) -> None:
        """wait() raises the exception. RuntimeError if the future has a result already."""
        if not isinstance(exception, BaseException):
            raise TypeError(f"{exception!r} is not an exception")
        self._finish(None, exception)

    def add_done_callback(self, callback: Callable[[Future[T]], None]) -> None:
        """Calls `callback(self)` once the future is done: at once, or on any thread of the agent or of a caller.

        It must be short. Do not call other workers, or wait for them, while you hold a lock that the callback takes.
        It sees the context variables of the caller, and so its context of distributed autograd.
        """
        _check_callable(callback)
        variables = contextvars.copy_context()
        self._when_done(lambda: variables.run(callback, self))

    def then(self, callback: Callable[[Future[T]], Any]) -> Future[Any]:
        """Returns a future of the result of `callback(self)`, which is called as by add_done_callback()."""
        _check_callable(callback)
        after: Future[Any] = Future()
        variables = contextvars.copy_context()

        def run() -> None:
            try:
                after.set_result(variables.run(callback, self))
            except BaseException as error:
                after.set_exception(error)

        self._when_done(run)
        return after

    def __await__(self) -> Generator[Any, None, T]:
        if not self.done():
            loop = asyncio.get_running_loop()
            waiter = loop.create_future()

            def wake() -> None:
                if not waiter.done():  # else the task was canceled
                    waiter.set_result(None)

            def wake_loop() -> None:
                with contextlib.suppress(RuntimeError):  # the loop is closed
                    loop.call_soon_threadsafe(wake)

            self._when_done(wake_loop)
            yield from waiter
        return self.wait()

    def _when_done(self, callback: Callable[[], None]) -> None:
        with self._lock:
            if not self.done():
                self._callbacks.append(callback)
                return
        callback()

    def _finish(self, value: Any, error: BaseException | None) -> None:
        with self._lock:
            if self.done():
                raise RuntimeError("the future has a result already")
            self._value, self._error = value, error
            self._traceback = error.__traceback__ if error is not None else None
            self._ended.set()
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            try:
                callback()
            except Exception:  # the others are called all the same
                _log.exception("a callback of a future failed")


class CallFuture(Future[T]):
    """The future of a remote call."""

    def __init__(self, call: _C.RpcCall) -> None:
        self._call = call

    def done(self) -> bool:
        return self._call.done()

    def wait(self) -> T:
        return self._call.wait()  # type: ignore[no-any-return]

    def wait_for(self, seconds: float) -> bool:
        """Waits, but not longer than this. True if the call has ended."""
        return self._call.wait_for(seconds)

    def succeeded(self) -> bool:
        """True if the call has ended without an error."""
        return self._call.succeeded()

    def cancel(self) -> None:
        """Ends the call with muster.AbortedError. A function that has started runs on."""
        self._call.cancel()

    def _when_done(self, callback: Callable[[], None]) -> None:
        self._call.then(callback)

    def _finish(self, value: Any, error: BaseException | None) -> None:
        raise RuntimeError("the result of a remote call is set by its worker")


def wait_all(futures: Iterable[Future[Any]]) -> list[Any]:
    """The results of all futures. Raises the first exception, after all of them are done."""
    all_of_them = list(futures)
    for future in all_of_them:
        _settle(future)
    return [future.wait() for future in all_of_them]


def collect_all(futures: Iterable[Future[Any]]) -> Future[list[Future[Any]]]:
    """A future that is done when all of them are. Its result is the list."""
    all_of_them = list(futures)
    together: Future[list[Future[Any]]] = Future()
    left = len(all_of_them)
    lock = threading.Lock()

    def one_done(_: Future[Any]) -> None:
        nonlocal left
        with lock:
            left -= 1
            last = left == 0
        if last:
            together.set_result(all_of_them)

    if not all_of_them:
        together.set_result([])
    for future in all_of_them:
        future.add_done_callback(one_done)
    return together


def _check_callable(callback: object) -> None:
    if not callable(callback):
        raise TypeError(f"the callback of a future must be callable, not {callback!r}")


def _settle(future: Future[Any]) -> None:
    try:
        future.wait()
    except Exception:
        if not future.done():
            raise
