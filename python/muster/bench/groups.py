"""The process groups that one rank measures in turn."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist


class Groups:
    """Process groups of all ranks by backend. The benchmark itself uses the default group, over Gloo."""

    def __init__(self, timeout: timedelta) -> None:
        self._timeout = timeout
        self._groups: dict[str, Any] = {}

    def __getitem__(self, backend: str) -> Any:
        if backend not in self._groups:
            self._groups[backend] = dist.new_group(backend=backend, timeout=self._timeout)
        return self._groups[backend]

    def recreate(self, backend: str) -> None:
        """Destroys the group, because a failed operation may have ended it. The next use makes another one."""
        dist.destroy_process_group(self._groups.pop(backend))
