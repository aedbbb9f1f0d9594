"""Tests the c10d backend over real processes: every operation, dtype and kind of failure."""

from __future__ import annotations

import os
import pickle
import re
import signal
import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch._C._distributed_c10d import Backend

INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
COMPLEX = [torch.complex64, torch.complex128]
FLOAT8 = [torch.float8_e5m2, torch.float8_e4m3fn]
COUNTS = [0, 1, 7, 4099]
Op = dist.ReduceOp
Options = Backend.Options


def values(rank: int, count: int) -> torch.Tensor:
    """Small whole numbers, whose products are exact in every dtype."""
    return (torch.arange(count) + rank) % 3 + 1


def combined(op: Op.RedOpType, size: int, count: int) -> torch.Tensor:
    stack = torch.stack([values(rank, count) for rank in range(size)])
    if op == Op.SUM:
        return stack.sum(0)
    if op == Op.AVG:
        return stack.sum(0) / size
    if op == Op.PRODUCT:
        return stack.prod(0)
    if op == Op.MIN:
        return stack.amin(0)
    if op == Op.MAX:
        return stack.amax(0)
    result = stack[0]
    for row in stack[1:]:
        result = {Op.BAND: torch.bitwise_and, Op.BOR: torch.bitwise_or, Op.BXOR: torch.bitwise_xor}[op](result, row)
    return result


def check_all_reduce(rank: int, size: int, dtype: torch.dtype, op: Op.RedOpType) -> None:
    for count in COUNTS:
        data = values(rank, count).to(dtype)
        dist.all_reduce(data, op=op)
        expected = combined(op, size, count)
        if dtype in INTEGERS:
            expected = expected.to(torch.int64)  # integers round towards zero
        torch.testing.assert_close(
            data.to(torch.complex128), expected.to(dtype).to(torch.complex128), msg=f"{dtype} {op} {count}"
        )


def all_reduce_everything(rank: int, size: int) -> None:
    arithmetic = [Op.SUM, Op.AVG, Op.PRODUCT]
    for dtype in INTEGERS:
        for op in [*arithmetic, Op.MIN, Op.MAX, Op.BAND, Op.BOR, Op.BXOR]:
            check_all_reduce(rank, size, dtype, op)
    for dtype in FLOATS:
        for op in [*arithmetic, Op.MIN, Op.MAX]:
            check_all_reduce(rank, size, dtype, op)
    for dtype in COMPLEX:
        for op in [Op.SUM, Op.AVG]:  # torch itself rejects the others
            check_all_reduce(rank, size, dtype, op)
    flags = torch.tensor([False, True, rank == 0])
    dist.all_reduce(flags, op=Op.BAND)
    assert flags.tolist() == [False, True, size == 1]


@pytest.mark.parametrize("size", [1, 3])
def test_all_reduce_combines_every_dtype_with_every_operation(size: int) -> None:
    run_ranks(size, all_reduce_everything, size)


