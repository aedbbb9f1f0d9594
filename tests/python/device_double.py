"""The device of test_devices.py: "simulated", of tests/torch/device_double, for tests without a GPU.

Its memory cannot be reached by the CPU, its kernels run on streams, and memory that was released is overwritten.

With MUSTER_TEST_DEVICE=cuda, as `make gpu` sets it, the tests run on a GPU that all ranks share.
"""

from __future__ import annotations

import os
import types
from pathlib import Path

import torch

DEVICE = os.environ.get("MUSTER_TEST_DEVICE") or "simulated"
IS_DOUBLE = DEVICE == "simulated"
_ROOT = Path(__file__).resolve().parents[2]


def load() -> None:
    """Adds the device to torch, for the rest of this process."""
    if not IS_DOUBLE:
        # NCCL refuses two ranks on one GPU of one host.
        os.environ.setdefault("NCCL_HOSTID", f"rank{os.environ['RANK']}")
        return
    build = Path(os.environ.get("MUSTER_BUILD_DIR", _ROOT / "build/release"))
    torch.ops.load_library(str(build / "tests/torch/device_double/muster_device_double.so"))
    torch.utils.rename_privateuse1_backend(DEVICE)
    torch._register_device_module(DEVICE, types.ModuleType(DEVICE))


def set_kernel_delay(milliseconds: int) -> None:
    """How long each kernel of the double waits before it runs."""
    if not IS_DOUBLE:
        return
    torch.ops.muster_device_double.set_kernel_delay(milliseconds)


def set_copy_rate(bytes_per_second: int) -> None:
    """For measurements: copies between the double and the host take so long, move nothing, and need no core."""
    if IS_DOUBLE:
        torch.ops.muster_device_double.set_copy_rate(bytes_per_second)
