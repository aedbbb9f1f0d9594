"""torch.compile(backend="muster"): results, the planned order, and ranks that compile different graphs."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import subprocess
import unittest.mock
from datetime import timedelta
from pathlib import Path
from typing import Any

import muster.graph
import pytest
import torch
import torch.distributed as dist
from muster.graph._backend import options_of
from muster.graph._plan import costs
from muster.graph._plan.costs import Costs, LinkCosts
from ranks import run_ranks
from torch._dispatch.python import enable_python_dispatcher
from torch._inductor import config as inductor_config
from torch._inductor.utils import run_and_get_code
from torch._subclasses.fake_tensor import FakeTensorMode

import muster

SIDE = 64
LAYERS = 4
TIMEOUT = 400  # seconds: Inductor calls a C++ compiler, and the machine may be loaded


def gathered(x: torch.Tensor, shards: list[torch.Tensor]) -> torch.Tensor:
    """Each layer gathers its weights, as with FSDP."""
    for shard in shards:
        weights = shard.new_empty(SIDE, SIDE)
        dist.all_gather_into_tensor(weights, shard)
        x = torch.relu(x @ weights)
    return x


def inputs(rank: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    torch.manual_seed(rank)
    return torch.randn(SIDE, SIDE), [torch.randn(SIDE // 2, SIDE) / SIDE for _ in range(LAYERS)]


def order_of(code: str) -> str:
    """The kernels in Inductor's code: s for the start of a collective, w for a wait, m for a multiplication."""
    letters = {"all_gather_into_tensor.default(": "s", "exchange.default(": "s"}
    letters |= {"wait_tensor.default(": "w", "extern_kernels.mm(": "m"}
    found = re.findall("|".join(re.escape(each) for each in letters), code)
    return "".join(letters[each] for each in found)


def without_simple_overlap() -> Any:
    """From 2.15 on, torch itself begins a collective earlier where it expects to gain from it, by times that it
    measures. Without this, two compilations of one graph may differ.
    """
    if hasattr(inductor_config.aten_distributed_optimizations, "enable_simple_overlap"):
        return inductor_config.patch({"aten_distributed_optimizations.enable_simple_overlap": False})
    return contextlib.nullcontext()


def plan_layers(rank: int) -> list[str]:
    torch.set_num_threads(1)
    x, shards = inputs(rank)
    expected = gathered(x, shards)
    orders = []
    for backend, plans in (
        ("inductor", False),
        (muster.graph.backend(muster.graph.Config(buckets=False)), True),
        (muster.graph.backend(muster.graph.Config(buckets=False, overlap=False)), False),
        (muster.graph.backend(muster.graph.Config(buckets=False, max_bytes=2 * SIDE * SIDE * 4)), True),
    ):
        torch._dynamo.reset()
        with contextlib.nullcontext() if plans else without_simple_overlap():
            result, codes = run_and_get_code(torch.compile(gathered, backend=backend, fullgraph=True), x, shards)
        torch.testing.assert_close(result, expected)
        orders.append(order_of(codes[0]))
    return orders


def test_collectives_begin_early_and_are_awaited_late(tmp_path: Path) -> None:
    env = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "TORCHINDUCTOR_FX_GRAPH_CACHE": "0"}
    for default, planned, unplanned, bounded in run_ranks(2, plan_layers, env=env, timeout=TIMEOUT):
        assert planned == "sssswmwmwmwm"
        assert unplanned == default == "swm" * LAYERS
        assert bounded[:4] in ("sswm", "sssw")


