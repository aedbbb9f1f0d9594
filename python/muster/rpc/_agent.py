"""The worker that this process is."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import util
from typing import TYPE_CHECKING, Any, NamedTuple

from muster import _C
from muster import errors as muster_errors
from muster.rpc import _functions

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch.distributed import ProcessGroup, Store

    from muster.rpc import _leaving

_OWN_BACKENDS = ("muster", "tensorpipe", "backendtype.tensorpipe")
LONGEST = 365 * 86_400.0  # seconds, of a wait without a limit
_LAST_WAIT = 2.0  # for workers that have left already, but not yet this process's store

_log = logging.getLogger("muster.rpc")


@_functions.export
class WorkerInfo(NamedTuple):
    """A worker. Its id is a number that no other worker of the job had before."""

    name: str
    id: int


@dataclass
class Options:
    """Options of a worker: `rpc_backend_options=` of init_rpc(). Times are in seconds.

    rpc_timeout: of a call that names none; 0 is none.
    init_method: where the workers meet if `muster run` did not start them, as in torch.distributed.
    num_worker_threads: functions that run here at a time. A function that waits for a call does not count.
    join_timeout: of init_rpc() (MUSTER_TIMEOUT; 300 without it).
    heartbeat_timeout: a worker that sends nothing for so long, while calls to it are pending, counts as lost.
    max_queued_calls: to one worker, beyond those that are sent and not answered; further calls fail at once.
    max_message_bytes: of the arguments or the result of a call. A larger result fails at once, at its caller too.
    transports: which may be used, best first: "shm,tcp" (MUSTER_TRANSPORT).
    interface: where to listen, by name or address (MUSTER_INTERFACE).
    tcp_streams: connections to a worker of another host, the same at all workers (MUSTER_TCP_STREAMS).
    lease: a worker that died, or is cut off for so long, holds no references any more (RRef).
    group: workers of different groups do not see each other.
    process_group: of the backend "process_group"; by default the one of init_process_group(). Each of its ranks must be
        a worker. It must not be destroyed before shutdown().
    """

    rpc_timeout: float = 60.0
    init_method: str = "env://"
    num_worker_threads: int = 16
    join_timeout: float | None = None
    heartbeat_timeout: float = 30.0
    max_queued_calls: int = 1 << 16
    max_message_bytes: int = 16 << 30
    transports: str | None = None
    interface: str | None = None
    tcp_streams: int | None = None
    lease: float = 60.0
    group: str = "rpc"
    process_group: ProcessGroup | None = None


class _Worker(NamedTuple):
    agent: _C.RpcAgent
    world_size: int | None
    timeout: float
    pid: int
    own_store: Store | None  # where the workers have met, if one of them serves it
    at_exit: util.Finalize
    leaving: _leaving.State


_lock = threading.Lock()
_worker: _Worker | None = None


def init_rpc(
    name: str,
    backend: object = None,
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: Any = None,
    *,
    store: Store | None = None,
    allow: str | Iterable[str] = (),
    allow_pickle: bool = False,
) -> None:
    """Makes this process a worker that others call by `name`, and that can call them. Waits until `world_size` workers
    have joined.

    backend: "muster" by default. "process_group" carries the calls by send and receive of a process group for CPU
        tensors, over Gloo, MPI or any other backend of torch.distributed. It is slower, but works wherever that does.
    rank, world_size: by default those of `muster run`. With a world_size of 0, or without one in a program that was
        started otherwise, the worker waits for no others, and workers may come and go at any time.
    rpc_backend_options: an Options, or torch's.
    store: where the workers meet; by default the job's own store, or the one at `init_method`.
    allow: what others may call here, in addition to the default (allow()).
    allow_pickle: unpickle everything that arrives, so that methods of objects and all functions and classes can travel
        that pickle can write. Then each worker can run any code in this one. It is logged.

    Raises ValueError if this process is a worker already, muster.Error if a living worker has the name, and
    muster.TimeoutError if workers are missing.
    """
    from muster.rpc import _leaving

    over_group = str(backend).lower() == "process_group"
    if backend is not None and not over_group and str(backend).lower() not in _OWN_BACKENDS:
        raise ValueError(f"muster.rpc has no backend {backend!r}: it has 'muster' and 'process_group'")
    if is_initialized():
        raise ValueError(f"this process is the worker {current().agent.name!r} already: call shutdown() first")
    options = options_of(rpc_backend_options)
    process_group = _process_group(options, name) if over_group else None
    join_timeout = options.join_timeout or float(os.environ.get("MUSTER_TIMEOUT", "300"))
    launched = store is None and "MUSTER_STORE" in os.environ
    if launched and world_size is None and rank < 0:
        world_size = int(os.environ["WORLD_SIZE"])
    world_size = world_size or None
    own_store = None
    if not launched and store is None:
        store, world_size = own_store, _ = _rendezvous(options.init_method, rank, world_size)
    with _lock:
        global _worker
        _functions.allow(allow)
        _functions.allow_all(allow_pickle)
        if allow_pickle:
            _log.warning("allow_pickle=True: each worker of this job can run any code in worker %r", name)
        native = _native_options(options, name, join_timeout, world_size is not None)
        agent = _C.rpc_join(native, store, process_group, options.lease, _functions.operators())
        at_exit = util.Finalize(None, _leave_at_exit, args=(agent, os.getpid()), exitpriority=0)
        leaving = _leaving.State()
        _worker = _Worker(agent, world_size, options.rpc_timeout, os.getpid(), own_store, at_exit, leaving)
    if world_size is not None:
        try:
            agent.barrier("joined", world_size, join_timeout)
        except BaseException:
            _leave(agent, os.getpid())
            raise


def _native_options(options: Options, name: str, join_timeout: float, fixed_members: bool) -> _C.RpcOptions:
    native = _C.RpcOptions()
    native.name, native.group = name, options.group
    native.max_handlers, native.fixed_members = options.num_worker_threads, fixed_members
    native.max_queued_calls, native.max_message_bytes = options.max_queued_calls, options.max_message_bytes
    native.set_times(join_timeout, options.heartbeat_timeout)
    for field in ("transports", "interface", "tcp_streams"):  # None: of the environment
        if (value := getattr(options, field)) is not None:
            setattr(native, field, value)
    return native


def _process_group(options: Options, name: str) -> ProcessGroup:
    from torch.distributed import group

    process_group = options.process_group or group.WORLD
    if process_group is None:
        raise ValueError(
            f"worker {name!r} has no process group: call init_process_group() first, or give Options(process_group=...)"
        )
    return process_group


def options_of(given: Any) -> Options:
    """From options of torch, what has a meaning here."""
    if given is None or isinstance(given, Options):
        return given or Options()
    if not hasattr(given, "rpc_timeout"):
        raise TypeError(f"rpc_backend_options must be muster.rpc.Options, not {given!r}")
    if getattr(given, "device_maps", None) or getattr(given, "devices", None):
        raise ValueError("muster sends CPU tensors only, so it takes no device_maps and no devices")
    options = Options(rpc_timeout=float(given.rpc_timeout), init_method=given.init_method)
    options.num_worker_threads = int(getattr(given, "num_worker_threads", options.num_worker_threads))
    return options


def _rendezvous(init_method: str, rank: int, world_size: int | None) -> tuple[Store, int | None]:
    from torch.distributed import PrefixStore, rendezvous

    if world_size is None and not init_method.startswith("env:") and "world_size=" not in init_method:
        own_rank = f"&rank={rank}" if rank >= 0 else ""  # as torch's own RPC does
        init_method, rank = f"{init_method}{'&' if '?' in init_method else '?'}world_size=-1{own_rank}", -1
    store, _, size = next(rendezvous(init_method, rank, -1 if world_size is None else world_size))
    return PrefixStore("muster-rpc", store), size if world_size is None and size > 0 else world_size


def is_initialized() -> bool:
    """True if this process is a worker."""
    return _worker is not None and _worker.pid == os.getpid()


def current() -> _Worker:
    worker = _worker
    if worker is None:
        with _lock:  # a call may arrive while init_rpc() still runs
            worker = _worker
    if worker is None:
        raise RuntimeError("this process is not a worker: call muster.rpc.init_rpc() first")
    if worker.pid != os.getpid():
        raise RuntimeError("a forked child is not the worker that its parent is: call muster.rpc.init_rpc()")
    return worker


def get_worker_info(worker_name: str | None = None) -> WorkerInfo:
    """The worker with this name, or this worker. LookupError if there is none."""
    worker = current()
    own = WorkerInfo(worker.agent.name, worker.agent.id)
    if worker_name is None or worker_name == own.name:
        return own
    for info in workers():
        if info.name == worker_name:
            return info
    raise LookupError(f"no worker has the name {worker_name!r}")


def workers() -> list[WorkerInfo]:
    """The workers that are present, sorted by id."""
    worker = current()
    return [WorkerInfo(*each) for each in worker.agent.workers(worker.timeout or 60.0)]


def shutdown(graceful: bool = True, timeout: float = 0) -> None:
    """Ends this worker. Further calls to it fail.

    graceful: waits until all workers have called shutdown() and their calls have ended. Without a world_size only this
        worker's own calls, and those that it serves, are waited for.
    timeout: of that, in seconds; 0 is none.
    """
    from muster.rpc import _leaving

    worker = current()
    limit = timeout or LONGEST
    size = worker.world_size if graceful else None
    try:
        if size is not None:
            _leaving.leave_together(worker.agent.name, size, limit)
    except BaseException:
        with contextlib.suppress(muster_errors.Error):  # the reason is more useful
            _leave(worker.agent, worker.pid, _LAST_WAIT)
        raise
    if graceful:
        _leave(worker.agent, worker.pid, limit)
    else:
        with contextlib.suppress(muster_errors.TimeoutError):  # calls were pending, as the caller expects
            _leave(worker.agent, worker.pid)
    if size is not None and worker.own_store is not None:
        _wait_for_others(worker.own_store, size)


def _wait_for_others(store: Store, world_size: int) -> None:
    """One of the workers serves the store, perhaps this one: it must outlive the others."""
    with contextlib.suppress(RuntimeError):
        count = store.add("left", 1)
        everyone = f"all left/{(count - 1) // world_size}"  # the workers may join and leave several times
        if count % world_size == 0:
            store.set(everyone, "")
        store.wait([everyone], timedelta(seconds=_LAST_WAIT))


def _leave_at_exit(agent: _C.RpcAgent, pid: int) -> None:
    """Threads of the agent need the GIL, and an interpreter that shuts down kills such threads.

    Errors are not shown: they would hide the reason why the program ends without shutdown().
    """
    with contextlib.suppress(Exception):
        _leave(agent, pid)


def _leave(agent: _C.RpcAgent, pid: int, timeout: float = 0) -> None:
    global _worker
    if pid != os.getpid():
        return
    try:
        agent.shutdown(timeout)
    finally:
        with _lock:
            if _worker is not None and _worker.agent is agent:
                _worker.at_exit.cancel()  # it keeps the agent
                _worker = None
