# ruff: noqa: N803 (names of torch's PowerSGDState)
"""Communication hooks in C++ for muster.nn.DistributedDataParallel: they compress gradients for slow links.

    model = muster.nn.DistributedDataParallel(module)
    model.register_comm_hook(None, muster.hooks.int8())

They run without the GIL, while backward continues. They average in place, and the result has the same bits at all
ranks. They compress on the CPU: gradients on a device are copied to the host and back. An infinity or NaN of one rank
reaches all ranks, so GradScaler works. They compress float32 gradients; gradients of other dtypes are averaged
uncompressed. All ranks must register the same hook with the same options; some hooks form a group then. Wrong options
raise ValueError where the hook is created.

A hook keeps the error of a step's compression, and adds it to the gradients of the next step (error feedback). fp16
and bf16 only round, and have no error feedback. When the loss scale changes (GradScaler), the kept error has the wrong
scale for one step.
"""

from __future__ import annotations

from muster._C import NativeHook
from muster._deprecated import renamed_arguments

__all__ = ["NativeHook", "all_reduce", "bf16", "fp16", "int8", "power_sgd", "top_k"]


def all_reduce() -> NativeHook:
    """Averages uncompressed, as without a hook."""
    return NativeHook.all_reduce()


def fp16() -> NativeHook:
    """Sends gradients as float16: half the bytes. Averages beyond 65504 become infinite."""
    return NativeHook.fp16()


def bf16() -> NativeHook:
    """Sends gradients as bfloat16: half the bytes, 8 significant bits."""
    return NativeHook.bf16()


def int8(block: int = 256) -> NativeHook:
    """Sends gradients as int8, with a float32 scale for each `block` elements (a multiple of 64): a quarter of the
    bytes. Each rank sums a part in float32. Both roundings have error feedback.
    """
    return NativeHook.int8(block)


def top_k(ratio: float = 0.01) -> NativeHook:
    """Each rank sends the share `ratio` of a bucket's elements to all others, at 8 bytes each: the elements of
    greatest magnitude. The rest stays in the error feedback. This sends less than float32 while ratio * ranks is well
    below 1.
    """
    return NativeHook.top_k(ratio)


@renamed_arguments(start="start_powerSGD_iter", least_gain="min_compression_rate")
def power_sgd(
    rank: int = 2, start_powerSGD_iter: int = 10, min_compression_rate: float = 2, seed: int = 0
) -> NativeHook:
    """Sends matrices as two factors of rank `rank` (PowerSGD, Vogels et al. 2019) if that divides their bytes by at
    least `min_compression_rate`. Sends everything else uncompressed. Does not compress the first
    `start_powerSGD_iter` steps.
    """
    return NativeHook.power_sgd(rank, start_powerSGD_iter, min_compression_rate, seed)
