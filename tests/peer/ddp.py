"""What the tests find in the place of torch's DistributedDataParallel."""

from __future__ import annotations

from typing import Any

import muster.nn


class DistributedDataParallel(muster.nn.DistributedDataParallel):
    """With torch's default for what is another one in muster."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("gradient_as_bucket_view", False)
        super().__init__(*args, **kwargs)
