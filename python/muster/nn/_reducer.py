"""muster's reducer with the interface of torch's reducer."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from muster import _C
from muster._group import backend_of

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch import Tensor
    from torch._C._distributed_c10d import GradBucket
    from torch.futures import Future


class Reducer(_C.Reducer):
    """_C.Reducer with the other methods of torch's reducer. The Logger reads the attributes."""

    sample_rate = 100
    has_rebuilt_buckets = False

    def __init__(self, process_group: dist.ProcessGroup, parameters: list[Tensor], options: _C.ReducerOptions) -> None:
        super().__init__(backend_of(process_group), parameters, options)
        self.parameters = parameters
        self._process_group = process_group

    def _rebuild_buckets(self) -> bool:
        rebuilt = super()._rebuild_buckets()
        self.has_rebuilt_buckets |= rebuilt
        return rebuilt

    def _run_allreduce_hook(self, bucket: GradBucket) -> Future[Tensor]:
        """Returns the sum, because torch's hooks divide it."""
        work = self._process_group.allreduce([bucket.buffer()])
        summed: Future[Tensor] = work.get_future().then(lambda future: future.value()[0])
        return summed

    def _update_process_group(self, process_group: dist.ProcessGroup) -> None:
        self._set_backend(backend_of(process_group))
        self._process_group = process_group

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        self.sample_rate = sample_rate

    def _push_all_rebuilt_params(self) -> None:
        """Does nothing, because _shadow_backward() includes this."""

    def _set_sparse_metadata(self, global_unique_ids: dict[str, Tensor]) -> None:
        raise NotImplementedError(
            "muster's reducer finds the rows of sparse gradients by itself: drop the call of _set_sparse_metadata()"
        )

    def get_backward_stats(self) -> list[int]:
        """The times at which the buckets were full, in nanoseconds since the first gradient of the last backward."""
        times = self.times()
        return [max(0, bucket["ready"] - times["backward"]) for bucket in times["buckets"]]


def _noting_errors(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(self: Reducer, *arguments: Any) -> Any:
        try:
            return method(self, *arguments)
        except RuntimeError as error:
            self._note_error(str(error))
            raise

    return call


for _name in ("prepare_for_backward", "_rebuild_buckets", "_set_static_graph", "_register_comm_hook"):
    setattr(Reducer, _name, _noting_errors(getattr(Reducer, _name)))