def move_everything(rank: int, size: int) -> None:
    for dtype in [*INTEGERS, *FLOATS, *COMPLEX, *FLOAT8, torch.bool]:
        for count in COUNTS:
            mine = values(rank, count).to(dtype)
            rows = [values(r, count).to(dtype) for r in range(size)]

            data = mine.clone()
            dist.broadcast(data, src=size - 1)
            assert same(data, rows[-1]), f"broadcast {dtype} {count}"

            outputs = [torch.empty(count, dtype=dtype) for _ in range(size)]
            dist.all_gather(outputs, mine)
            assert all(map(same, outputs, rows)), f"all_gather {dtype} {count}"

            output = torch.empty(size * count, dtype=dtype)
            dist.all_gather_into_tensor(output, mine)
            assert same(output, torch.cat(rows)), f"all_gather_into_tensor {dtype} {count}"

            output = torch.empty(size, count, dtype=dtype)
            dist.all_gather(list(output.unbind()), mine)
            assert same(output.reshape(-1), torch.cat(rows)), f"all_gather into rows {dtype} {count}"


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Compares bits, because float8 has no equality."""
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize("size", [3])
def test_broadcast_and_all_gather_move_every_dtype(size: int) -> None:
    run_ranks(size, move_everything, size)


def any_strides(rank: int) -> None:
    base = torch.zeros(6, 8)
    view = base.t()[::2]
    view.fill_(rank + 1)
    dist.all_reduce(view)
    assert torch.equal(view, torch.full((4, 6), 3.0))
    assert base.t()[1::2].abs().sum() == 0, "what lies between was not written"

    outputs = [torch.zeros(4, 3).t() for _ in range(2)]
    dist.all_gather(outputs, torch.full((4, 3), float(rank)).t())
    assert [o.unique().tolist() for o in outputs] == [[0.0], [1.0]]

    parameter = torch.nn.Parameter(torch.full((2, 2), float(rank)).t())
    dist.broadcast(parameter.data, src=1)
    assert parameter.unique().tolist() == [1.0]

    uneven = [torch.empty(r + 1, 2) for r in range(2)]
    dist.all_gather(uneven, torch.full((rank + 1, 2), float(rank)))
    assert [u.tolist() for u in uneven] == [[[0.0, 0.0]], [[1.0, 1.0], [1.0, 1.0]]]


def test_any_strides_and_uneven_all_gather() -> None:
    run_ranks(2, any_strides)


def async_work(rank: int) -> None:
    tensors = [torch.full((1000 + i,), float(i + rank)) for i in range(20)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for i, (work, tensor) in enumerate(zip(works, tensors, strict=True)):
        work.wait()
        assert work.is_completed()
        assert tensor.unique().tolist() == [2.0 * i + 1]

    # A Python callback needs the GIL. It must also run while this thread waits outside of muster's calls.
    seen: list[float] = []
    done = threading.Event()
    tensor = torch.ones(5)
    future = dist.all_reduce(tensor, async_op=True).get_future()

    def note(result: torch.futures.Future[list[torch.Tensor]]) -> None:
        seen.append(result.value()[0].sum().item())
        done.set()

    future.then(note)
    assert done.wait(60)
    assert seen == [10.0]
    dist.barrier(async_op=True).wait()


def test_async_work_completes_futures() -> None:
    run_ranks(2, async_work)


def object_collectives(rank: int) -> None:
    gathered: list[object] = [None] * 3
    dist.all_gather_object(gathered, {"rank": rank, "name": "x" * rank})
    assert gathered == [{"rank": r, "name": "x" * r} for r in range(3)]
    shared = [f"from {rank}", rank]
    dist.broadcast_object_list(shared, src=2)
    assert shared == ["from 2", 2]


def test_object_collectives_work() -> None:
    run_ranks(3, object_collectives)


def many_groups(rank: int) -> None:
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mine = pairs[rank % 2]
    gloo = dist.new_group(backend="gloo")
    for step in range(5):
        data = torch.tensor([float(rank + step)])
        dist.all_reduce(data, group=mine)
        assert data.item() == 2 * step + (2 if rank % 2 == 0 else 4)
        dist.all_reduce(data, group=gloo)
        assert data.item() == 2 * (4 * step + 6)
        dist.all_reduce(data)
        assert data.item() == 8 * (4 * step + 6)
    assert dist.get_backend(mine) == "muster"
    dist.destroy_process_group(gloo)
    dist.destroy_process_group(mine)


def test_subgroups_and_other_backends_coexist() -> None:
    run_ranks(4, many_groups)


def muster_groups_in_gloo_job(rank: int) -> None:
    group = dist.new_group(backend="muster")
    data = torch.ones(3)
    dist.all_reduce(data, group=group)
    dist.all_reduce(data)
    assert data.tolist() == [4.0] * 3


def test_a_gloo_job_can_have_muster_subgroups() -> None:
    run_ranks(2, muster_groups_in_gloo_job, backend="gloo")


def with_options(rank: int) -> None:
    half_a_minute = timedelta(seconds=30)
    for options, error, text in [
        ({"transport": "tcp"}, TypeError, "pg_options=muster.Options(...), but was given {'transport': 'tcp'}"),
        (Options("muster", half_a_minute), ValueError, "pg_options.timeout is 0:00:30 but timeout= is 0:01:00"),
    ]:
        with pytest.raises(error, match=re.escape(text)):
            dist.new_group(timeout=timedelta(minutes=1), pg_options=options)
    # These options are accepted: the ones that torch's own code passes on, and those for another backend of the group.
    dist.barrier(dist.new_group(timeout=half_a_minute, pg_options=Options("muster", half_a_minute)))
    with pytest.warns(UserWarning, match="pg_options belong to the backend 'gloo'"):
        group = dist.new_group(pg_options=dist.ProcessGroupGloo._Options())  # type: ignore[attr-defined]
    dist.barrier(group)


def test_unknown_options_raise() -> None:
    run_ranks(2, with_options)


def by_device(rank: int) -> None:
    data = torch.ones(3)
    dist.all_reduce(data)
    assert data.tolist() == [2.0] * 3


def test_backend_can_be_given_per_device() -> None:
    run_ranks(2, by_device, backend="cpu:muster")


def recreate_group(rank: int, path: str) -> None:
    for round_number in range(3):
        dist.destroy_process_group()
        dist.init_process_group("muster", store=dist.FileStore(path, 2), rank=rank, world_size=2)
        data = torch.full((1,), float(round_number + rank))
        dist.all_reduce(data)
        assert data.item() == 2 * round_number + 1


def test_a_store_can_be_reused_for_a_new_group(tmp_path: object) -> None:
    run_ranks(2, recreate_group, f"{tmp_path}/store")


def recreate_subgroup(rank: int, path: str) -> None:
    first = dist.new_group([0, 1])
    if rank < 2:
        dist.all_reduce(torch.ones(1), group=first)
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group("muster", store=dist.FileStore(path, 3), rank=rank, world_size=3)
    second = dist.new_group([0, 2])  # torch gives it the name that the group [0, 1] had
    data = torch.full((1,), float(rank))
    if rank != 1:
        dist.all_reduce(data, group=second)
        assert data.item() == 2


def test_a_recreated_subgroup_finds_its_new_ranks(tmp_path: object) -> None:
    run_ranks(3, recreate_subgroup, f"{tmp_path}/store")


def start_in_callback(rank: int) -> None:
    """The callback of one all-reduce starts another one and waits for it, as in torch's PowerSGD hook."""
    outcomes = []
    for _ in range(20):
        first, second = torch.ones(100_000), torch.full((1000,), 2.0)
        queued = [dist.all_reduce(torch.ones(50_000), async_op=True) for _ in range(3)]

        def then(future: torch.futures.Future[list[torch.Tensor]], second: torch.Tensor = second) -> float:
            assert future.value()[0][0] == 2
            return float(dist.all_reduce(second, async_op=True).get_future().wait()[0][0])

        outcomes.append(dist.all_reduce(first, async_op=True).get_future().then(then))
        for work in queued:
            work.wait()
        assert outcomes[-1].wait() == 4.0