def plan_messages(rank: int) -> str:
    torch.set_num_threads(1)

    def step(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        received = torch.empty_like(x)
        ops = [dist.P2POp(dist.isend, x, 1 - rank), dist.P2POp(dist.irecv, received, 1 - rank)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        return received @ x @ x @ x, x @ x

    x = torch.eye(SIDE) * (rank + 2)
    result, codes = run_and_get_code(torch.compile(step, backend="muster", fullgraph=True), x)
    torch.testing.assert_close(result, step(x))
    return order_of(codes[0])


def test_messages_are_awaited_late() -> None:
    first, second = run_ranks(2, plan_messages, timeout=TIMEOUT)
    assert first == second
    assert first.startswith("smw"), first  # the product that needs no message, then what waits for one


def train(rank: int) -> None:
    torch.set_num_threads(1)
    group = dist.group.WORLD
    x, shards = inputs(rank)

    def step(x: torch.Tensor, shards: list[torch.Tensor]) -> torch.Tensor:
        for shard in shards:
            weights = muster.graph.all_gather_into_tensor_uneven(shard, [SIDE // 2] * 2, group)
            x = torch.relu(x @ weights)
        return x.square().mean()

    gradients = []
    for function in (step, torch.compile(step, backend="muster", fullgraph=True)):
        leaves = [shard.clone().requires_grad_() for shard in shards]
        function(x, leaves).backward()
        gradients.append([leaf.grad for leaf in leaves])
    torch.testing.assert_close(gradients[1], gradients[0])


def profile_a_plan(rank: int) -> None:
    torch.set_num_threads(1)
    x, shards = inputs(rank)
    backend = muster.graph.backend(muster.graph.Config(buckets=False))
    compiled = torch.compile(gathered, backend=backend, fullgraph=True)
    compiled(x, shards)
    with torch.profiler.profile() as profile:
        compiled(x, shards)
    if rank == 0:
        profile.export_chrome_trace(os.environ["PROFILE"])


def test_a_plan_is_explained_beside_a_measured_step(muster: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    env = {"MUSTER_GRAPH_PLANS": str(tmp_path / "plans"), "PROFILE": str(tmp_path / "profile.json")}
    run_ranks(2, profile_a_plan, env=env, timeout=TIMEOUT)
    (plan,) = (tmp_path / "plans").iterdir()
    command = [muster, "explain", "graph", str(plan), "--measured", env["PROFILE"], "-o", str(trace)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith(f"{LAYERS} collectives, ")
    assert re.match(r"all_gather_into_tensor +test_graph_backend.py:\d+ +16.0 KiB", lines[-1])
    spans = [each for each in json.loads(trace.read_text())["traceEvents"] if each["ph"] == "X"]
    assert {each["pid"] for each in spans} == {0, 1, 2}, "Inductor's order, planned, measured"
    wait = next(each for each in spans if each["pid"] == 2 and each["cat"] == "wait")
    assert wait["dur"] > 0


def test_gradients_are_those_without_a_graph() -> None:
    run_ranks(2, train, timeout=TIMEOUT)


def differ(rank: int, cpp_wrapper: bool) -> None:
    @torch.compile(backend="muster", fullgraph=True)
    def step(x: torch.Tensor) -> torch.Tensor:
        if rank == 0:
            dist.all_reduce(x)
        else:
            dist.broadcast(x, 0)
        return x * 2

    source = r"\(\[4\], at test_graph_backend.py:\d+\)"
    message = rf"0 of group 0 is all_reduce sum of 4 float32 {source} at rank 0, and broadcast of 4 float32 {source} at"
    with torch._inductor.config.patch(cpp_wrapper=cpp_wrapper), pytest.raises(Exception, match=message):
        step(torch.ones(4))


@pytest.mark.parametrize("cpp_wrapper", [False, True])
def test_ranks_that_compile_other_collectives_get_an_error(cpp_wrapper: bool) -> None:
    run_ranks(2, differ, cpp_wrapper, timeout=TIMEOUT)


def differ_in_shape(rank: int) -> None:
    @torch.compile(backend="muster", fullgraph=True)
    def step(x: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(x)
        return x * 2

    message = (
        r"is all_reduce sum of 4 float32 \(\[4\], at .*\) at rank 0, and all_reduce sum of 6 float64 \(\[2, 3\], at"
    )
    with pytest.raises(Exception, match=message):
        step(torch.ones(4) if rank == 0 else torch.ones(2, 3, dtype=torch.float64))


def test_ranks_whose_tensors_differ_get_an_error() -> None:
    run_ranks(2, differ_in_shape, timeout=TIMEOUT)


def send_between_two(rank: int) -> None:
    """Only ranks 0 and 1 of the default group compile. Then the first two ranks compile two graphs, the others one."""
    torch.set_num_threads(1)
    config = muster.graph.Config(timeout=timedelta(seconds=60))
    backend = muster.graph.backend(config)
    stages = [dist.new_group([0, 1]), dist.new_group([2, 3])]

    def message(x: torch.Tensor) -> torch.Tensor:
        received = torch.zeros_like(x)
        if rank == 0:
            dist.send(x + 1, 1)
        else:
            dist.recv(received, 0)
        return received * 2

    if rank < 2:
        result = torch.compile(message, backend=backend, fullgraph=True)(torch.ones(4))
        assert result.tolist() == [4.0 * rank] * 4

    def first_stage(x: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(x, group=stages[0])
        dist.send(x, rank + 2)
        return x

    def second_stage(x: torch.Tensor) -> torch.Tensor:
        dist.recv(x, rank - 2)
        dist.all_reduce(x, group=stages[1])
        return x

    if rank < 2:
        torch.compile(first_stage, backend=backend, fullgraph=True)(torch.ones(4))
        torch.compile(first_stage, backend=backend, fullgraph=True)(torch.ones(5, 2))
    else:
        compiled = torch.compile(second_stage, backend=backend, fullgraph=True)
        assert compiled(torch.zeros(4)).tolist() == [4.0] * 4
        received = torch.zeros(5, 2)
        dist.recv(received, rank - 2)
        assert received.tolist() == [[2.0] * 2] * 5


def test_ranks_that_exchange_no_message_need_not_compile() -> None:
    run_ranks(4, send_between_two, timeout=TIMEOUT)


def measure(rank: int) -> Costs:
    """Each rank measures something else."""
    rate = float(2 ** (10 + rank))
    with (
        unittest.mock.patch.object(costs, "_measure_machine", lambda: (rate, rate)),
        unittest.mock.patch.object(costs, "_measure_links", lambda group: (1 / rate, rate, 1.0)),
    ):
        return costs.costs_of([dist.group.WORLD])


def test_all_ranks_use_the_costs_that_rank_0_measures() -> None:
    first, *others = run_ranks(3, measure)
    assert first == Costs(1024.0, 1024.0, {"0": LinkCosts(1 / 1024, 1024.0, 3)})
    assert others == [first, first]


def count_misses(rank: int) -> list[int]:
    """Of Inductor's cache, for each option."""
    torch.set_num_threads(1)
    x, shards = inputs(rank)
    shards = [torch.cat([shard, shard]) for shard in shards]
    config = muster.graph.Config()
    changed: list[dict[str, Any]] = [
        {},
        {},
        {"overlap": False},
        {"buckets": False},
        {"chunks": False},
        {"max_bytes": 9},
    ]
    misses = []
    for change in changed:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        backend = muster.graph.backend(dataclasses.replace(config, **change))
        torch.compile(gathered, backend=backend, fullgraph=True)(x, shards)
        misses.append(torch._dynamo.utils.counters["inductor"]["fxgraph_cache_miss"])
    return misses


def test_an_option_is_part_of_the_key_of_inductors_cache(tmp_path: Path) -> None:
    env = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "TORCHINDUCTOR_FX_GRAPH_CACHE": "1"}
    assert run_ranks(1, count_misses, env=env, timeout=TIMEOUT) == [[1, 0, 1, 1, 1, 1]]


def compile_alone(rank: int) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(x)
        return x * 2

    config = muster.graph.Config(timeout=timedelta(seconds=30))
    compiled = torch.compile(step, backend=muster.graph.backend(config), dynamic=False)
    assert compiled(torch.ones(4)).tolist() == [4.0] * 4
    if rank == 1:
        with pytest.raises(Exception, match=r"rank 0 of group \w+ has not compiled the graph that rank 1 compiles"):
            compiled(torch.ones(5))
    dist.barrier()
    assert compiled(torch.ones(6)).tolist() == [4.0] * 6, "the ranks can compile together again"


def test_a_rank_that_compiles_alone_gets_an_error() -> None:
    run_ranks(2, compile_alone, timeout=TIMEOUT)


def measure_while_compiling(rank: int) -> None:
    """As Inductor does: its dispatcher would keep the GIL in each collective."""
    compiling = torch._C.DispatchKey.PythonDispatcher
    seen = []
    group = dist.group.WORLD.group_name  # type: ignore[union-attr]
    graph = torch.fx.symbolic_trace(lambda x: torch.ops._c10d_functional.all_reduce.default(x, "sum", group))

    def broadcast(*arguments: Any, **named: Any) -> Any:
        seen.append(torch._C._dispatch_tls_is_dispatch_key_included(compiling))
        return dist.distributed_c10d.broadcast(*arguments, **named)

    with (
        unittest.mock.patch.object(dist, "broadcast", broadcast),
        enable_python_dispatcher(),
        FakeTensorMode(),
    ):
        assert torch._C._dispatch_tls_is_dispatch_key_included(compiling)
        options_of([dist.group.WORLD], muster.graph.Config(), graph)
    assert seen == [False]


def test_collectives_that_measure_do_not_keep_the_gil() -> None:
    run_ranks(2, measure_while_compiling, timeout=TIMEOUT)


def many(xs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Small collectives of three kinds: independent ones, and two that need others."""
    outputs = []
    for index, x in enumerate(xs):
        reduced = x * index
        dist.all_reduce(reduced)
        gathered = x.new_empty(2 * len(x))
        dist.all_gather_into_tensor(gathered, x + index)
        scattered = x.new_empty(len(x) // 2)
        dist.reduce_scatter_tensor(scattered, x - index)
        outputs += [reduced + 1, gathered * 2, scattered]
    last = outputs[0] * outputs[3]
    dist.all_reduce(last)
    again = last + 1
    dist.all_reduce(again)
    return [*outputs, last, again]


def merge_small(rank: int) -> list[str]:
    torch.set_num_threads(1)
    xs = [torch.arange(8.0) + 10 * rank + index for index in range(5)]
    expected = many(xs)
    result, codes = run_and_get_code(torch.compile(many, backend="muster", fullgraph=True), xs)
    torch.testing.assert_close(result, expected)
    operators = re.findall(r"torch\.ops\.(?:_c10d_functional|muster)\.(\w+?)_?\.default\(", codes[0])
    return [operator for operator in operators if operator != "wait_tensor"]


def test_small_collectives_are_merged() -> None:
    for operators in run_ranks(2, merge_small, timeout=TIMEOUT):
        assert sorted(operators) == ["all_gather_into_tensor", *["all_reduce"] * 3, "reduce_scatter_tensor"]


def branch_by_rank(rank: int) -> None:
    """Rank 0 sends what rank 1 receives, and computes more before its first reduction."""
    torch.set_num_threads(1)

    def step(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        first, second, received = x * 2, x * 3, torch.zeros_like(x)
        if rank == 0:
            for _ in range(4):
                first = first @ x / SIDE
            dist.send(x, 1)
        else:
            dist.recv(received, 0)
        dist.all_reduce(first)
        dist.all_reduce(second)
        return first, second, received

    x = torch.ones(SIDE, SIDE) + rank
    config = muster.graph.Config(buckets=False)
    compiled = torch.compile(step, backend=muster.graph.backend(config), fullgraph=True)
    torch.testing.assert_close(compiled(x), step(x))


def test_ranks_that_differ_keep_the_order_of_collectives() -> None:
    run_ranks(2, branch_by_rank, timeout=TIMEOUT)


def compile_in_parts(rank: int) -> None:
    torch.set_num_threads(1)
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    first, second = mesh.get_group("a"), mesh.get_group("b")

    def step(x: torch.Tensor) -> Any:
        y = x * 2
        dist.all_reduce(x, group=first)
        dist.all_reduce(y, group=second)
        return x @ y

    x = torch.ones(8, 8) * (rank + 1)
    expected = step(x.clone())
    torch.testing.assert_close(torch.compile(step, backend="muster", fullgraph=True)(x.clone()), expected)


def test_graphs_with_several_groups() -> None:
    run_ranks(4, compile_in_parts, timeout=TIMEOUT)
