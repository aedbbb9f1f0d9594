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
from muster.rpc import _functions

# A call whose function has no name: it is the first argument, pickled.
PICKLED_FUNCTION = "<pickled>"


def run(name: str, arguments: list[Any], caller: str, responder: _C.RpcResponder) -> object:
    """Returns the result of the function, or `responder` if it replies later."""
    positional, named = arguments
    function, positional = _function_of(name, positional)
    result = function(*positional, **named)
    if inspect.iscoroutine(result):
        _start(result, responder)
        return responder
    if getattr(function, "_muster_async_execution", False):
        _reply_later(result, responder, name)
        return responder
    return result


def _function_of(name: str, arguments: tuple[Any, ...]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    if name != PICKLED_FUNCTION:
        return _functions.find(name), arguments
    if not _functions.allows_all():
        raise PermissionError("this worker runs no pickled functions: start all workers with allow_pickle=True")
    return arguments[0], arguments[1:]


def _reply_later(future: Any, responder: _C.RpcResponder, name: str) -> None:
    if not hasattr(future, "add_done_callback"):
        raise TypeError(
            f"{name} is marked with async_execution, but returned {type(future).__qualname__}, not a future"
        )

    def reply(done: Any) -> None:
        try:
            result = done.value() if hasattr(done, "value") else done.result()
        except BaseException as error:
            responder.fail(error)
        else:
            responder.reply(result)

    future.add_done_callback(reply)


# ---- coroutines


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    """The event loop of all `async def` functions of this process, in a thread of its own."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="muster-rpc-async", daemon=True).start()
    return loop


_tasks: set[asyncio.Task[None]] = set()


def _start(coroutine: Coroutine[Any, Any, Any], responder: _C.RpcResponder) -> None:
    async def reply() -> None:
        try:
            result = await coroutine
        except BaseException as error:
            responder.fail(error)
        else:
            responder.reply(result)

    def start() -> None:
        task = _loop().create_task(reply())
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
    return name, message, "".join(traceback.format_exception(error))


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
