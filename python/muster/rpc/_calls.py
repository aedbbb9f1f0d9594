"""Calls of functions at other workers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from muster.rpc import _agent, _context, _functions
from muster.rpc._agent import WorkerInfo
from muster.rpc._future import CallFuture
from muster.rpc._serving import PICKLED_FUNCTION

UNSET_TIMEOUT = -1.0
_MOST_NOTE = 256


def rpc_sync(
    to: str | WorkerInfo,
    func: Callable[..., Any] | str,
    args: Sequence[Any] | None = (),
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET_TIMEOUT,
    *,
    idempotent: bool = False,
) -> Any:
    """Calls `func(*args, **kwargs)` at the worker `to`, and returns its result.

    func: a function, or the name of one that the worker has exported, which may be in C++.
    timeout: in seconds; 0 is none. By default that of init_rpc().
    idempotent: the function may run more than once, so the call is sent again if its connection breaks. The worker
        must have added the function as idempotent, too, which only C++ can do.

    Arguments and results may be tensors on the CPU and all values that can be pickled, of classes that may travel
    (the module's docstring). Tensors are copied; they must not change until the call has ended. A function that returns
    a tensor which others change should return a clone().

    An exception in the function is raised here, with the remote traceback as its cause. Other errors are those of
    muster.errors: PeerLostError if the worker is lost, TimeoutError, AbortedError. They name the worker and the call.
    """
    return _call(to, func, args, kwargs, timeout, False, idempotent).wait()


def rpc_async(
    to: str | WorkerInfo,
    func: Callable[..., Any] | str,
    args: Sequence[Any] | None = (),
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET_TIMEOUT,
    *,
    idempotent: bool = False,
) -> CallFuture[Any]:
    """Like rpc_sync(), but returns a future, which has the errors of the call.

    Wrong arguments raise at once. A reference among them whose owner is a third worker makes this wait until that
    worker knows the receiver, for `timeout` at most.
    """
    return CallFuture(_call(to, func, args, kwargs, timeout, False, idempotent))


def rpc_one_way(
    to: str | WorkerInfo,
    func: Callable[..., Any] | str,
    args: Sequence[Any] | None = (),
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET_TIMEOUT,
) -> CallFuture[None]:
    """Like rpc_async(), but no result is sent. The future is done when the function has been started."""
    return CallFuture(_call(to, func, args, kwargs, timeout, True, False))


def _call(
    to: str | WorkerInfo,
    func: Callable[..., Any] | str,
    args: Sequence[Any] | None,
    kwargs: Mapping[str, Any] | None,
    timeout: float,
    one_way: bool,
    idempotent: bool,
) -> Any:
    worker = _agent.current()
    function, arguments = named(func, args)
    named_arguments = dict(kwargs) if kwargs else {}
    if "::" in function:  # an operator, which cannot read what Python pickles
        arguments = tuple(map(_unpickled, arguments))
        named_arguments = {name: _unpickled(value) for name, value in named_arguments.items()}
    return worker.agent.call(
        name_of_worker(to),
        function,
        [arguments, named_arguments],
        seconds_of(timeout),
        one_way,
        idempotent,
        _context.current.get(),
    )


def _unpickled(argument: Any) -> Any:
    """A Size as a tuple, and a Parameter as a tensor, as which it is sent in a context of autograd anyway."""
    if isinstance(argument, torch.nn.Parameter) and _context.current.get() == _context.NONE:
        return argument.detach()
    return tuple(argument) if isinstance(argument, torch.Size) else argument


def name_of_worker(to: str | WorkerInfo) -> str:
    if isinstance(to, str):
        return to
    if isinstance(to, WorkerInfo):
        return to.name
    raise TypeError(f"a worker is called by its name or its WorkerInfo, not by {to!r}")


def named(func: Callable[..., Any] | str, args: Sequence[Any] | None) -> tuple[str, tuple[Any, ...]]:
    """The name of a function, and its arguments. A function without a name is an argument itself."""
    function = func if isinstance(func, str) else _functions.name_of(func)
    if args is None:
        args = ()
    if not isinstance(args, (tuple, list)):
        raise TypeError(f"args must be a tuple or a list, not {type(args).__qualname__}: write args=(value,)")
    if function is not None:
        return function, tuple(args)
    if not _functions.allows_all():
        raise ValueError(
            f"{func!r} has no name that another worker could find: call a function that a module defines. Methods of "
            "objects can travel if all workers were started with allow_pickle=True"
        )
    return with_note(PICKLED_FUNCTION, getattr(func, "__qualname__", repr(type(func)))), (func, *args)


def with_note(function: str, note: str) -> str:
    """The name of a function, so that users see `note` in its place in errors and in `muster dump`."""
    return f"{function}#{note[:_MOST_NOTE]}"


def seconds_of(timeout: float) -> float:
    if timeout == UNSET_TIMEOUT:
        timeout = _agent.current().timeout
    elif timeout < 0 or math.isnan(timeout):
        raise ValueError(f"the timeout must not be negative, got {timeout}")
    return min(timeout, _agent.LONGEST) or _agent.LONGEST