def test_a_callback_may_start_another_operation_and_wait_for_it() -> None:
    run_ranks(2, start_in_callback)


def in_inference_mode(rank: int) -> None:
    with torch.inference_mode():
        outputs = [torch.empty(10_000) for _ in range(2)]
        dist.all_gather(outputs, torch.full((10_000,), float(rank)), async_op=True).wait()
        assert outputs[1][5] == 1
        strided = torch.ones(1000, 2).t()
        dist.all_reduce(strided, async_op=True).wait()
        assert strided.eq(2).all()


def test_collectives_work_in_inference_mode() -> None:
    run_ranks(2, in_inference_mode)


def with_debug_detail(rank: int) -> None:
    assert dist.get_debug_level() == dist.DebugLevel.DETAIL
    data = torch.ones(4)
    dist.all_reduce(data)
    dist.barrier()
    assert data.tolist() == [2.0] * 4


def test_debug_level_detail_works() -> None:
    run_ranks(2, with_debug_detail, env={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"})


def unsupported_calls(rank: int) -> None:
    with pytest.raises(NotImplementedError, match="float8_e5m2 cannot be reduced with sum"):
        dist.all_reduce(torch.ones(2).to(torch.float8_e5m2))
    with pytest.raises(ValueError, match="the group has 2 ranks"):
        dist.distributed_c10d._get_default_group().allgather([[torch.ones(1)]], [torch.ones(1)]).wait()


def test_unsupported_calls_raise_a_clear_error() -> None:
    run_ranks(2, unsupported_calls)


def group_of_one(rank: int) -> str:
    import muster

    group = dist.new_group(timeout=timedelta(seconds=60))
    assert muster.group(group).timeout == 60
    if rank == 0:
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=1.5), group)  # not earlier: ranks may form it late
        with pytest.raises(muster.TimeoutError, match="all_reduce") as caught:
            dist.all_reduce(torch.ones(4), group=group)
        assert isinstance(caught.value, dist.DistBackendError)
        assert isinstance(caught.value, TimeoutError), "Python's own"
        again = pickle.loads(pickle.dumps(caught.value))
        assert (str(again), again.context) == (str(caught.value), caught.value.context)
        with pytest.raises(dist.DistBackendError):  # the group is dead
            dist.barrier(group=group)
    dist.barrier()  # another group still works
    return "ok"


