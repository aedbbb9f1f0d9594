"""References to values at other workers."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, NoReturn, TypeVar

from muster import _C
from muster import errors as muster_errors
from muster.rpc import _agent, _calls, _context, _functions, _serving
from muster.rpc._agent import WorkerInfo
from muster.rpc._calls import UNSET_TIMEOUT
from muster.rpc._functions import export
from muster.rpc._future import CallFuture

T = TypeVar("T")
_SHORTEST = 1e-3  # seconds, for a call whose time is up


class RRef(Generic[T]):
    """A reference to a value at one worker, its owner. It can be passed to other workers, as an argument or a result.

    RRef(value) makes this worker the owner. remote() returns one to a value at another worker. The value lives until no
    worker holds a reference to it. A worker that died counts as holding none after a minute (Options.lease).
    """

    __slots__ = ("_creation", "_ref")

    def __init__(self, value: T) -> None:
        agent = _agent.current().agent
        self._ref = agent.new_ref(agent.name)
        self._creation: CallFuture[None] | None = None  # the call that makes the value
        agent.set_ref(*self._ref.id, value)

    @staticmethod
    def _of(ref: _C.RpcRef, creation: CallFuture[None] | None = None) -> RRef[Any]:
        made = RRef.__new__(RRef)
        made._ref, made._creation = ref, creation
        return made

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{self!r} can only be pickled by muster.rpc, as an argument or a result")

    def owner(self) -> WorkerInfo:
        """The worker that has the value. LookupError if it has left."""
        return _agent.get_worker_info(self._ref.owner)

    def owner_name(self) -> str:
        """The name of the worker that has the value."""
        return self._ref.owner

    def is_owner(self) -> bool:
        """True if this worker has the value."""
        return self._ref.is_owner

    def confirmed_by_owner(self) -> bool:
        """True if the owner knows the reference. It does, unless a call of remote() is pending or has failed."""
        return self._creation is None or self._creation.succeeded()

    def to_here(self, timeout: float = UNSET_TIMEOUT) -> T:
        """Waits for the value, and returns a copy; at the owner the value itself.

        timeout: in seconds; 0 is none. By default that of init_rpc().

        Raises the exception of the function that should have made the value.
        """
        return self._fetch(timeout).wait() if not self.is_owner() else self._wait_here(timeout)

    def local_value(self) -> T:
        """The value, at the owner. ValueError at other workers."""
        if not self.is_owner():
            raise ValueError(f"{self!r} is a reference to a value at another worker: use to_here()")
        return self._wait_here(UNSET_TIMEOUT)

    def _wait_here(self, timeout: float) -> T:
        agent = _agent.current().agent
        if (value := agent.local_value(self._ref)) is None:
            agent.wait_for_value(self._ref, _calls.seconds_of(timeout)).wait()
            value = agent.local_value(self._ref)
            assert value is not None
        return value[0]  # type: ignore[no-any-return]

    def _wait(self, timeout: float) -> None:
        """Waits until the owner has the value. Raises what the function has raised."""
        left = self._after_creation(timeout)
        _agent.current().agent.wait_for_value(self._ref, left).wait()

    def _fetch(self, timeout: float) -> CallFuture[T]:
        left = self._after_creation(timeout)
        return CallFuture(_agent.current().agent.fetch(self._ref, left, _context.current.get()))

    def _after_creation(self, timeout: float) -> float:
        """Waits for the call that makes the value. Raises if the function could not be called.

        Returns the time that is left.
        """
        limit = _calls.seconds_of(timeout)
        if self._creation is None:
            return limit
        begin = time.monotonic()
        if not self._creation.wait_for(limit):
            raise muster_errors.TimeoutError(
                f"{self!r} has no value after {limit:g} s: the call that makes it still runs"
            )
        self._creation.wait()
        return max(limit - (time.monotonic() - begin), _SHORTEST)

    def rpc_sync(self, timeout: float = UNSET_TIMEOUT) -> Any:
        """A proxy: rref.rpc_sync().method(...) calls a method of the value at its owner, and returns the result."""
        return _Proxy(self, _calls.rpc_sync, timeout)

    def rpc_async(self, timeout: float = UNSET_TIMEOUT) -> Any:
        """As rpc_sync(), but the method returns a future."""
        return _Proxy(self, _calls.rpc_async, timeout)

    def remote(self, timeout: float = UNSET_TIMEOUT) -> Any:
        """As rpc_sync(), but the method returns a reference to its result."""
        return _Proxy(self, remote, timeout)

    def __repr__(self) -> str:
        creator, number = self._ref.id
        return f"<muster.rpc.RRef {creator}.{number} at {self._ref.owner!r}>"


class _Proxy:
    def __init__(self, rref: RRef[Any], call: Callable[..., Any], timeout: float) -> None:
        self._rref, self._call, self._timeout = rref, call, timeout

    def __getattr__(self, name: str) -> Callable[..., Any]:
        _check_method(name)
        rref, call, timeout = self._rref, self._call, self._timeout
        return lambda *args, **kwargs: call(
            rref.owner_name(), _calls.with_note(_CALL_METHOD, f"method {name}"), (rref, name, *args), kwargs, timeout
        )

    # Python does not look these up with __getattr__().
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__getattr__("__call__")(*args, **kwargs)

    def __getitem__(self, key: Any) -> Any:
        return self.__getattr__("__getitem__")(key)


def _check_method(name: str) -> None:
    if name.startswith("_") and name not in ("__call__", "__getitem__"):
        raise AttributeError(f"{name} is not public: other workers cannot call it")


_CALL_METHOD = "muster.ref.call_method"


@export(name=_CALL_METHOD)
def _call_method(rref: RRef[Any], name: str, /, *args: Any, **kwargs: Any) -> Any:
    _check_method(name)
    value = rref.local_value()
    _functions.check_method(type(value), name)
    method = getattr(value, name)
    result = method(*args, **kwargs)
    return _serving.PendingResult(result, name) if getattr(method, "_muster_async_execution", False) else result


def remote(
    to: str | WorkerInfo,
    func: Callable[..., T] | str,
    args: Sequence[Any] | None = (),
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET_TIMEOUT,
) -> RRef[T]:
    """Calls `func(*args, **kwargs)` at the worker `to`, and returns a reference to its result at once.

    func: a function or a class. The worker needs no value that can be sent.
    timeout: of the call, in seconds; 0 is none. By default that of init_rpc().

    An exception is raised by to_here().
    """
    worker = _agent.current()
    ref = worker.agent.new_ref(_calls.name_of_worker(to))
    function, arguments = _calls.named(func, args)
    call = worker.agent.call(
        ref.owner,
        _calls.with_note(_CREATE, function.partition("#")[2] or function),
        [(*ref.id, function, arguments, dict(kwargs) if kwargs else {}), {}],
        _calls.seconds_of(timeout),
        False,
        False,
        _context.current.get(),
        ref,
    )
    return RRef._of(ref, CallFuture(call))


def _create(
    creator: int, number: int, function: str, args: tuple[Any, ...], kwargs: dict[str, Any], *, caller: tuple[str, int]
) -> object:
    """At the owner: makes the value of a reference. An exception of the function becomes its value."""
    agent = _agent.current().agent
    if creator != caller[1]:
        raise ValueError(f"worker {caller[0]!r} names a reference of another worker")
    if caller[0] != agent.name:
        agent.accept_ref(creator, number, caller)

    def finish(error: BaseException | None, value: Any) -> None:
        if error is None:
            agent.set_ref(creator, number, value)
        else:
            agent.fail_ref(creator, number, error)

    try:
        result = _serving.result_of(function.partition("#")[0], args, kwargs)
    except BaseException as error:
        finish(error, None)
        return None
    if isinstance(result, _serving.PendingResult):
        return _serving.PendingResult(result.then(finish), function)
    finish(None, result)
    return None


_CREATE = "muster.ref.create"  # of C++ workers, too
export(name=_CREATE)(_create)
_serving.needs_caller(_CREATE)
