"""Tests that muster.nn.DataParallel with replicas on the CPU gives the same results as the module alone."""

from __future__ import annotations

import copy
import pickle
import threading
from collections import namedtuple
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from muster.nn import DataParallel, data_parallel
from ranks import run_ranks
from torch import Tensor, nn

Pair = namedtuple("Pair", "sums products")


class Net(nn.Module):
    """Takes and returns values of many types, and uses its weight twice."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 5)
        self.second.weight = self.first.weight
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor, *, options: dict[str, Any], name: str = "net") -> dict[str, Any]:
        self.seen += len(x)
        hidden = self.second(F.relu(self.first(x)))
        both = Pair(hidden + options["more"][0], hidden * 2)
        return {"both": both, "loss": hidden.square().mean(), "nothing": None, "names": [x]}


def compare_training(rank: int) -> None:
    torch.manual_seed(4)
    module_alone = Net()
    module = copy.deepcopy(module_alone)
    model = DataParallel(module, 3)
    x, more = torch.randn(7, 5, requires_grad=True), torch.randn(7, 5)
    again = x.detach().clone().requires_grad_()
    ours, expected = model(x, options={"more": [more]}), module_alone(again, options={"more": [more]})
    torch.testing.assert_close(ours["both"], expected["both"])
    assert isinstance(ours["both"], Pair)
    assert ours["loss"].shape == (3,)  # one for each replica
    assert ours["nothing"] is None
    for each in (ours, expected):
        (each["both"].sums * each["both"].products).sum().backward()
    torch.testing.assert_close(x.grad, again.grad)
    for left, right in zip(module.parameters(), module_alone.parameters(), strict=True):
        torch.testing.assert_close(left.grad, right.grad)
    assert module.seen == 3, "the first replica's part: the buffers of the others are dropped"
    assert torch.get_num_threads() == 4


def compare_forward(rank: int) -> None:
    torch.set_num_threads(4)
    compare_training(rank)
    model = DataParallel(nn.Linear(3, 2), [torch.device("cpu")] * 2, output_device=torch.device("cpu"))
    assert model(torch.ones(1, 3)).shape == (1, 2)  # fewer inputs than devices
    assert DataParallel(nn.Linear(3, 2))(torch.ones(2, 3)).shape == (2, 2)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        output = model(torch.ones(4, 3))
    assert (output.dtype, output.requires_grad) == (torch.bfloat16, False)
    nested = DataParallel(nn.Sequential(model, nn.ReLU()), 2)
    assert nested(torch.ones(8, 3)).shape == (8, 2)
    output, (hidden, _) = DataParallel(nn.LSTM(3, 4), 2, dim=1)(torch.ones(6, 4, 3))
    assert (output.shape, hidden.shape) == ((6, 4, 4), (1, 4, 4))
    one = DataParallel(lambda_module((torch.tensor(1.0), "words", 0.5)), 1)
    assert one(torch.ones(3), torch.ones(4)) == (torch.tensor(1.0), "words", 0.5), "as it is, a scalar too"
    linear = nn.Linear(3, 2)
    x = torch.randn(5, 3)
    torch.testing.assert_close(data_parallel(linear, x, 2), linear(x))
    assert list(pickle.loads(pickle.dumps(model)).state_dict()) == ["module.weight", "module.bias"]


def test_cpu_replicas_match_the_module() -> None:
    run_ranks(1, compare_forward)


class BarrierModule(nn.Module):
    """The forward of a replica ends only when the forwards of all replicas have begun."""

    def __init__(self, replicas: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.barrier = threading.Barrier(replicas)

    def forward(self, x: Tensor) -> Tensor:
        self.barrier.wait(30)
        return x * self.weight


def run_concurrently(rank: int) -> None:
    torch.set_num_threads(1)
    module = BarrierModule(3)
    DataParallel(module, 3)(torch.ones(6, 2)).sum().backward()
    assert module.weight.grad is not None and module.weight.grad.tolist() == [6, 6]


def test_replicas_run_concurrently() -> None:
    run_ranks(1, run_concurrently)


class Failing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x[0] > 1:
            raise KeyError("too much")
        return x


def wrong_uses(rank: int) -> None:
    torch.set_num_threads(1)
    with pytest.raises(KeyError, match=r"in replica 1 on device cpu(?s:.*)too much"):
        DataParallel(Failing(), 2)(torch.arange(4.0))
    with pytest.raises(ValueError, match=r"have \[3, 4\] elements along dimension 0: .* 2 replicas"):
        DataParallel(nn.Bilinear(2, 2, 1), 2)(torch.ones(3, 2), torch.ones(4, 2))
    with pytest.raises(TypeError, match="forward returned a str"):
        DataParallel(lambda_module("words"), 2)(torch.ones(2))
    with pytest.raises(RuntimeError, match=r"on device cpu \(device_ids\[0\]\) but weight is on device meta"):
        DataParallel(nn.Linear(2, 2, device="meta"), 2)(torch.ones(2, 2))
    with pytest.raises(TypeError, match="a list of devices or a number of replicas on the CPU, not 'cpu'"):
        DataParallel(nn.Linear(2, 2), "cpu")
    empty: tuple[Any, ...] = (0, [])
    for devices in empty:
        with pytest.raises(ValueError, match="device_ids"):
            DataParallel(nn.Linear(2, 2), devices)


def lambda_module(result: object) -> nn.Module:
    module = nn.Module()
    module.forward = lambda *inputs: result
    return module


def test_wrong_uses_and_replica_errors_raise() -> None:
    run_ranks(1, wrong_uses)