def test_a_missing_rank_raises_a_timeout() -> None:
    assert run_ranks(2, group_of_one) == ["ok", "ok"]


def name_dead_rank(rank: int, how: int) -> tuple[str, int | None] | None:
    import muster

    dist.all_reduce(torch.ones(1))
    if rank == 1:
        os.kill(os.getpid(), how)
    with pytest.raises(muster.PeerLostError) as caught:
        for _ in range(1000):
            dist.all_reduce(torch.ones(100_000))
    return str(caught.value), caught.value.rank


def test_all_ranks_name_a_rank_that_died() -> None:
    answers = run_ranks(3, name_dead_rank, signal.SIGKILL, lost=(1,))
    for answer in (answers[0], answers[2]):
        message, rank = answer
        assert rank == 1
        assert "rank 1" in message


def call_different_operations(rank: int) -> str:
    import muster

    with pytest.raises(muster.Error) as caught:
        if rank == 0:
            dist.all_reduce(torch.ones(4))
        else:
            dist.broadcast(torch.ones(4), src=0)
    return type(caught.value).__name__


def test_different_operations_raise_a_mismatch() -> None:
    for transport in ("shm", "unix"):
        assert run_ranks(3, call_different_operations, env={"MUSTER_TRANSPORT": transport}) == ["MismatchError"] * 3


def abort_pending(rank: int) -> None:
    import muster

    backend = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
    work = dist.all_reduce(torch.ones(2), async_op=True) if rank == 0 else None
    backend.abort()
    if work:
        with pytest.raises(muster.Error):
            work.wait()
    with pytest.raises(muster.AbortedError):
        dist.barrier()


def test_abort_fails_pending_works() -> None:
    run_ranks(2, abort_pending)


def drop_group_in_child(rank: int) -> None:
    dist.all_reduce(torch.ones(1), async_op=True).wait()
    child = os.fork()
    if child == 0:
        dist.destroy_process_group()  # the child has no threads to end, and must not touch the parent's group
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    data = torch.ones(1000)
    dist.all_reduce(data)
    assert data.unique().tolist() == [2.0]


def test_a_forked_child_may_drop_the_group() -> None:
    run_ranks(2, drop_group_in_child)


def test_muster_timeout_replaces_only_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.constants import default_pg_timeout

    from muster import _backend

    assert _backend._timeout(default_pg_timeout) == default_pg_timeout
    monkeypatch.setenv("MUSTER_TIMEOUT", "2.5")
    assert _backend._timeout(default_pg_timeout) == timedelta(seconds=2.5)
    assert _backend._timeout(timedelta(seconds=9)) == timedelta(seconds=9)
    for wrong in ("soon", "0", "-3", "nan", "1e300"):
        monkeypatch.setenv("MUSTER_TIMEOUT", wrong)
        with pytest.raises(ValueError, match=f"MUSTER_TIMEOUT='{wrong}' is not a number of seconds above 0"):
            _backend._timeout(default_pg_timeout)


def transport_of(rank: int) -> str:
    import muster

    dist.all_reduce(torch.ones(1))
    return muster.transport()


@pytest.mark.parametrize("transport", ["shm", "unix", "tcp"])
def test_every_transport_can_be_chosen(transport: str) -> None:
    assert run_ranks(2, transport_of, env={"MUSTER_TRANSPORT": transport}) == [transport] * 2
