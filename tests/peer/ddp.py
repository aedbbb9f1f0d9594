"""Rewrites torch's tests of DistributedDataParallel to test that of muster.nn.

Most of them require GPUs, but test nothing that depends on a GPU. Here they run on the CPU.
"""

from __future__ import annotations

import functools
import inspect
import re
from typing import Any

import muster.nn

# Replacements in the source of torch's tests, by pattern.
REWRITES = {
    r"from torch.nn.parallel import DistributedDataParallel(?=\n)": "from peer.ddp import *",
    r"(torch\.)?nn\.parallel\.DistributedDataParallel": "DistributedDataParallel",
    r"@skip_if_lt_x_gpu\((\d|int\(os.environ\[.WORLD_SIZE.\]\))\)": "@unchanged",
    r"\.cuda\(([^()]|\([^()]*\))*\)": "",
    r"torch\.cuda\.(set_device|synchronize|manual_seed)\(": "ignore(",
    r"torch\.cuda\.current_device\(\)": '"cpu"',
    r"\bdevice=((self\.)?(rank|device_id)\b|\"cuda\")": 'device="cpu"',
    r"\.to\((self\.)?(rank|device_id)\)": '.to("cpu")',
    r"@skip_if_no_gpu(?=\n)": "@unchanged",
    r"backend_feature\[\"cuda\"\]": 'backend_feature["ddp"]',
    r"torch\.device\((rank|f\"cuda:{rank:d}\")\)": '"cpu"',
    r"rank_to_GPU\[int\(r\)\]\[0\]": "int(r)",
    r"list\(rank_to_GPU\[rank\]\)": "[0]",
    r"\bdevice = self\.rank(?=\n)": 'device = "cpu"',
    r"\.device\.index, self\.rank": '.device.type, "cpu"',
    r"(torch\.)?nn\.SyncBatchNorm\b(?=[.(])": "SyncBatchNorm",
    r"\bdim = 1000(?=\n)": "dim = 100",  # of images that are convolved about 500 times: less work
    # muster names the parameters without gradients at every debug level.
    r"dist\.get_debug_level\(\) == dist\.DebugLevel\.OFF": "False",
}


def rewrite(source: str) -> str:
    for pattern, replacement in REWRITES.items():
        # Lines keep their numbers, by which Python finds a test's source.
        source, count = re.subn(pattern, functools.partial(_replace, replacement), source)
        if count == 0:
            raise AssertionError(f"the tests of this torch have no {pattern!r} any more: mend REWRITES in {__file__}")
    return source


def _replace(replacement: str, match: re.Match[str]) -> str:
    return match.expand(replacement) + "\n" * match[0].count("\n")


_ABOUT_DDP = re.compile("DistributedDataParallel|DDP|ddp_|_ddp")


def leave_about_ddp(test_case: type) -> None:
    """Removes the tests that never construct a DistributedDataParallel."""
    for name, test in inspect.getmembers(test_case, inspect.isfunction):
        if name.startswith("test_") and _ABOUT_DDP.search(inspect.getsource(inspect.unwrap(test))) is None:
            setattr(test_case, name, None)


SyncBatchNorm = muster.nn.SyncBatchNorm


def unchanged(test: Any) -> Any:
    return test


def ignore(*_: Any, **__: Any) -> None:
    """Replaces calls that concern GPUs."""


class DistributedDataParallel(muster.nn.DistributedDataParallel):
    """muster.nn's, with torch's default where muster has another one, and without devices."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        for name in ("device_ids", "output_device"):
            kwargs.pop(name, None)
        kwargs.setdefault("gradient_as_bucket_view", False)
        super().__init__(*args, **kwargs)


class OfViews(DistributedDataParallel):
    """The same with muster's default: gradients are views of the buckets unless a test says otherwise."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("gradient_as_bucket_view", True)
        super().__init__(*args, **kwargs)
