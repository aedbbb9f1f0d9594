"""Compares every collective and point-to-point call of c10d with its definition."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

import muster

Op = dist.ReduceOp
DTYPES = [
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128, torch.bool),
    *(torch.float8_e5m2, torch.float8_e4m3fn),
]
REDUCED = [dtype for dtype in DTYPES if dtype.itemsize > 1 or dtype in (torch.uint8, torch.int8)]
COUNTS = [0, 1, 5, 3000]
SIZE = 3


def values(seed: int, count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Whole numbers. The sum of three is exact in every dtype."""
    return ((torch.arange(count) * 7 + seed * 3) % 5 + 1).to(dtype)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Compares bits, because float8 has no equality."""
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(raw(a), raw(b))


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def strided(tensor: torch.Tensor) -> torch.Tensor:
    """The same elements, with gaps between them."""
    return torch.stack([tensor, torch.zeros_like(tensor)], dim=1)[:, 0]


def check_moves_at_rank(rank: int) -> None:
    for dtype in DTYPES:
        for count in COUNTS:
            check_moves(rank, dtype, count)


def check_moves(rank: int, dtype: torch.dtype, count: int) -> None:
    mine = [values(10 * rank + other, count, dtype) for other in range(SIZE)]  # for each other rank
    theirs = [values(10 * other + rank, count, dtype) for other in range(SIZE)]  # from each other rank
    where = f"{dtype} {count}"

    output = torch.empty(count, dtype=dtype)
    dist.scatter(output, mine if rank == 1 else None, src=1)
    assert same(output, values(10 + rank, count, dtype)), f"scatter {where}"

    outputs = [torch.empty(count, dtype=dtype) for _ in range(SIZE)] if rank == 2 else None
    dist.gather(values(rank, count, dtype), outputs, dst=2)
    if outputs is not None:
        assert all(map(same, outputs, [values(r, count, dtype) for r in range(SIZE)])), f"gather {where}"

    outputs = [torch.empty(count, dtype=dtype) for _ in range(SIZE)]
    dist.all_to_all(outputs, mine)
    assert all(map(same, outputs, theirs)), f"all_to_all {where}"

    output = torch.empty(SIZE * count, dtype=dtype)
    dist.all_to_all_single(output, torch.cat(mine))
    assert same(output, torch.cat(theirs)), f"all_to_all_single {where}"


def all_dtypes() -> list[torch.dtype]:
    """All dtypes of torch, except the quantized ones, which have no plain elements."""
    names = [name for name in dir(torch) if isinstance(getattr(torch, name), torch.dtype)]
    return sorted({getattr(torch, name) for name in names if not name.startswith(("qint", "quint"))}, key=str)


def moves_whatever_torch_has(rank: int) -> None:
    dtypes = all_dtypes()
    assert {torch.complex32, torch.float8_e8m0fnu, torch.float4_e2m1fn_x2, torch.bits16} <= set(dtypes)
    assert "torch.uint1" in map(str, dtypes)
    for dtype in dtypes:
        check_moves_of_bytes(rank, dtype)


def check_moves_of_bytes(rank: int, dtype: torch.dtype) -> None:
    def pattern(seed: int, count: int = 6) -> torch.Tensor:
        size = count * dtype.itemsize
        data = torch.arange(size).mul(7).add(seed).remainder(2 if dtype == torch.bool else 251)
        return data.to(torch.uint8).view(dtype)

    data = pattern(rank)
    dist.broadcast(data, src=1)
    assert same(data, pattern(1)), f"broadcast {dtype}"
    grid = pattern(rank, 12).view(6, 2)
    dist.broadcast(grid[:, 0], src=2)  # the elements have gaps between them
    columns = grid.view(torch.uint8).view(6, 2, -1)
    assert torch.equal(columns[:, 0], pattern(2, 12).view(torch.uint8).view(6, 2, -1)[:, 0]), (
        f"broadcast with gaps {dtype}"
    )
    assert torch.equal(columns[:, 1], pattern(rank, 12).view(torch.uint8).view(6, 2, -1)[:, 1]), f"gaps {dtype}"
    outputs = [torch.empty(6, dtype=dtype) for _ in range(SIZE)]
    dist.all_gather(outputs, pattern(rank))
    assert all(map(same, outputs, map(pattern, range(SIZE)))), f"all_gather {dtype}"
    output = torch.empty(18, dtype=dtype)
    dist.all_gather_into_tensor(output, pattern(rank))
    assert same(output[12:], pattern(2)), f"all_gather_into_tensor {dtype}"
    output = torch.empty(6, dtype=dtype)
    dist.scatter(output, [pattern(10 + r) for r in range(SIZE)] if rank == 0 else None, src=0)
    assert same(output, pattern(10 + rank)), f"scatter {dtype}"
    outputs = [torch.empty(6, dtype=dtype) for _ in range(SIZE)]
    dist.gather(pattern(rank), outputs if rank == 0 else None, dst=0)
    assert rank != 0 or all(map(same, outputs, map(pattern, range(SIZE)))), f"gather {dtype}"
    dist.all_to_all(outputs, [pattern(10 * rank + r) for r in range(SIZE)])
    assert all(map(same, outputs, [pattern(10 * r + rank) for r in range(SIZE)])), f"all_to_all {dtype}"
    output = torch.empty(6, dtype=dtype)
    dist.all_to_all_single(output, pattern(rank))
    for r in range(SIZE):
        assert same(output[2 * r : 2 * r + 2], pattern(r)[2 * rank : 2 * rank + 2]), f"all_to_all_single {dtype}"
    if rank == 0:
        dist.send(pattern(5), 1)
    elif rank == 1:
        output = torch.empty(6, dtype=dtype)
        dist.recv(output, 0)
        assert same(output, pattern(5)), f"recv {dtype}"


def reductions(rank: int) -> None:
    for dtype in REDUCED:
        for count in COUNTS:
            check_reductions(rank, dtype, count)


def check_reductions(rank: int, dtype: torch.dtype, count: int) -> None:
    where = f"{dtype} {count}"
    total = torch.stack([values(r, count, torch.float64) for r in range(SIZE)]).sum(0).to(dtype)
    data = values(rank, count, dtype)
    dist.reduce(data, dst=1)
    assert same(data, total if rank == 1 else values(rank, count, dtype)), f"reduce {where}"

    blocks = [values(10 * rank + other, count, dtype) for other in range(SIZE)]
    expected = torch.stack([values(10 * other + rank, count, torch.float64) for other in range(SIZE)]).sum(0).to(dtype)
    output = torch.empty(count, dtype=dtype)
    dist.reduce_scatter(output, blocks)
    assert same(output, expected), f"reduce_scatter {where}"
    output = torch.empty(count, dtype=dtype)
    dist.reduce_scatter_tensor(output, torch.cat(blocks))
    assert same(output, expected), f"reduce_scatter_tensor {where}"


@pytest.mark.parametrize("transport", ["shm", "unix"])
def test_every_dtype_and_count_is_moved(transport: str) -> None:
    run_ranks(SIZE, check_moves_at_rank, env={"MUSTER_TRANSPORT": transport})


@pytest.mark.parametrize("transport", ["shm", "unix"])
def test_every_dtype_of_torch_is_moved(transport: str) -> None:
    run_ranks(SIZE, moves_whatever_torch_has, env={"MUSTER_TRANSPORT": transport})


@pytest.mark.parametrize("transport", ["shm", "unix"])
def test_every_dtype_and_count_is_reduced(transport: str) -> None:
    run_ranks(SIZE, reductions, env={"MUSTER_TRANSPORT": transport})


def uneven(rank: int) -> None:
    lengths = [4, 0, 7]
    outputs = [torch.empty(n, 2) for n in lengths]
    dist.all_gather(outputs, values(rank, 2 * lengths[rank]).view(-1, 2))
    assert [o.flatten().tolist() for o in outputs] == [values(r, 2 * n).tolist() for r, n in enumerate(lengths)]

    output = torch.empty(lengths[rank])
    dist.reduce_scatter(output, [values(rank + i, n) for i, n in enumerate(lengths)])
    expected = sum(values(r + rank, lengths[rank]) for r in range(SIZE))
    assert torch.equal(output, torch.as_tensor(expected))

    sent = [[1, 0, 3], [2, 2, 0], [0, 5, 1]]  # rows from sender (row) to receiver (column)
    received = [sent[r][rank] for r in range(SIZE)]
    blocks = [values(10 * rank + i, 3 * n).view(n, 3) for i, n in enumerate(sent[rank])]
    expected_blocks = [values(10 * r + rank, 3 * n).view(n, 3) for r, n in enumerate(received)]
    single = torch.empty(sum(received), 3)
    dist.all_to_all_single(single, torch.cat(blocks), received, sent[rank])
    assert torch.equal(single, torch.cat(expected_blocks))
    pieces = [torch.empty(n, 3) for n in received]
    dist.all_to_all(pieces, blocks)
    assert all(map(torch.equal, pieces, expected_blocks))


def shared_memory(rank: int) -> None:
    """Outputs that are also inputs, or that share memory with each other."""
    whole = torch.zeros(3 * SIZE)
    own = whole.view(SIZE, 3)[rank]
    own.fill_(rank + 1)
    dist.all_gather_into_tensor(whole, own)
    assert whole.tolist() == [1.0] * 3 + [2.0] * 3 + [3.0] * 3
    shifted = torch.arange(12.0)
    dist.all_gather_into_tensor(shifted[:9], shifted[8:11])  # the input begins within the output
    assert shifted[:9].tolist() == [8.0, 9.0, 10.0] * 3
    swapped = torch.arange(3.0) + 10 * rank
    dist.all_to_all_single(swapped, swapped)
    assert swapped.tolist() == [rank, 10.0 + rank, 20.0 + rank]
    data = torch.arange(6.0)
    dist.reduce_scatter_tensor(data[2 * rank : 2 * rank + 2], data)
    assert data[2 * rank : 2 * rank + 2].tolist() == [6.0 * rank, 6.0 * rank + 3]
    alias = torch.empty(2)
    dist.all_gather([alias, alias, alias], torch.full((2,), float(rank)))
    assert alias.tolist() == [2.0, 2.0], "the last one stays"


def strides(rank: int) -> None:
    data = strided(values(rank, 6))
    dist.reduce(data, dst=0)
    assert torch.equal(data, torch.stack([values(r, 6) for r in range(SIZE)]).sum(0) if rank == 0 else values(rank, 6))
    output = strided(torch.zeros(4))
    dist.scatter(output, [strided(values(r, 4)) for r in range(SIZE)] if rank == 0 else None, src=0)
    assert torch.equal(output, values(rank, 4))
    outputs = [strided(torch.zeros(4)) for _ in range(SIZE)]
    dist.all_to_all(outputs, [strided(values(rank + r, 4)) for r in range(SIZE)])
    assert all(torch.equal(o, values(r + rank, 4)) for r, o in enumerate(outputs))
    output = strided(torch.zeros(4))
    dist.reduce_scatter(output, [strided(values(r, 4)) for r in range(SIZE)], op=Op.MAX, async_op=True).wait()
    assert torch.equal(output, values(rank, 4))


def premultiplied_sums(rank: int) -> None:
    data = torch.full((5,), 2.0)
    dist.all_reduce(data, op=dist._make_nccl_premul_sum(rank + 0.5))
    assert data.tolist() == [2.0 * (0.5 + 1.5 + 2.5)] * 5
    data = torch.full((5,), 2.0, dtype=torch.bfloat16)
    dist.reduce(data, dst=0, op=dist._make_nccl_premul_sum(torch.tensor(0.25)))
    assert data.tolist() == [1.5 if rank == 0 else 2.0] * 5


def sparse(rank: int) -> None:
    indices = torch.tensor([[0, rank, rank], [1, 0, 0]])  # one index twice; ranks have different counts
    tensor = torch.sparse_coo_tensor(indices[:, : rank + 1], torch.ones(rank + 1, 2), (4, 3, 2))
    dist.all_reduce(tensor)
    expected = torch.zeros(4, 3, 2)
    expected[0, 1], expected[1, 0], expected[2, 0] = 3.0, 1.0, 2.0
    assert torch.equal(tensor.to_dense(), expected)
    empty = torch.sparse_coo_tensor(torch.empty(1, 0), torch.empty(0), (9,))
    work = dist.all_reduce(empty, async_op=True)
    work.wait()
    assert empty._nnz() == 0
    with pytest.raises(muster.MismatchError, match=r"rank [02] has a tensor of another shape"):
        dist.all_reduce(torch.sparse_coo_tensor(torch.empty(1, 0), torch.empty(0), (9 if rank < 2 else 8,)))
    with pytest.raises(ValueError, match="only SUM and AVG"):
        dist.all_reduce(empty, op=Op.MAX)


def messages(rank: int) -> None:
    if rank == 0:
        for tag in (3, 1, 2):
            dist.send(torch.full((100,), float(tag)), dst=1, tag=tag)
        dist.send(torch.full((0,), 1.0), dst=1)
    elif rank == 1:
        data = torch.empty(100)
        for tag in (1, 2, 3):
            assert dist.recv(data, src=0, tag=tag) == 0
            assert data.unique().tolist() == [tag]
        dist.recv(torch.empty(0), src=0)
    # Large messages in both directions, which are waited for later; into strided tensors; with futures.
    others = [r for r in range(SIZE) if r != rank]
    outputs = {r: strided(torch.zeros(200_000)) for r in others}
    works: list[Any] = [dist.isend(torch.full((200_000,), float(rank)), dst=r) for r in others]
    works += [dist.irecv(outputs[r], src=r) for r in others]
    futures = [work.get_future() for work in works]
    for work in works:
        work.wait()
    assert all(outputs[r].unique().tolist() == [r] for r in others)
    assert all(future.done() for future in futures)
    # Receives from any rank.
    if rank == 0:
        seen = {}
        for _ in others:
            data = torch.empty(3, dtype=torch.int64)
            source = dist.recv(data, tag=9)
            seen[source] = data.tolist()
        assert seen == {1: [1] * 3, 2: [2] * 3}
    else:
        dist.send(torch.full((3,), rank), dst=0, tag=9)
    dist.barrier()  # keeps all ranks here, because a rank that leaves fails receives from any rank


def batched(rank: int) -> None:
    left, right = (rank - 1) % SIZE, (rank + 1) % SIZE
    outputs = [torch.empty(50), torch.empty(60_000)]
    operations = [dist.P2POp(dist.irecv, output, left) for output in outputs]
    operations += [dist.P2POp(dist.isend, torch.full((n,), float(rank)), right) for n in (50, 60_000)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    assert [o.unique().tolist() for o in outputs] == [[left], [left]]


def coalesced(rank: int) -> None:
    group = c10d._get_default_group()
    backend = group._get_backend(torch.device("cpu"))
    direct = muster.group()
    before = direct.sequence
    tensors = [torch.full((n,), float(rank)) for n in (1, 0, 300)]
    with c10d._coalescing_manager(async_ops=True) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor)
    manager.wait()
    assert [t.unique().tolist() for t in tensors] == [[3.0], [], [3.0]]
    outputs = [torch.empty(SIZE * n) for n in (2, 5)]
    with c10d._coalescing_manager():
        for output, n in zip(outputs, (2, 5), strict=True):
            dist.all_gather_into_tensor(output, values(rank + n, n))
    assert all(
        torch.equal(o, torch.cat([values(r + n, n) for r in range(SIZE)])) for o, n in zip(outputs, (2, 5), strict=True)
    )
    outputs = [torch.empty(n) for n in (2, 5)]
    with c10d._coalescing_manager():
        for output, n in zip(outputs, (2, 5), strict=True):
            dist.reduce_scatter_tensor(output, torch.arange(float(SIZE * n)))
    assert all(
        torch.equal(o, SIZE * torch.arange(float(SIZE * n))[rank * n :][:n])
        for o, n in zip(outputs, (2, 5), strict=True)
    )
    assert direct.sequence == before + 3, "each block is one operation"
    mixed = [torch.full((4,), float(rank)), torch.full((3,), float(rank), dtype=torch.float64), torch.zeros(4)]
    assert backend.supports_coalescing
    with c10d._coalescing_manager(device=torch.device("cpu"), async_ops=True) as manager:
        dist.broadcast(mixed[0], src=1)
        dist.broadcast(mixed[1], src=2)
        dist.broadcast(mixed[2], src=0)
        assert mixed[0].tolist() == [rank] * 4, "nothing begins within the block"
    manager.wait()
    assert [m[0].item() for m in mixed] == [1.0, 2.0, 0.0]


def root_tensor(index: int) -> c10d.BroadcastOptions:
    options = c10d.BroadcastOptions()
    options.rootTensor = index
    return options


def averaging() -> c10d.AllreduceOptions:
    options = c10d.AllreduceOptions()
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.AVG)
    return options


def slots(wrong: int) -> list[list[Tensor]]:
    """Output lists in which the tensor for rank `wrong` has a wrong size."""
    return [[torch.ones(2 if rank == wrong else 1)] for rank in range(SIZE)]


def several_tensors(rank: int) -> None:
    """Several tensors per rank, which only c10d's own methods accept."""
    group = c10d._get_default_group()
    mine = [torch.full((2, 3), float(2 * rank + i)) for i in range(2)]
    strided = torch.zeros(3, 2).t()
    group.broadcast([mine[0].clone(), strided], root_tensor(0)).wait()
    tensors = [each.clone() for each in mine]
    group.allreduce(tensors).wait()
    assert all(torch.equal(each, torch.full((2, 3), 15.0)) for each in tensors), "0 + 1 + ... + 5"
    options = c10d.AllreduceOptions()
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
    strided.copy_(mine[1])
    group.allreduce([mine[0].clone(), strided], options).wait()
    assert torch.equal(strided, torch.full((2, 3), 5.0))
    last = root_tensor(1)
    last.rootRank = 2
    tensors = [each.clone() for each in mine]
    group.broadcast(tensors, last).wait()
    assert all(torch.equal(each, torch.full((2, 3), 5.0)) for each in tensors)
    outputs = [[torch.empty(2, 3) for _ in range(2 * SIZE)] for _ in range(2)]
    group.allgather(outputs, mine).wait()
    for row in outputs:
        assert [each.unique().tolist() for each in row] == [[float(i)] for i in range(2 * SIZE)]


