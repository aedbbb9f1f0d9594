"""The errors of muster's operations. A message says what happened, to which rank, in which call, and what to try.

All are subclasses of torch.distributed.DistBackendError, so programs that catch torch's errors catch them. Wrong
arguments raise ArgumentError, and unsupported calls NotImplementedError. Waits of a store raise
torch.distributed.DistStoreError.
"""

from __future__ import annotations

import builtins

from torch.distributed import DistBackendError


class Error(DistBackendError):
    """`rank`: the rank that caused it, if known. `context`: the operation that failed."""

    rank: int | None = None
    context: str = ""


class TimeoutError(Error, builtins.TimeoutError):  # noqa: A001 (qualified as muster.TimeoutError)
    """The deadline passed before the operation was complete. `except TimeoutError` catches it too."""


class PeerLostError(Error):
    """Another rank died, or closed its link."""


class AbortedError(Error):
    """The group had failed before, or was aborted."""


class MismatchError(Error):
    """The ranks called different operations, or the same operation with another shape, dtype or group size."""


class AuthenticationError(Error):
    """The other side does not know this job's secret."""


class ProtocolError(Error):
    """The other side does not use muster's protocol, or uses another version of it."""


class UnavailableError(Error):
    """An address could not be bound or reached."""


class ArgumentError(ValueError, RuntimeError):
    """An argument is wrong. Has both base classes, because torch's other backends raise one or the other."""


class LaunchError(RuntimeError):
    """A function that elastic_launch() started failed. `failures`: the tracebacks of this node's ranks, by rank; empty
    if none raised, as after a signal. `status`: the exit status of `muster run`.
    """

    def __init__(self, message: str, status: int = 1, failures: dict[int, str] | None = None) -> None:
        super().__init__(message, status, failures)
        self.status, self.failures = status, failures or {}

    def __str__(self) -> str:
        return str(self.args[0])


# The keys are values of muster::ErrorCode, which are frozen in base/error.h.
_BY_CODE = {
    2: TimeoutError,
    3: PeerLostError,
    4: AbortedError,
    5: MismatchError,
    6: AuthenticationError,
    7: ProtocolError,
    10: UnavailableError,
}


def _from_native(code: int, message: str, rank: int, context: str) -> Error:
    error = _BY_CODE.get(code, Error)(message)
    error.rank = rank if rank >= 0 else None
    error.context = context
    return error
