"""A rank of test_nccl.py: runs PyTorch's test_c10d_ops_nccl.py over muster, on the device and over the NCCL of the
tests. Prints what rank_results.py has.

Usage: muster run -m peer.nccl_rank FILE
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import device_double
import torch
import torch.distributed as dist
from torch.testing._internal.common_utils import TestCase

from peer import rank_results

# The names of CUDA, and what asks for a GPU or for torch's own NCCL.
_REPLACED = {
    "c10d.is_nccl_available()": "True",
    "@requires_nccl()": "",
    '@skip_but_pass_in_sandcastle_if(not TEST_MULTIGPU, "NCCL test requires 2+ GPUs")': "",
    'init_multigpu_helper(self.world_size, "nccl")': "{rank: [rank] for rank in range(self.world_size)}",
    "(MultiProcContinousTest)": "(OneRank)",
    ".cuda(": f".{device_double.DEVICE}(",
    'f"cuda:': f'f"{device_double.DEVICE}:',
    "torch.cuda.": "cuda.",
    "xs[0] += 0.0": "xs[0].copy_(xs[0])",  # other operators of the device of the tests cannot be captured
    "    def test_sparse": "    def without_sparse",  # it has no sparse tensors
    # muster's errors
    'ValueError, "Cannot use " + err + " with NCCL"': 'NotImplementedError, "NCCL"',
    '"output tensor size must be equal to world_size times input tensor size"': '"2 ranks with . elements each need"',
    '"input tensor must be the same size as output size times world size"': '"2 ranks with . elements each need"',
    '"invalid root rank"': '"out of range for a group of 2 ranks"',
    'TypeError, "output tensor must have the same type as input tensor"': 'ValueError, "dtype"',
    'TypeError, "input tensor must be the same type as the output tensor."': 'ValueError, "dtype"',
}


@contextlib.contextmanager
def _capturing(graph: torch.accelerator.Graph) -> Iterator[None]:
    torch.accelerator.synchronize()
    with torch.Stream(device=device_double.DEVICE):
        graph.capture_begin()
        try:
            yield
        finally:
            graph.capture_end()


# torch.cuda of the tests.
_CUDA = types.SimpleNamespace(
    CUDAGraph=torch.accelerator.Graph,
    device=torch.accelerator.device_index,
    device_count=dist.get_world_size,
    empty_cache=lambda: None,
    graph=_capturing,
    nccl=types.SimpleNamespace(version=lambda: (2, 27, 0)),
    set_device=torch.accelerator.set_device_index,
    synchronize=lambda device: torch.accelerator.synchronize(torch.device(device)),
)


class OneRank(TestCase):
    """torch's MultiProcContinuousTest, in a rank that has been started."""

    rank: int
    world_size: int
    pg: Any

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        cls.rank, cls.world_size = dist.get_rank(), dist.get_world_size()
        cls.pg = dist.group.WORLD


def load(file: Path) -> Any:
    source = file.read_text()
    for old, new in _REPLACED.items():
        if old not in source:
            raise AssertionError(f"{file} has no {old!r} any more: mend {__file__}")
        source = source.replace(old, new)
    source = source.replace("    MultiProcContinousTest,\n", "")
    module = types.ModuleType("nccl_ops")
    vars(module).update(OneRank=OneRank, cuda=_CUDA)
    exec(compile(source, file, "exec", dont_inherit=True), vars(module))
    return module


def main() -> None:
    device_double.load()
    torch.utils.generate_methods_for_privateuse1_backend()
    dist.init_process_group("muster")
    torch.accelerator.set_device_index(dist.get_rank())
    rank_results.run(load(Path(sys.argv[1])).ProcessGroupNCCLOpTest, ".*")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
