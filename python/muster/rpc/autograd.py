"""Distributed autograd: gradients flow back through remote calls.

    with autograd.context() as context_id:
        loss = rpc.rpc_sync("ps", forward, args=(inputs,)).sum()
        autograd.backward(context_id, [loss])
        optimizer.step(context_id)

The names and the behavior are those of torch.distributed.autograd. What differs: tensors that the loss does not use
make nobody wait (torch hangs); a worker that dies ends the backward pass at all workers, with an error that names it;
an asyncio task has its own context.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from muster.rpc import _agent, _calls, _context

__all__ = ["backward", "context", "get_gradients"]


@contextmanager
def context() -> Iterator[int]:
    """One step of training across workers. Yields its id, which is the same at all workers.

    Calls that are made inside, and calls that their functions make, are recorded: gradients flow back through their
    arguments and results. At the end the gradients are dropped at all workers. Contexts cannot be nested.
    """
    if _context.current.get() != _context.NONE:
        raise RuntimeError("a context of distributed autograd is open already: contexts cannot be nested")
    agent = _agent.current().agent
    context_id = agent.new_context()
    token = _context.current.set(context_id)
    try:
        yield context_id
    finally:
        _context.current.reset(token)
        agent.end_context(context_id)


def backward(
    context_id: int, roots: Sequence[torch.Tensor], retain_graph: bool = False, timeout: float = _calls.UNSET_TIMEOUT
) -> None:
    """Computes the gradients of all parameters that `roots` depend on, at the workers where they are.

    roots: tensors of this worker with one element, usually the loss. They count as summed.
    retain_graph: keep the graph, so that backward() can run again in this context. Gradients add up.
    timeout: in seconds; 0 is none. By default that of init_rpc().

    Gradients do not go to `.grad`: read them with get_gradients(), or hand the context to a DistributedOptimizer.

    Raises what a worker has raised, muster.PeerLostError if one was lost, muster.TimeoutError, and ValueError if
    there is no root, or one does not require gradients. The pass has then ended everywhere, and gradients may be
    incomplete.
    """
    roots = list(roots)
    if not roots:
        raise ValueError("backward() needs at least one root")
    _agent.current().agent.backward(context_id, roots, retain_graph, _calls.seconds_of(timeout))


def get_gradients(context_id: int) -> dict[torch.Tensor, torch.Tensor]:
    """The parameters of this worker that have a gradient in the context, and their gradients.

    muster.Error if no call of the context has reached this worker, or if it has ended.
    """
    return dict(_agent.current().agent.gradients(context_id, True))


def gradients_here(context_id: int) -> dict[torch.Tensor, torch.Tensor]:
    """The same, but empty if no call of the context has reached this worker."""
    return dict(_agent.current().agent.gradients(context_id, False))
