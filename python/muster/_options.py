"""The options of one process group, which otherwise come from environment variables."""

from __future__ import annotations

from datetime import timedelta

from torch._C._distributed_c10d import Backend
from torch.distributed.constants import default_pg_timeout

TRANSPORTS = ("shm", "unix", "tcp")
MAX_STREAMS = 16  # kMaxSubflows in transport/link_hello.h


class Options(Backend.Options):
    """Options of one process group: `pg_options=` of torch's init_process_group() and new_group(), and `options=` of
    muster.process_group(). What is None comes from the environment (docs/reference/environment.md).

    timeout: for forming the group, and for each operation without its own timeout; a number is in seconds.
    transport: the transports that may be used, best first, such as "tcp" or "shm,tcp" (MUSTER_TRANSPORT).
    interface: where to listen, by name or address (MUSTER_INTERFACE).
    streams: the connections of one TCP link, 1 to 16, the same at all ranks (MUSTER_TCP_STREAMS).
    label: ranks with different labels count as ranks of different hosts (MUSTER_HOST_LABEL).

    Groups that are split off the group, merged or shrunk inherit its options. Raises ValueError for an invalid
    value.
    """

    def __init__(
        self,
        timeout: timedelta | float | None = None,
        *,
        transport: str | None = None,
        interface: str | None = None,
        streams: int | None = None,
        label: str | None = None,
    ) -> None:
        self.timeout = timeout if timeout is None or isinstance(timeout, timedelta) else timedelta(seconds=timeout)
        self.transport, self.interface, self.streams, self.label = transport, interface, streams, label
        self._check()
        super().__init__("muster", self.timeout or default_pg_timeout)

    def _check(self) -> None:
        if self.timeout is not None and self.timeout <= timedelta(0):
            raise ValueError(f"timeout must be > 0, got {self.timeout}")
        for word in () if self.transport is None else self.transport.split(","):
            if word not in TRANSPORTS:
                raise ValueError(f"transport has {word!r}: use some of shm, unix and tcp, as in 'shm,tcp'")
        if self.streams is not None and self.streams not in range(1, MAX_STREAMS + 1):
            raise ValueError(f"streams must be a number from 1 to {MAX_STREAMS}, got {self.streams!r}")
        for name in ("interface", "label"):
            if getattr(self, name) == "":
                raise ValueError(f"{name} is empty; without it the environment's is used")

    def __repr__(self) -> str:
        names = ("timeout", "transport", "interface", "streams", "label")
        given = (f"{name}={getattr(self, name)!r}" for name in names if getattr(self, name) is not None)
        return f"muster.Options({', '.join(given)})"
