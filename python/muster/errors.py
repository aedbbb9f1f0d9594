"""What muster's operations raise: what happened, to whom, during what, and what to try, in one sentence.

All are torch.distributed.DistBackendError, so programs that catch torch's errors catch these. Wrong arguments are
ArgumentError, and what muster cannot do is NotImplementedError. Waits of a store raise
torch.distributed.DistStoreError.
"""

from __future__ import annotations

from torch.distributed import DistBackendError


class Error(DistBackendError):
    """`rank`: the one that caused it, where known. `context`: the operation that it ended."""

    rank: int | None = None
    context: str = ""


class TimeoutError(Error):  # noqa: A001 (muster.TimeoutError says whose it is)
    """The deadline passed first."""


class PeerLostError(Error):
    """Another rank died, or closed its link."""


class AbortedError(Error):
    """The group had failed before, or was aborted."""


class MismatchError(Error):
    """The ranks did not do the same: another operation, shape, dtype or group size."""


class AuthenticationError(Error):
    """The other side does not know this job's secret."""


class ProtocolError(Error):
    """The other side does not speak muster's protocol, or another version of it."""


class UnavailableError(Error):
    """An address could not be bound or reached."""


class ArgumentError(ValueError, RuntimeError):
    """An argument is wrong. Both classes, as torch's other backends raise the one or the other for the same mistake."""


# By muster::ErrorCode; the numbers are frozen in base/error.h.
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
