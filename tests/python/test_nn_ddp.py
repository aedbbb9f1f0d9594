"""Tests that muster.nn.DistributedDataParallel trains as one process on the whole batch does, with any options."""

from __future__ import annotations

import copy
import hashlib
import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from muster.nn import DistributedDataParallel, SyncBatchNorm
from ranks import RankPool, run_ranks
from torch import Tensor, nn

import muster
from muster import hooks

EXAMPLES = int(os.environ.get("MUSTER_DDP_EXAMPLES", "12"))
WIDTH, CLASSES, PER_RANK = 6, 3, 4
Registration = Callable[[DistributedDataParallel], None]  # registers a communication hook


class Branches(nn.Module):
    """Uses two branches in turn, one in each step; the third branch is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(WIDTH, 8)
        self.branches = nn.ModuleList(nn.Linear(8, CLASSES) for _ in range(3))
        self.steps = 0

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        return self.branches[self.steps % 2](self.trunk(x))


class Tied(nn.Module):
    """Has a weight that two modules share, a frozen one, and a parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.second.weight = self.first.weight
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.last = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.second(self.frozen(F.relu(self.first(x)))) * self.scale)


class Mixed(nn.Module):
    """Has parameters of three dtypes, one of them complex."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(WIDTH, WIDTH).double()
        self.turn = nn.Parameter(torch.randn(WIDTH, dtype=torch.complex64))
        self.last = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.last((self.wide(x.double()).to(torch.complex64) * self.turn).abs())


class Bag(nn.Module):
    def __init__(self, sparse: bool = True) -> None:
        super().__init__()
        self.words = nn.EmbeddingBag(10, WIDTH, sparse=sparse)
        self.last = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.words((x.abs() * 7).long() % 10))


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, 16), nn.Tanh(), nn.Linear(16, CLASSES))


class Convolution(nn.Module):
    """Channels last, with a batch norm in eval mode: it has buffers, but its statistics do not depend on the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4).eval(), nn.ReLU(), nn.Flatten())
        self.last = nn.Linear(4 * WIDTH // 2, CLASSES)
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.body(x.view(-1, 2, 1, WIDTH // 2)))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "perceptron": perceptron,
    "branches": Branches,
    "tied": Tied,
    "mixed": Mixed,
    "bag": Bag,
    "convolution": Convolution,
}


@dataclass
class Case:
    model: str = "perceptron"
    options: dict[str, Any] = field(default_factory=dict)
    accumulate: int = 1  # backwards in a step; all except the last one are under no_sync
    set_to_none: bool = True
    steps: int = 4
    tolerance: float = 1e-5


def batch(number: int, size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(size * PER_RANK, WIDTH, generator=generator)
    return x, torch.randint(CLASSES, (size * PER_RANK,), generator=generator)


def train(model: nn.Module, case: Case, size: int, rank: int | None) -> None:
    """Trains on the rank's part of each batch, or on whole batches if `rank` is None."""
    part = slice(None) if rank is None else slice(rank * PER_RANK, (rank + 1) * PER_RANK)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(case.steps):
        optimizer.zero_grad(set_to_none=case.set_to_none)
        for turn in range(case.accumulate):
            x, y = (each[part] for each in batch(step * case.accumulate + turn, size))
            if isinstance(model, DistributedDataParallel) and turn < case.accumulate - 1:
                with model.no_sync():
                    F.cross_entropy(model(x), y).backward()
            else:
                F.cross_entropy(model(x), y).backward()
        optimizer.step()


def digest(model: nn.Module) -> str:
    bits = hashlib.sha256()
    for name, value in model.state_dict().items():
        bits.update(name.encode())
        bits.update(value.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return bits.hexdigest()


def compare(rank: int, case: Case, register: Registration | None = None, size: int = 2) -> str:
    torch.manual_seed(5)
    reference = MODELS[case.model]()
    module = copy.deepcopy(reference)
    if rank > 0:
        with torch.no_grad():
            for tensor in module.state_dict().values():
                tensor.zero_()  # DDP must use rank 0's values
    model = DistributedDataParallel(module, **case.options)
    if register is not None:
        register(model)
    train(model, case, size, rank)
    train(reference, case, size, None)
    for value, expected in zip(module.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(value, expected, rtol=10 * case.tolerance, atol=case.tolerance)
    return digest(module)


def compare_over(rank: int, link: dict[str, str], transport: str, compress: bool) -> str:
    os.environ.update(link)
    if transport == "shm+tcp":
        os.environ["MUSTER_HOST_LABEL"] = f"host {rank // 2}"
    group = dist.new_group()
    assert muster.group(group).transport == transport
    case = Case(options={"process_group": group, "bucket_cap_mb": 0.001}, tolerance=0.03 if compress else 1e-5)
    return compare(rank, case, (lambda model: model.register_comm_hook(None, hooks.int8())) if compress else None, 4)


@pytest.mark.parametrize(("link", "transport"), [({"MUSTER_TRANSPORT": "tcp"}, "tcp"), ({}, "shm+tcp")])
@pytest.mark.parametrize("compress", [False, True])
def test_training_without_shared_memory_matches(link: dict[str, str], transport: str, compress: bool) -> None:
    assert len(set(run_ranks(4, compare_over, link, transport, compress))) == 1


@st.composite
def cases(draw: st.DrawFn) -> Case:
    model = draw(st.sampled_from(sorted(MODELS)))
    static = draw(st.booleans()) and model != "branches"
    options: dict[str, Any] = {
        "static_graph": static,
        "find_unused_parameters": model == "branches" or draw(st.booleans()),
        "gradient_as_bucket_view": draw(st.booleans()),
        "batched_grad_copy": draw(st.booleans()),
    }
    if draw(st.booleans()):
        options["bucket_cap_mb_list"] = [0.0001, 0.001]
    else:
        options["bucket_cap_mb"] = draw(st.sampled_from([None, 0.0002, 0.001]))
    known = inspect.signature(nn.parallel.DistributedDataParallel).parameters  # torch 2.11 has fewer
    options = {name: value for name, value in options.items() if name in known}
    return Case(model, options, draw(st.integers(1, 3)), draw(st.booleans()))


@settings(
    max_examples=EXAMPLES,
    derandomize=EXAMPLES == 12,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(case=cases())
@example(case=Case("mixed"))
@example(case=Case("bag", {"gradient_as_bucket_view": False}, accumulate=2))
def test_models_and_options_train_as_one_process_does(ranks: RankPool, case: Case) -> None:
    digests = ranks.run(compare, case)
    assert len(set(digests)) == 1, "the ranks' parameters differ"


def train_twice(rank: int, model: str, register: Registration | None = None) -> None:
    case = Case(model, {"bucket_cap_mb": 0.001, "find_unused_parameters": True}, accumulate=2)
    digests = []
    for _ in range(2):
        torch.manual_seed(rank)
        module = MODELS[model]()
        wrapped = DistributedDataParallel(module, **case.options)
        if register is not None:
            register(wrapped)
        train(wrapped, case, 2, rank)
        digests.append(digest(module))
    assert digests[0] == digests[1]


@pytest.mark.parametrize("model", sorted(MODELS))
def test_two_runs_with_one_seed_give_the_same_bits(ranks: RankPool, model: str) -> None:
    ranks.run(train_twice, model)


def join_uneven(rank: int, by_initial: bool, hook: bool) -> str:
    torch.manual_seed(3)
    reference = Branches()
    model = DistributedDataParallel(
        copy.deepcopy(reference), bucket_cap_mb=0.0002, find_unused_parameters=True, gradient_as_bucket_view=by_initial
    )
    if hook:
        model.register_comm_hook(None, hooks.all_reduce())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = torch.optim.SGD(reference.parameters(), lr=0.1)
    batches = [3, 5]
    with model.join(divide_by_initial_world_size=by_initial):
        own: list[Tensor | None] = []
        for step in range(batches[rank]):
            x, y = batch(step + 100 * rank, 1)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            assert model.module.branches[1 - model.module.steps % 2].weight.grad is None, "no rank has used it"
            own = [None if each.grad is None else each.grad.clone() for each in model.parameters()]
    for parameter, gradient in zip(model.parameters(), own, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, msg="the other ranks' steps left it alone")
    for step in range(5):
        active = [each for each in range(2) if step < batches[each]]
        expected.zero_grad()
        losses = []
        for each in active:
            x, y = batch(step + 100 * each, 1)
            reference.steps = step
            losses.append(F.cross_entropy(reference(x), y))
        (torch.stack(losses).sum() / (2 if by_initial else len(active))).backward()
        expected.step()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)
    assert model._get_ddp_logging_data()["join_uneven_inputs"] == 1
    return digest(model.module)


@pytest.mark.parametrize("by_initial", [True, False])
@pytest.mark.parametrize("hook", [False, True])
def test_join_handles_uneven_data(ranks: RankPool, by_initial: bool, hook: bool) -> None:
    assert len(set(ranks.run(join_uneven, by_initial, hook))) == 1


def test_join_works_with_debug_checks() -> None:
    assert len(set(run_ranks(2, join_uneven, True, False, env={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}))) == 1


def throw_on_early_end(rank: int) -> str:
    model = DistributedDataParallel(nn.Linear(2, 1))
    with pytest.raises(RuntimeError) as caught, model.join(throw_on_early_termination=True):
        for _ in range(2 + rank):
            model(torch.ones(1, 2)).sum().backward()
    return str(caught.value)


def test_join_can_raise_when_a_rank_has_no_data(ranks: RankPool) -> None:
    assert all("exhausted" in text for text in ranks.run(throw_on_early_end))


def expect_gradients_of_the_joined_batch(
    rank: int, model: nn.Module, reference: nn.Module, steps: int, input_needs_gradient: bool = False
) -> None:
    """Expects the gradients of `model`, on this rank's part, to equal those of `reference`, on the whole batch."""
    for step in range(steps):
        x, y = batch(step, 2)
        reference.zero_grad()
        F.cross_entropy(reference(x), y).backward()
        model.zero_grad()
        part = slice(rank * PER_RANK, (rank + 1) * PER_RANK)
        F.cross_entropy(model(x[part].requires_grad_(input_needs_gradient)), y[part]).backward()
        for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad)


def detach_gradients(rank: int) -> None:
    torch.manual_seed(2)
    reference = perceptron()
    model = DistributedDataParallel(copy.deepcopy(reference))
    expect_gradients_of_the_joined_batch(rank, model, reference, steps=2)
    places = [parameter.grad.data_ptr() for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.grad.detach_().zero_()
    x, y = batch(9, 2)
    reference.zero_grad()
    F.cross_entropy(reference(x), y).backward()
    part = slice(rank * PER_RANK, (rank + 1) * PER_RANK)
    F.cross_entropy(model(x[part]), y[part]).backward()
    for ours, theirs, place in zip(model.parameters(), reference.parameters(), places, strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
        assert ours.grad.data_ptr() == place


def test_gradient_views_can_be_detached(ranks: RankPool) -> None:
    ranks.run(detach_gradients)


def train_compiled(rank: int, backend: str) -> None:
    torch.manual_seed(2)
    module = perceptron()
    reference = copy.deepcopy(module)
    model: Any = torch.compile(DistributedDataParallel(module), backend=backend)
    expect_gradients_of_the_joined_batch(rank, model, reference, steps=3)


SLOW = pytest.mark.skipif("MUSTER_TEST_SLOW" not in os.environ, reason="calls a compiler: set MUSTER_TEST_SLOW=1")


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=SLOW)])
def test_models_may_be_compiled(ranks: RankPool, backend: str) -> None:
    ranks.run(train_compiled, backend)


class Checkpointed(nn.Module):
    def __init__(self, body: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.body, self.reentrant = body, reentrant

    def forward(self, x: Tensor) -> Tensor:
        from torch.utils.checkpoint import checkpoint

        return checkpoint(self.body, x, use_reentrant=self.reentrant)


def train_checkpointed(rank: int, reentrant: bool) -> None:
    torch.manual_seed(2)
    reference = perceptron()
    model = DistributedDataParallel(
        Checkpointed(copy.deepcopy(reference), reentrant), static_graph=reentrant, bucket_cap_mb=0.001
    )
    expect_gradients_of_the_joined_batch(rank, model, reference, steps=3, input_needs_gradient=True)


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing_works(ranks: RankPool, reentrant: bool) -> None:
    ranks.run(train_checkpointed, reentrant)


def train_with_autocast(model: nn.Module, part: slice, broken: bool) -> float:
    """Makes three steps in bfloat16, the second one with an infinite loss if `broken`. Returns the final scale."""
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.5), torch.amp.GradScaler("cpu", init_scale=16.0)
    for step in range(3):
        x, y = (each[part] for each in batch(step, 2))
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            output = model(x)
            assert output.dtype == torch.bfloat16
            loss = F.cross_entropy(output, y)
        scaler.scale(loss * torch.inf if step == 1 and broken else loss).backward()
        before = [each.clone() for each in model.parameters()]
        scaler.step(optimizer)
        scaler.update()
        same = [torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True)]
        assert all(same) if step == 1 else not any(same), "the step of the infinite loss alone is left out"
    return scaler.get_scale()


def autocast_and_scale(rank: int) -> str:
    torch.manual_seed(5)
    reference = perceptron()
    model = DistributedDataParallel(copy.deepcopy(reference))
    part = slice(rank * PER_RANK, (rank + 1) * PER_RANK)
    assert train_with_autocast(model, part, broken=rank == 1) == 8, "halved, also where the loss was finite"
    train_with_autocast(reference, slice(None), broken=True)
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=3e-3)
    return digest(model.module)


def test_autocast_and_gradient_scaling_work(ranks: RankPool) -> None:
    assert len(set(ranks.run(autocast_and_scale))) == 1


def save_and_load(rank: int, folder: str) -> None:
    model = DistributedDataParallel(nn.BatchNorm1d(3))
    stock = nn.parallel.DistributedDataParallel(nn.BatchNorm1d(3))
    assert list(model.state_dict()) == list(stock.state_dict())
    stock.load_state_dict(model.state_dict())
    assert isinstance(model, nn.parallel.DistributedDataParallel)
    torch.save(model, f"{folder}/{rank}")
    again = torch.load(f"{folder}/{rank}", weights_only=False)
    again(torch.full((2, 3), float(rank))).sum().backward()
    assert again.module.bias.grad.tolist() == [2.0] * 3


def test_state_dicts_match_torch_and_models_pickle(ranks: RankPool, tmp_path: Any) -> None:
    ranks.run(save_and_load, str(tmp_path))


def check_logging_data(rank: int) -> None:
    model = DistributedDataParallel(perceptron(), bucket_cap_mb=0.001)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for step in range(3):
            model(batch(step, 1)[0]).sum().backward()
    reductions = [event for event in profile.events() if event.name == "muster:all_reduce"]
    assert len(reductions) == 3 * len(model.reducer.bucket_bytes())
    logged = model._get_ddp_logging_data()
    size = sum(each.nbytes for each in model.parameters())
    assert logged["iteration"] == 2
    assert (logged["world_size"], logged["rank"], logged["module_name"]) == (2, rank, "Sequential")
    assert (logged["backend_name"], logged["dtypes"], logged["total_parameter_size_bytes"]) == ("muster", "float", size)
    assert logged["has_rebuilt_buckets"] == 1
    assert sum(map(int, logged["rebuilt_bucket_sizes"].split(", "))) == size
    assert logged["num_buckets_reduced"] == len(logged["rebuilt_bucket_sizes"].split(", ")) > 1
    assert logged["backward_comm_time"] >= logged["backward_compute_comm_overlap_time"] >= 0
    starts = logged["forward_compute_time_start"], logged["backward_compute_time_start"]
    assert starts[0] <= starts[1] <= logged["backward_comm_time_end"]


def test_logging_data_has_buckets_and_times(ranks: RankPool) -> None:
    ranks.run(check_logging_data)


def compare_batch_norm(rank: int) -> None:
    torch.manual_seed(6)
    reference = nn.Sequential(nn.Linear(WIDTH, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.BatchNorm1d(5, momentum=None))
    module = SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(reference))
    model = DistributedDataParallel(module)
    part = slice(0, 3) if rank == 0 else slice(3, 8)  # the parts have different sizes
    for step in range(2):
        x, _ = batch(step, 2)
        reference.zero_grad()
        (reference(x) ** 3).sum().backward()
        model.zero_grad()
        (2 * (model(x[part]) ** 3).sum()).backward()  # 2 ranks: DDP averages gradients
        for ours, theirs in zip(module.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-4)
    for mine, expected in zip(module.buffers(), reference.buffers(), strict=True):
        torch.testing.assert_close(mine, expected)
    module.eval(), reference.eval()
    torch.testing.assert_close(module(x), reference(x))
    with pytest.raises(ValueError, match=r"SyncBatchNorm layers only work with GPU modules, and 0 is one: .* muster"):
        DistributedDataParallel(nn.Sequential(nn.SyncBatchNorm(2), nn.Linear(2, 2)))


def test_sync_batch_norm_matches_the_joined_batch(ranks: RankPool) -> None:
    ranks.run(compare_batch_norm)
