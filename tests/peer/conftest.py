"""Selects which of PyTorch's tests run: see the docstrings of the test files."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from _pytest.runner import runtestprotocol


def _skipped(file: str) -> dict[str, str]:
    """The reason for each test that is skipped, by the test's name."""
    lines = (Path(__file__).parent / file).read_text().splitlines()
    return dict(line.split(maxsplit=1) for line in lines if line and not line.startswith("#"))


SKIPPED = {
    "test_distributed.py": _skipped("skipped.txt"),
    "test_ddp.py": _skipped("skipped_ddp.txt"),
    "test_ddp_views.py": _skipped("skipped_ddp_views.txt"),
    "test_rpc_native.py": _skipped("skipped_rpc_native.txt"),
}

# torch loses the events of a remote function if its result arrives quickly: with TensorPipe in 184 of 200 calls, after
# the first one. Its tests of that make one call. They pass when they are repeated.
REPEATED = re.compile("profiler")
REPEATS = 40

# One or two tests of each feature of a backend that c10d and DDP use. By default only these run.
QUICK = {
    "test_distributed.py": "test_("
    "DistributedDataParallelCPU|stateless_api_with_ddp|static_graph_api_cpu|ddp_control_flow_.*|"
    "ddp_join_model_equivalence|"
    "all_gather(_coalesced_simple|_into_cat_tensor|_object_.*)?|"
    "all_reduce_(sum|product|coalesced_sum|sum_async|full_group_max)|sparse_all_reduce_sum|"
    "all_to_all(_single_(equal|unequal)_split)?|"
    "barrier(_group|_timeout_group)?|monitored_barrier_gloo(_subgroup)?|"
    "broadcast(_object_list)?|gather(_object|_checks)?|scatter(_checks|_object_list)?|"
    "reduce_(sum|max|full_group_sum)|reduce_scatter_tensor.*|"
    "send_recv(_with_tag|_any_source)?|isend.*|irecv|batch_isend_irecv_gloo(_tags)?|new_subgroups.*"
    ")$",
    "test_ddp.py": "test_("
    "DistributedDataParallelCPU_grad_is_view|DistributedDataParallel_SyncBatchNorm_half|ddp_apply_optim_in_backward|"
    "ddp_broadcast_buffer|ddp_control_flow_same_across_ranks|ddp_join_model_equivalence|"
    "ddp_multiple_nested_unused_params_error|ddp_native_mixed_precision_grad_as_bucket_view_no_set_grad_none|"
    "ddp_static_graph_nested_types|invalid_static_graph"
    ")$",
    "test_ddp_views.py": "test_("
    "ddp_hook_parity_powerSGD|ddp_join_model_equivalence|ddp_new_tensor_in_fwd|"
    "ddp_shared_grad_acc_unused_params|ddp_zero_output_features|grads_same_across_ranks_with_no_sync|"
    "output_unused_in_loss_dict_module|post_localSGD_optimizer_parity|undefined_grad_parity_unused_parameters"
    ")$",
    "test_rpc.py": "test_("
    "(self_)?add|async_(add|method)|nested_rpc|rpc_timeouts|default_timeout_used|(py|builtin)_remote_ret|"
    "rref_leak|nested_rref|rref_proxy_.*|pass_local_rrefs|shutdown_errors|send_to_rank|non_cont_tensors|duplicate_name|"
    "batch_updating_parameter_server|backward_(simple|multiple_roots|different_dtypes)|context_cleanup_.*|dist_optim|"
    "ddp_(comparison|dist_autograd_local_vs_remote)|forward_(sync|async)|rl_rpc|torchscript_function|"
    "sparse_.*"
    ")$",
    "test_rpc_native.py": "test_("
    "(self_)?add|async_function_(nested|multi_fanout_remote)|nested_rpc(_sparse)?|rpc_timeouts|nested_rref|"
    "rref_proxy_(class|timeout)|pass_local_rrefs|handle_send_exceptions|reinit|"
    "dynamic_rpc_init_rpc|py_sparse_tensors_in_container|batch_updating_parameter_server|rl_rpc|"
    "backward_(multiple_roots|node_failure|rref_nested)|context_cleanup_nested_rpc|async_dist_autograd|dist_optim|"
    "ddp_(comparison|dist_autograd_local_vs_remote)|forward_(sync|async)|remote_parameters"
    ")$",
}


@pytest.fixture(autouse=True)
def _groups_of_muster(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """DDP in the tests of RPC uses muster's process groups. The destructor of Gloo's waits for Gloo's thread while it
    holds the GIL. That thread waits for the GIL if it has just ended a collective and drops the last reference to a
    tensor. Then both wait forever.
    """
    if request.path.name in ("test_rpc.py", "test_rpc_native.py"):
        monkeypatch.setenv("MUSTER_REPLACE", "gloo")


def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    if item.path.name != "test_rpc.py" or not REPEATED.search(item.name):
        return None
    for _ in range(REPEATS):
        reports = runtestprotocol(item, log=False, nextitem=nextitem)
        if not any(report.failed for report in reports):
            break
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    return True


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if os.environ.get("MUSTER_PEER") == "all":
        _check_lists(config, items)
    else:
        items[:] = [item for item in items if item.path.name not in QUICK or _is_quick(item)]
    for item in items:
        if item.path.name in QUICK:
            item.add_marker(pytest.mark.slow)
        reason = SKIPPED.get(item.path.name, {}).get(item.name)
        if reason is not None and "TestMuster" in item.nodeid:
            item.add_marker(pytest.mark.skip(reason=reason))


def _is_quick(item: pytest.Item) -> bool:
    return "TestMuster" not in item.nodeid or re.match(QUICK[item.path.name], item.name) is not None


def _check_lists(config: pytest.Config, items: list[pytest.Item]) -> None:
    for file in {item.path.name for item in items} & SKIPPED.keys():
        unknown = SKIPPED[file].keys() - {item.name for item in items if item.path.name == file}
        assert not unknown or config.option.keyword, f"tests are to be skipped that do not exist: {sorted(unknown)}"
