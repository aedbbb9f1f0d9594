"""The data of DistributedDataParallel's _get_ddp_logging_data()."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

if TYPE_CHECKING:
    from muster.nn._distributed import DistributedDataParallel

_DTYPES = {torch.float32: "float", torch.float64: "double"}  # C++'s names, which torch's logger uses
_ENVIRONMENT = ("MASTER_PORT", "MASTER_ADDR", "TORCH_DISTRIBUTED_DEBUG", "CUDA_VISIBLE_DEVICES")
_ALWAYS_SAMPLED = 10  # iterations; Reducer.sample_rate samples later ones


class LoggingData(NamedTuple):
    """Uses the names of torch's DDPLoggingData. Times are in nanoseconds."""

    strs_map: dict[str, str]
    ints_map: dict[str, int]


class Logger:
    """Replaces torch's dist.Logger, which works with torch's reducer only. The keys are the same, but keys that have
    no value here are missing.
    """

    def __init__(self, model: DistributedDataParallel, static_graph: bool) -> None:
        self._reducer = model.reducer
        self._forwards = 0
        self._sums: dict[str, int] = {}
        self._samples = 0
        parameters = self._reducer.parameters
        dtypes = {_DTYPES.get(each.dtype, str(each.dtype).removeprefix("torch.")) for each in parameters}
        self._strs = {name.lower(): os.environ.get(name, "N/A") for name in _ENVIRONMENT}
        self._strs["dtypes"] = ", ".join(sorted(dtypes))
        self._strs["backend_name"] = dist.get_backend(model.process_group)
        self._strs["bucket_sizes"] = _join(self._reducer.bucket_bytes())
        self._strs["module_name"] = type(model.module).__name__
        self._strs["device_ids"] = _join(model.device_ids or [])
        self._ints = {
            "iteration": 0,
            "world_size": model.process_group.size(),
            "rank": model.process_group.rank(),
            "is_multi_device_module": int(model.is_multi_device_module),
            "num_parameter_tensors": len(parameters),
            "total_parameter_size_bytes": sum(each.nbytes for each in parameters),
            "bucket_cap_bytes": model.bucket_bytes_cap,
            "find_unused_parameters": int(model.find_unused_parameters),
            "gradient_as_bucket_view": int(model.gradient_as_bucket_view),
            "output_device": -1 if model.output_device is None else model.output_device,
            "broadcast_buffers": int(model.broadcast_buffers),
            "has_sync_bn": int(any(isinstance(each, nn.SyncBatchNorm) for each in model.module.modules())),
            "static_graph": int(static_graph),
        }

    def set_runtime_stats_and_log(self) -> None:
        """Called before a forward: records the previous iteration if it is sampled."""
        iteration = self._forwards
        self._forwards += 1
        if iteration > 0 and (iteration <= _ALWAYS_SAMPLED or iteration % self._reducer.sample_rate == 0):
            self._ints["iteration"] = iteration
            self._note_buckets()
            self._note_times()

    def _note_buckets(self) -> None:
        plan = self._reducer.bucket_parameters()
        self._ints["has_rebuilt_buckets"] = int(self._reducer.has_rebuilt_buckets)
        self._ints["can_set_static_graph"] = int(self._reducer._ddp_graph_static())
        if self._reducer.has_rebuilt_buckets:
            self._strs["rebuilt_bucket_sizes"] = _join(self._reducer.bucket_bytes())
            self._strs["rebuilt_per_bucket_param_indices"] = ", ".join(" ".join(map(str, each)) for each in plan)
            self._strs["prev_iteration_grad_ready_order_indices"] = _join(index for each in plan for index in each)

    def _note_times(self) -> None:
        times = self._reducer.times()
        reduced = [bucket for bucket in times["buckets"] if bucket["begun"]]
        self._ints["num_buckets_reduced"] = len(reduced)
        if not reduced:
            return
        begun, ended = reduced[0]["begun"], reduced[-1]["ended"]
        taken = {
            "forward_compute_time": times["backward"] - times["forward"],
            "backward_compute_time": times["last_gradient"] - times["backward"],
            "backward_comm_time": ended - begun,
            "backward_compute_comm_overlap_time": max(0, min(times["last_gradient"], ended) - begun),
        }
        self._samples += 1
        for name, time in taken.items():
            self._sums[name] = self._sums.get(name, 0) + time
            self._ints["avg_" + name] = self._sums[name] // self._samples
        self._ints.update(
            taken,
            forward_compute_time_start=times["forward"],
            backward_compute_time_start=times["backward"],
            backward_compute_time_end=times["last_gradient"],
            backward_comm_time_start=begun,
            backward_comm_time_end=ended,
        )

    def set_error_and_log(self, error: str) -> None:
        self._reducer._note_error(error)

    def _set_comm_hook_name(self, comm_hook: str) -> None:
        self._strs["comm_hook"] = comm_hook

    def _set_uneven_input_join(self) -> None:
        self._ints["join_uneven_inputs"] = 1

    def _set_static_graph(self) -> None:
        self._ints["static_graph"] = 1

    def _get_ddp_logging_data(self) -> LoggingData:
        if error := self._reducer._last_error():
            return LoggingData(self._strs | {"error": error}, self._ints | {"has_error": 1})
        return LoggingData(self._strs, self._ints)


def _join(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))
