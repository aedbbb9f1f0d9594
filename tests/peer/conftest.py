"""Which of the peer's tests run: see test_distributed.py."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

LISTED = [
    line.split(maxsplit=1)
    for line in (Path(__file__).parent / "skipped.txt").read_text().splitlines()
    if line and not line.startswith("#")
]
SKIPPED: dict[str, str] = dict(LISTED)

# A test or two of each thing that c10d and DDP ask of a backend; by default no more than these.
QUICK = re.compile(
    "test_("
    "DistributedDataParallelCPU|stateless_api_with_ddp|static_graph_api_cpu|ddp_control_flow_.*|"
    "ddp_join_model_equivalence|"
    "all_gather(_coalesced_simple|_into_cat_tensor|_object_.*)?|"
    "all_reduce_(sum|product|coalesced_sum|sum_async|full_group_max)|sparse_all_reduce_sum|"
    "all_to_all(_single_(equal|unequal)_split)?|"
    "barrier(_group|_timeout_group)?|monitored_barrier_gloo(_subgroup)?|"
    "broadcast(_object_list)?|gather(_object|_checks)?|scatter(_checks|_object_list)?|"
    "reduce_(sum|max|full_group_sum)|reduce_scatter_tensor.*|"
    "send_recv(_with_tag|_any_source)?|isend.*|irecv|batch_isend_irecv_gloo(_tags)?|new_subgroups.*"
    ")$"
)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    names = {getattr(item, "originalname", item.name) for item in items}
    if os.environ.get("MUSTER_PEER") == "all":
        unknown = SKIPPED.keys() - names
        assert not unknown or config.option.keyword, f"skipped.txt lists tests that do not exist: {sorted(unknown)}"
    else:
        items[:] = [item for item in items if "TestMuster" not in item.nodeid or QUICK.match(item.name)]
    for item in items:
        if item.name in SKIPPED:
            item.add_marker(pytest.mark.skip(reason=SKIPPED[item.name]))
