"""Communication hooks in C++ for muster.nn.DistributedDataParallel: what is sent of gradients, for slow links.

    model = muster.nn.DistributedDataParallel(module)
    model.register_comm_hook(None, muster.hooks.int8())

They run without Python's lock, while backward goes on. All average in place and end with the same bits at all ranks; an
infinity or NaN of one rank is seen by all, so GradScaler works. They compress float32 gradients; those of other dtypes
are averaged as they are. All ranks must register the same hook with the same options, and some form a group then.
Options that cannot be are a ValueError where the hook is made.

What a hook loses of a step's gradients it adds to those of the next (error feedback), but for fp16 and bf16, which only
round. A changed loss scale (GradScaler) makes that one memory too large or small, once.
"""

from __future__ import annotations

from muster._C import NativeHook

__all__ = ["NativeHook", "all_reduce", "bf16", "fp16", "int8", "power_sgd", "top_k"]


def all_reduce() -> NativeHook:
    """What happens without a hook."""
    return NativeHook.all_reduce()


def fp16() -> NativeHook:
    """Gradients go as float16: half the bytes. Averages beyond 65504 become infinite."""
    return NativeHook.fp16()


def bf16() -> NativeHook:
    """Gradients go as bfloat16: half the bytes, 8 significant bits."""
    return NativeHook.bf16()


def int8(block: int = 256) -> NativeHook:
    """Gradients go as int8, with a float32 scale for each `block` elements (a multiple of 64): a quarter of the bytes.
    Each rank sums a part in float32; both roundings have error feedback.
    """
    return NativeHook.int8(block)


def top_k(ratio: float = 0.01) -> NativeHook:
    """Each rank sends the fraction `ratio` of a bucket's elements, those of greatest magnitude, at 8 bytes each, to all
    others; the rest waits in the error. Less than float32 as long as ratio * ranks is well below 1.
    """
    return NativeHook.top_k(ratio)


def power_sgd(rank: int = 2, start: int = 10, least_gain: float = 2, seed: int = 0) -> NativeHook:
    """Matrices go as two factors of rank `rank` (PowerSGD, Vogels et al. 2019), where that saves a factor of
    `least_gain`; everything else goes as it is. The first `start` steps are not compressed.
    """
    return NativeHook.power_sgd(rank, start, least_gain, seed)