def wrong_arguments(rank: int) -> None:
    group: Any = c10d._get_default_group()
    ones = torch.ones
    wrong: list[tuple[str, Callable[[], object]]] = [
        ("output list has 1 tensors", lambda: group.allgather([[ones(1)]], [ones(1)])),
        ("output 0|output 1|output 2", lambda: group.allgather([[ones(2)] * 3], [ones(1)])),
        ("differ in dtype", lambda: group.allgather([[ones(1).long()] * 3], [ones(1)])),
        ("need 3, not 4", lambda: group._allgather_base(ones(4), ones(1))),
        ("need 3, not 4", lambda: group._reduce_scatter_base(ones(1), ones(4))),
        ("input list has 2 tensors", lambda: group.reduce_scatter([ones(1)], [[ones(1)] * 2])),
        ("one list of tensors", lambda: group.reduce_scatter([ones(1)], [])),
        ("cannot be split evenly", lambda: group.alltoall_base(ones(4), ones(4), [], [])),
        ("2 input splits for 3 ranks", lambda: group.alltoall_base(ones(3), ones(3), [], [1, 2])),
        ("do not add up", lambda: group.alltoall_base(ones(3), ones(3), [], [1, 1, 2])),
        ("split is negative", lambda: group.alltoall_base(ones(3), ones(3), [], [1, -1, 3])),
        ("output list has 2 tensors", lambda: group.alltoall([ones(1)] * 2, [ones(1)] * 3)),
        ("is out of range for a group of", lambda: group.broadcast(ones(1), root=3)),
        ("is out of range for a group of", lambda: group.send([ones(1)], 3, 0)),
        ("Tag must be nonnegative", lambda: group.send([ones(1)], 1, -1)),
        ("Tag must be nonnegative", lambda: group.recv([ones(1)], 1, -1)),
        ("Tag must be nonnegative", lambda: group.recv_anysource([ones(1)], -1)),
        ("takes one tensor per rank", lambda: group.reduce([ones(1), ones(1)], c10d.ReduceOptions())),
        ("differ in shape", lambda: group.allreduce([ones(1), ones(2)])),
        ("differ in dtype", lambda: group.broadcast([ones(1), ones(1).long()])),
        ("rootTensor is 2", lambda: group.broadcast([ones(1), ones(1)], root_tensor(2))),
        ("AVG and PREMUL_SUM take one tensor", lambda: group.allreduce([ones(1), ones(1)], averaging())),
        ("needs 6 tensors", lambda: group.allgather([[ones(1)] * 3] * 2, [ones(1)] * 2)),
        ("must all have the same type", lambda: group.allreduce_coalesced([ones(1), ones(1).double()])),
        ("invalid size of output tensor", lambda: group.allgather_coalesced(slots(1), [ones(1)])),
        ("must be contiguous", lambda: group.alltoall_base(ones(3, 2).t(), ones(3, 2), [], [])),
        ("must be contiguous", lambda: group.alltoall_base(ones(3, 2), ones(3, 2).t(), [], [])),
    ]
    for message, call in wrong:
        with pytest.raises(ValueError, match=message) as caught:
            call()
        assert isinstance(caught.value, (muster.ArgumentError, RuntimeError))
        assert isinstance(caught.value, RuntimeError), "as torch's other backends"
    with pytest.raises(ValueError, match="no open coalescing block"):
        group._end_coalescing(torch.device("cpu"))
    dist.barrier()  # none of these calls has begun at any rank


