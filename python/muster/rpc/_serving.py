"""Runs the functions that other workers call. The native half calls run() on one of the agent's threads."""

from __future__ import annotations

import asyncio
import functools
import inspect
import threading
import traceback
from collections.abc import Callable, Coroutine
from typing import Any

from muster import _C
from muster.rpc import _context, _functions
from muster.rpc._future import Future

# A call whose function has no name: it is the first argument, pickled.
PICKLED_FUNCTION = "<pickled>"


def run(name: str, arguments: list[Any], caller: tuple[str, int], responder: _C.RpcResponder, context: int) -> object:
    """Returns the result of the function, or `responder` if it replies later.

    context: of distributed autograd, which the call belongs to; 0 is none.
    """
    if context != _context.NONE:
        token = _context.current.set(context)
        try:
            return run(name, arguments, caller, responder, _context.NONE)
        finally:
            _context.current.reset(token)
    args, kwargs = arguments
    if name in _with_caller:
        kwargs["caller"] = caller
    result = result_of(name, args, kwargs)
    if not isinstance(result, PendingResult):
        return result
    result.then(lambda error, value: responder.reply(value) if error is None else responder.fail(error))
    return responder


def result_of(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls a function. The result of a coroutine, or of a function with async_execution, is a PendingResult."""
    if name == PICKLED_FUNCTION:
        if not _functions.allows_all():
            raise PermissionError("this worker runs no pickled functions: start all workers with allow_pickle=True")
        function, args = args[0], args[1:]
    else:
        function = _functions.find(name)
    result = function(*args, **kwargs)
    if inspect.iscoroutine(result) or getattr(function, "_muster_async_execution", False):
        return PendingResult(result, name)
    return result


_with_caller: set[str] = set()


def needs_caller(name: str) -> None:
    """The function with this name gets the name and the id of the worker that calls it, as the argument `caller`."""
    _with_caller.add(name)


class PendingResult:
    """A result that is pending: a coroutine, or a future of any library.

    then() calls back with the exception or the result, on any thread, and returns a future that is done after that.
    """

    def __init__(self, pending: Any, function: str) -> None:
        if not inspect.iscoroutine(pending) and not hasattr(pending, "add_done_callback"):
            raise TypeError(
                f"{function} is marked with async_execution, but returned {type(pending).__qualname__}, not a future"
            )
        self._pending = pending

    def then(self, callback: Callable[[BaseException | None, Any], None]) -> Future[None]:
        after: Future[None] = Future()

        def finish(error: BaseException | None, value: Any) -> None:
            callback(error, value)
            after.set_result(None)

        def on_done(done: Any) -> None:
            try:
                value = done.value() if hasattr(done, "value") else done.result()
            except BaseException as error:
                finish(error, None)
            else:
                finish(None, value)

        if inspect.iscoroutine(self._pending):
            _start(self._pending, finish)
        else:
            self._pending.add_done_callback(on_done)
        return after


# ---- coroutines


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    """The event loop of all `async def` functions of this process, in a thread of its own."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="muster-rpc-async", daemon=True).start()
    return loop


_tasks: set[asyncio.Task[None]] = set()


def _start(coroutine: Coroutine[Any, Any, Any], finish: Callable[[BaseException | None, Any], None]) -> None:
    async def run_it() -> None:
        try:
            result = await coroutine
        except BaseException as error:
            finish(error, None)
        else:
            finish(None, result)

    def start() -> None:
        task = _loop().create_task(run_it())
        _tasks.add(task)  # the loop itself keeps only a weak reference
        task.add_done_callback(_tasks.discard)

    _loop().call_soon_threadsafe(start)


# ---- exceptions


class RemoteTracebackError(Exception):
    """The cause of an exception that a remote function has raised: shows where."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def describe(error: BaseException) -> tuple[str, str, str]:
    """The class, the message and the traceback of an exception."""
    kind = type(error)
    name = kind.__qualname__ if kind.__module__ == "builtins" else _functions._qualified(kind)
    message = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    return name, _encodable(message), _encodable("".join(traceback.format_exception(error)))


def _encodable(text: str) -> str:
    """Without lone surrogates, which UTF-8 cannot hold."""
    return text.encode(errors="backslashreplace").decode()


def rebuild(name: str, message: str, call: str, remote_traceback: str) -> BaseException:
    """The exception of a remote function. Its class is the same if it is one of Python's, or may travel.

    call: names the function and the worker.
    """
    kind = _functions.exception_class(name)
    error: BaseException
    try:
        error = RuntimeError(f"{name}: {message}") if kind is None else kind(message)
    except Exception:
        error = RuntimeError(f"{name}: {message}")
    error.__cause__ = RemoteTracebackError(f"in the {call}\n{remote_traceback}".rstrip())
    return error
