"""What asynchronous calls return inside a graph. Dynamo traces these classes, so they are plain Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class Work:
    """A pending call of a graph, with the methods of torch.distributed.Work.

    `pending[i]` is the result of an operator. wait() copies it to the tensors of `targets[i]`, one after the other.
    """

    def __init__(self, pending: list[torch.Tensor], targets: list[list[torch.Tensor]], source: int = -1):
        self._pending = pending
        self._targets = targets
        self._source = source
        self._done = False

    def wait(self, timeout: Any = None) -> bool:
        if self._done:
            return True
        self._done = True
        for pending, targets in self.results():
            copy(torch.ops._c10d_functional.wait_tensor(pending), targets)
        return True

    def results(self) -> list[tuple[torch.Tensor, list[torch.Tensor]]]:
        return list(zip(self._pending, self._targets, strict=True))

    def is_completed(self) -> bool:
        """Waits: a graph cannot ask whether a call has ended."""
        return self.wait()

    def is_success(self) -> bool:
        return self.wait()

    def synchronize(self) -> None:
        self.wait()

    def exception(self) -> None:
        return None

    def result(self) -> list[torch.Tensor]:
        self.wait()
        return [target for targets in self._targets for target in targets]

    def source_rank(self) -> int:
        return self._source

    def get_future(self) -> Future:
        return Future(self)


class Future:
    """The future of a Work, with the methods of torch.futures.Future. Callbacks run when something waits for it."""

    def __init__(self, source: Work | Future, callback: Callable[[Any], Any] | None = None):
        self._source: Any = source
        self._callback = callback
        self._value: Any = None
        self._done = False

    def then(self, callback: Callable[[Any], Any]) -> Future:
        return Future(self, callback)

    def add_done_callback(self, callback: Callable[[Any], Any]) -> None:
        raise NotImplementedError("muster: add_done_callback() is not supported inside a compiled graph; use then()")

    def done(self) -> bool:
        self.wait()
        return True

    def wait(self) -> Any:
        if self._done:
            return self._value
        self._done = True
        if self._callback is None:
            self._value = self._source.result()
        else:
            self._source.wait()
            self._value = self._callback(self._source)
        return self._value

    def value(self) -> Any:
        return self.wait()


def copy(source: torch.Tensor, targets: list[torch.Tensor]) -> None:
    if len(targets) == 1:
        targets[0].copy_(source.view(targets[0].shape))
        return
    flat = source.reshape(-1)
    begin = 0
    for target in targets:
        end = begin + target.numel()
        target.copy_(flat[begin:end].view(target.shape))
        begin = end