@pytest.mark.parametrize(
    "body",
    [
        uneven,
        shared_memory,
        strides,
        premultiplied_sums,
        sparse,
        messages,
        batched,
        coalesced,
        several_tensors,
        wrong_arguments,
    ],
)
def test_three_ranks(body: Callable[[int], None]) -> None:
    run_ranks(SIZE, body)


def group_of_one(rank: int) -> None:
    data = torch.arange(4.0)
    dist.all_reduce(data)
    dist.broadcast(data, src=0)
    dist.reduce(data, dst=0)
    output = torch.empty(4)
    calls: tuple[Callable[[], object], ...] = (
        lambda: dist.all_gather_into_tensor(output, data),
        lambda: dist.reduce_scatter_tensor(output, data),
        lambda: dist.all_to_all_single(output, data),
        lambda: dist.gather(data, [output], dst=0),
        lambda: dist.scatter(output, [data], src=0),
    )
    for call in calls:
        output.zero_()
        call()
        assert torch.equal(output, data)
    dist.all_reduce(data, op=dist._make_nccl_premul_sum(3.0))
    assert data.tolist() == [0.0, 3.0, 6.0, 9.0]
    objects: list[object] = [None]
    dist.all_gather_object(objects, "me")
    assert objects == ["me"]


def test_group_of_one_rank() -> None:
    run_ranks(1, group_of_one)


def over_4_gib(rank: int, count: int) -> None:
    data = torch.zeros(count, dtype=torch.uint8)
    data[-5:] = rank + 1
    dist.all_reduce(data)
    assert data[-5:].tolist() == [3] * 5
    assert not data[:-5].any()
    if rank == 0:
        dist.send(data, dst=1)
    else:
        data.zero_()
        dist.recv(data, src=0)
        assert data[-5:].tolist() == [3] * 5


@pytest.mark.skipif("MUSTER_TEST_HUGE" not in os.environ, reason="needs 9 GiB: set MUSTER_TEST_HUGE=1")
def test_tensors_over_4_gib() -> None:
    run_ranks(2, over_4_gib, (4 << 30) + 5, timeout=600)
