"""torch's communication hooks as they run here: some of those that come with torch expect NCCL's ways."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, quantization_hooks
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power_sgd

from muster import _C
from muster._group import all_gather_into, backend_of

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


def gradients_of(bucket: GradBucket) -> list[Tensor]:
    """In their parameters' memory formats, as they lie in the bucket: its own gradients() reads all row by row."""
    dense = torch.ops.aten.is_non_overlapping_and_dense
    pairs = zip(bucket.gradients(), bucket.parameters(), strict=True)
    return [each.as_strided(like.shape, like.stride()) if dense(like) else each for each, like in pairs]


def adapt(hook: Any, group: dist.ProcessGroup, own_groups: list[Backend]) -> Hook:
    """The hook, or what to call in its place for a model of that group. All its ranks must call. Groups that it is
    given are added to `own_groups`.
    """
    if wrap := _WRAPPERS.get(getattr(hook, "__name__", "")):
        return wrap(adapt(hook.__closure__[0].cell_contents, group, own_groups))
    if getattr(hook, "__name__", "") == "hook_then_optimizer_wrapper":
        return lambda state, bucket: hook(state, _InParametersFormats(bucket))
    if hook is power_sgd.batched_powerSGD_hook:
        hook = _with_globals(hook, _orthogonalize=_orthogonalize, dist=_Apart(group, own_groups))
        return _OneBucketAtATime(functools.partial(_with_own_buffer, hook))
    if hook is power_sgd.powerSGD_hook:
        return _OneBucketAtATime(_with_globals(hook, dist=_Apart(group, own_groups)))
    if hook in _QUANTIZING:
        return _OneBucketAtATime(_with_globals(hook, dist=_Apart(group, own_groups)))
    return hook  # type: ignore[no-any-return]


class _InParametersFormats:
    """A bucket for a hook that gives its gradients to an optimizer."""

    def __init__(self, bucket: GradBucket) -> None:
        self._bucket = bucket

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bucket, name)

    def gradients(self) -> list[Tensor]:
        return gradients_of(self._bucket)


class _OneBucketAtATime:
    """For hooks that begin another operation when one has ended, which all ranks have to do in the same order. Over
    NCCL such a callback runs at once, in the thread that calls the hook; here it runs when the operation is done, by
    when another bucket's may have been begun at one rank, and not yet at another.
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


def _with_own_buffer(hook: Hook, state: object, bucket: GradBucket) -> Future[Tensor]:
    """For a hook that resizes the bucket, whose memory the ranks of this host share."""
    bucket.set_buffer(bucket.buffer().clone())
    return hook(state, bucket)  # type: ignore[no-any-return]


class _Apart:
    """torch.distributed for such a hook, whose operations over the model's group go over another of the same ranks: the
    model may have collectives in backward (SyncBatchNorm), and which comes first, these or a callback's, differs by
    rank. The future of its all_gather() holds all ranks' parts in one tensor, as NCCL's does.
    """

    def __init__(self, group: dist.ProcessGroup, own_groups: list[Backend]) -> None:
        self._group = group
        self._own: Any = _C.duplicate_backend(backend_of(group))
        own_groups.append(self._own)

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    def all_reduce(self, tensor: Tensor, group: dist.ProcessGroup, async_op: bool) -> Any:
        if group is self._group:
            return self._own.allreduce([tensor])
        return dist.all_reduce(tensor, group=group, async_op=async_op)

    def all_gather(self, parts: list[Tensor], tensor: Tensor, group: dist.ProcessGroup, async_op: bool) -> Any:
        gathered = tensor.new_empty(len(parts), *tensor.shape)
        if group is self._group:
            return self._own._allgather_base(gathered, tensor)
        work = all_gather_into(gathered, tensor, group)
        return work if async_op else work.wait()


def _orthogonalize(matrices: Tensor) -> None:
    """torch's, which takes a stack of matrices; the batched hook gives it a single one."""
    orthogonalize: Any = power_sgd._orthogonalize
    orthogonalize(matrices if matrices.dim() == 3 else matrices.unsqueeze(0))


def _with_globals(hook: Any, **names: object) -> Hook:
    """A function of torch's that finds these under names of its module."""
    changed = types.FunctionType(hook.__code__, {**hook.__globals__, **names}, hook.__name__)
    changed.__defaults__ = hook.__defaults__
    return functools.update_wrapper(changed, hook)
