"""Adapts the communication hooks that come with torch. Some of them rely on NCCL's behavior."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed import distributed_c10d
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, quantization_hooks
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power_sgd

from muster import _C
from muster._group import backend_of

if TYPE_CHECKING:
    from torch import Tensor
    from torch._C._distributed_c10d import Backend, GradBucket
    from torch.futures import Future

Hook = Callable[..., Any]

_QUANTIZING = (quantization_hooks.quantization_pertensor_hook, quantization_hooks.quantization_perchannel_hook)
_WRAPPERS = {
    "fp16_compress_wrapper_hook": default_hooks.fp16_compress_wrapper,
    "bf16_compress_wrapper_hook": default_hooks.bf16_compress_wrapper,
}
_ProcessGroup: Any = dist.ProcessGroup  # Any: the stubs know only some of its methods' overloads


def gradients_of(bucket: GradBucket) -> list[Tensor]:
    """Returns the gradients in their parameters' memory formats, as the bucket stores them. bucket.gradients() reads
    all of them row by row.
    """
    dense = torch.ops.aten.is_non_overlapping_and_dense
    pairs = zip(bucket.gradients(), bucket.parameters(), strict=True)
    return [each.as_strided(like.shape, like.stride()) if dense(like) else each for each, like in pairs]


def adapt_torch_hook(hook: Any, group: dist.ProcessGroup, own_groups: list[Backend]) -> Hook:
    """Returns the hook, or a replacement that does the same over muster. All ranks of `group`, the model's group, must
    call this. Appends the groups that the replacement uses to `own_groups`.
    """
    name = getattr(hook, "__name__", "")
    if wrap := _WRAPPERS.get(name):
        return wrap(adapt_torch_hook(inspect.getclosurevars(hook).nonlocals["hook"], group, own_groups))
    if name == "hook_then_optimizer_wrapper":
        return lambda state, bucket: hook(state, _View(bucket, gradients=lambda: gradients_of(bucket)))
    if hook not in (power_sgd.powerSGD_hook, power_sgd.batched_powerSGD_hook, *_QUANTIZING):
        return hook
    backend = _C.duplicate_backend(backend_of(group))
    own_groups.append(backend)
    dedicated = _HookGroup(group, backend)

    def group_for(given: dist.ProcessGroup | None) -> _HookGroup:
        given = given or distributed_c10d._get_default_group()
        return dedicated if given is group else _HookGroup(given, given)

    if hook in _QUANTIZING:
        return _SerializedHook(lambda given, bucket: hook(group_for(given), bucket))
    run: Hook = _batched_power_sgd if hook is power_sgd.batched_powerSGD_hook else power_sgd.powerSGD_hook
    return _SerializedHook(
        lambda state, bucket: run(_View(state, process_group=group_for(state.process_group)), bucket)
    )


class _HookGroup(_ProcessGroup):  # type: ignore[misc]
    """A process group for the operations of a hook, over a backend of the same ranks.

    A hook cannot use the model's own group: the model may have collectives in backward (SyncBatchNorm), and the order
    of these and of a hook's later operations differs between ranks.
    """

    def __init__(self, ranks: dist.ProcessGroup, backend: Backend | dist.ProcessGroup) -> None:
        super().__init__(ranks.rank(), ranks.size())
        self._backend: Any = backend

    def allreduce(self, tensors: list[Tensor], options: object) -> Any:
        return self._backend.allreduce(tensors, options)

    def allgather(self, outputs: object, inputs: list[Tensor], options: object) -> Any:
        """Gathers into one tensor, which is the value of the future, as with NCCL. The hooks read nothing else."""
        (tensor,) = inputs
        return self._backend._allgather_base(tensor.new_empty(self.size(), *tensor.shape), tensor)


class _View:
    """A bucket or a state of a hook with some of its attributes replaced."""

    def __init__(self, original: Any, **replaced: Any) -> None:
        vars(self).update(replaced, _original=original)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self._original, name, value)


class _SerializedHook:
    """Runs a hook for one bucket at a time.

    It is for hooks that start another operation when one has completed. All ranks must start these operations in the
    same order. Over NCCL such a callback runs at once, in the thread that calls the hook. Here it runs when the
    operation completes. By then, a rank may have started an operation of another bucket that the other ranks have not
    started.
    """

    def __init__(self, hook: Hook) -> None:
        self._hook = hook
        self._last: Future[Tensor] | None = None

    def __call__(self, state: object, bucket: GradBucket) -> Future[Tensor]:
        last, self._last = self._last, None
        if last is not None:
            last.wait()
        future: Future[Tensor] = self._hook(state, bucket)
        self._last = future
        return future


def _batched_power_sgd(state: Any, bucket: GradBucket) -> Future[Tensor]:
    """Runs PowerSGD on the whole bucket as one square matrix. torch's own batched hook fails, because its
    orthogonalization takes only three dimensions. It would also resize the bucket, whose memory the ranks of this host
    share.
    """
    flat = bucket.buffer()
    side = math.isqrt(max(flat.numel() - 1, 0)) + 1
    padded = F.pad(flat, (0, side**2 - flat.numel()))
    square = _View(bucket, buffer=lambda: padded, gradients=lambda: [padded.view(side, side)])
    future: Future[Tensor] = power_sgd.powerSGD_hook(state, square)  # type: ignore[arg-type]
    return future.then(lambda done: done.value()[: flat.numel()])
