"""The device of test_devices.py: "simulated", of tests/torch/device_double, for tests without a GPU.

Its memory cannot be reached by the CPU, its kernels run on streams, and memory that was released is overwritten.

With MUSTER_TEST_DEVICE=cuda, as `make gpu` sets it, the tests run on a GPU that all ranks share.
"""

from __future__ import annotations

import ctypes
import os
import types
from pathlib import Path

import muster._backend
import torch
import torch.distributed as dist

DEVICE = os.environ.get("MUSTER_TEST_DEVICE") or "simulated"
IS_DOUBLE = DEVICE == "simulated"
# muster for tensors of the CPU, and the device's own backend for those of the device. That of the double has the name
# of an NPU's.
MIXED = "cpu:muster,simulated:hccl" if IS_DOUBLE else f"cpu:muster,{DEVICE}:nccl"
_ROOT = Path(__file__).resolve().parents[2]


def load() -> None:
    """Adds the device to torch, for the rest of this process."""
    if not IS_DOUBLE:
        # NCCL refuses two ranks on one GPU of one host.
        os.environ.setdefault("NCCL_HOSTID", f"rank{os.environ['RANK']}")
        return
    build = Path(os.environ.get("MUSTER_BUILD_DIR", _ROOT / "build/release"))
    library = str(build / "tests/torch/device_double/muster_device_double.so")
    torch.ops.load_library(library)
    ctypes.CDLL(library, ctypes.RTLD_GLOBAL)  # as torch makes the functions of CUDA visible
    torch.utils.rename_privateuse1_backend(DEVICE)
    torch._register_device_module(DEVICE, _module())
    dist.Backend.register_backend("hccl", muster._backend.create, extended_api=True, devices=[DEVICE])


def _module() -> types.ModuleType:
    """torch.simulated, with what FSDP needs of it."""
    module = types.ModuleType(DEVICE)
    vars(module).update(
        Stream=lambda priority=0: torch.Stream(device=DEVICE, priority=priority),
        Event=lambda: torch.Event(DEVICE),
        stream=lambda stream: stream,
        current_stream=torch.accelerator.current_stream,
        current_device=torch.accelerator.current_device_index,
        device_count=lambda: 2,
        is_available=lambda: True,
        is_initialized=lambda: True,
    )
    return module


def set_kernel_delay(milliseconds: int) -> None:
    """How long each kernel of the double waits before it runs."""
    if not IS_DOUBLE:
        return
    torch.ops.muster_device_double.set_kernel_delay(milliseconds)


def used_bytes() -> int:
    """Of the device's memory."""
    return torch.ops.muster_device_double.used_bytes() if IS_DOUBLE else torch.accelerator.memory_allocated()


def set_copy_rate(bytes_per_second: int) -> None:
    """For measurements: copies between the double and the host take so long, move nothing, and need no core."""
    if IS_DOUBLE:
        torch.ops.muster_device_double.set_copy_rate(bytes_per_second)
