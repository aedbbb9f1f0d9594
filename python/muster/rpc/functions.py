"""Marks of functions, as in torch.distributed.rpc.functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

_Function = TypeVar("_Function", bound=Callable[..., Any])


def async_execution(function: _Function) -> _Function:
    """The function returns a future, and its caller gets the result of that future. No thread waits for it.

    The future may be one of muster.rpc, torch.futures or concurrent.futures. An `async def` needs no mark.
    """
    function._muster_async_execution = True  # type: ignore[attr-defined]
    return function
