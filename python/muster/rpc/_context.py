"""The context of distributed autograd that calls belong to (autograd.py)."""

from __future__ import annotations

from contextvars import ContextVar

NONE = 0

# The id. A thread has its own, and so has a task of asyncio.
current: ContextVar[int] = ContextVar("muster.rpc.autograd", default=NONE)
