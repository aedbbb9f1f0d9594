"""Compares a function that muster's backend has compiled with the function itself."""

from __future__ import annotations

import unittest.mock
from collections.abc import Callable, Sequence
from typing import Any

import torch
from muster.graph._plan.costs import Costs
from torch import Tensor
from torch._inductor.utils import run_and_get_code


def compare_with_eager(
    function: Callable[..., Tensor],
    inputs: Sequence[Tensor],
    rates: Costs,
    loss: Callable[[Tensor], Tensor],
    rtol: float | None = None,
    atol: float | None = None,
) -> list[str]:
    """Compiles the function as if `rates` had been measured. Asserts that its result, and the gradients of
    loss(result), are those of the function. Returns the code of the forward and of the backward.
    """
    results = []
    for run in (function, torch.compile(function, backend="muster", fullgraph=True)):
        leaves = [each.clone().requires_grad_() for each in inputs]

        def step(run: Any = run, leaves: list[Tensor] = leaves) -> Tensor:
            value: Tensor = run(*leaves)
            loss(value).backward()  # type: ignore[no-untyped-call]
            return value

        with unittest.mock.patch("muster.graph._backend.costs_of", return_value=rates):
            value, codes = run_and_get_code(step)
        results.append([value, *(leaf.grad for leaf in leaves)])
    torch.testing.assert_close(results[1], results[0], rtol=rtol, atol=atol)
    return codes  # type: ignore[no-any-return]
