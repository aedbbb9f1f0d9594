"""Tests groups that are formed later, by processes that do not know which groups the other ranks formed before."""

from __future__ import annotations

import contextlib
import os
import pickle
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import forks
import pytest
import torch
import torch.distributed as dist
from launching import free_port, wait_until

import muster

LIMIT = timedelta(seconds=60)


class Actor:
    """A process that calls the functions that the test sends it."""

    def __init__(self) -> None:
        self._pipe, its = forks.CONTEXT.Pipe()
        self._process = forks.Process(target=_act, args=(its,))
        self._process.start()
        its.close()

    def begin(self, body: Callable[..., Any], *arguments: Any) -> None:
        self._pipe.send((body, arguments))

    def end(self) -> Any:
        assert self._pipe.poll(120), "no answer"
        failure, result = self._pipe.recv()
        assert failure is None, failure
        return pickle.loads(result)

    def kill(self) -> None:
        self._process.kill()
        self._process.join()
        self._pipe.close()


def _act(pipe: Connection) -> None:
    torch.set_num_threads(1)
    with contextlib.suppress(EOFError):  # the test is over
        while True:
            body, arguments = pipe.recv()
            try:
                pipe.send((None, pickle.dumps(body(*arguments))))
            except BaseException:
                pipe.send((traceback.format_exc(), None))


@pytest.fixture
def actor() -> Iterator[Callable[[], Actor]]:
    actors: list[Actor] = []

    def start() -> Actor:
        actors.append(Actor())
        return actors[-1]

    yield start
    for each in actors:
        each.kill()


def run(bodies: dict[Actor, Callable[..., Any]], *arguments: Any) -> list[Any]:
    """Runs a body at each actor, at the same time. Ranks are in the order of the actors."""
    for rank, (each, body) in enumerate(bodies.items()):
        each.begin(body, rank, len(bodies), *arguments)
    return [each.end() for each in bodies]


def join(rank: int, size: int, url: str) -> None:
    dist.init_process_group("muster", init_method=url, rank=rank, world_size=size, timeout=LIMIT)


def join_store(rank: int, size: int, path: str) -> None:
    # A FileStore deletes its file when it is destroyed, so this one is kept.
    global kept
    kept = dist.FileStore(path, -1)
    dist.init_process_group("muster", store=kept, rank=rank, world_size=size, timeout=LIMIT)


kept: Any = None


def total(rank: int, size: int) -> float:
    """The sum of 1 to size, over the default group and over a group made from it."""
    sums = []
    for group in (None, dist.new_group(timeout=LIMIT)):
        data = torch.tensor(float(rank + 1))
        dist.all_reduce(data, group=group)
        sums.append(data.item())
    assert sums[0] == sums[1]
    ends = sorted({0, size - 1})
    if rank in ends:
        part = dist.new_group(ends, timeout=LIMIT, use_local_synchronization=True)
        data = torch.tensor(float(rank + 1))
        dist.all_reduce(data, group=part)
        assert data.item() == sum(end + 1 for end in ends)
    return sums[0]


def leave(rank: int, size: int) -> None:
    dist.destroy_process_group()


def join_and_leave(rank: int, size: int, url: str) -> float:
    join(rank, size, url)
    result = total(rank, size)
    leave(rank, size)
    return result


def url_of_new_port() -> str:
    return f"tcp://127.0.0.1:{free_port()}"


def same(body: Callable[..., Any], *actors: Actor) -> dict[Actor, Callable[..., Any]]:
    return dict.fromkeys(actors, body)


@pytest.mark.parametrize("survivor", [0, 1])
def test_a_survivor_forms_a_group_with_a_fresh_process(actor: Callable[[], Actor], survivor: int) -> None:
    old, lost = actor(), actor()
    both = (old, lost) if survivor == 0 else (lost, old)
    for _ in range(2):
        assert run(same(join_and_leave, *both), url_of_new_port()) == [3, 3]
    lost.kill()
    fresh = actor()
    for order in ((old, fresh), (fresh, old)):
        assert run(same(join_and_leave, *order), url_of_new_port()) == [3, 3]


def form_after_restarts() -> None:
    os.environ["TORCHELASTIC_RESTART_COUNT"] = "1"


def test_ranks_with_different_restart_counts_form(actor: Callable[[], Actor]) -> None:
    """As when each replica is a job of its own, and one of the jobs was restarted."""
    old, fresh = actor(), actor()
    fresh.begin(form_after_restarts)
    fresh.end()
    assert run(same(join_and_leave, old, fresh), url_of_new_port()) == [3, 3]


@pytest.mark.parametrize("first", ["old", "fresh"])
def test_generations_form_in_one_store_in_any_order(actor: Callable[[], Actor], tmp_path: Path, first: str) -> None:
    path = str(tmp_path / "store")
    old, lost = actor(), actor()
    for _ in range(3):
        assert run(same(join_store, old, lost), path) == [None, None]
        assert run(same(total, old, lost)) == [3, 3]
        assert run(same(leave, old, lost)) == [None, None]
    lost.kill()
    fresh = actor()
    early, late = (old, fresh) if first == "old" else (fresh, old)
    ranks = {early: 0, late: 1}
    store = dist.FileStore(path, -1)
    keys = store.num_keys()
    early.begin(join_store, ranks[early], 2, path)
    wait_until(lambda: store.num_keys() > keys)
    late.begin(join_store, ranks[late], 2, path)
    early.end()
    late.end()
    assert run(same(total, old, fresh)) == [3, 3]


def test_a_group_grows_and_shrinks_in_one_store(actor: Callable[[], Actor], tmp_path: Path) -> None:
    path = str(tmp_path / "store")
    actors = [actor() for _ in range(3)]
    for size in (2, 3, 2, 1, 3):
        for body in (join_store, total, leave):
            results = run(same(body, *actors[:size]), *([path] if body is join_store else []))
        assert results == [None] * size


def try_to_join(rank: int, size: int, path: str, limit: float) -> str:
    try:
        store = dist.FileStore(path, -1)
        dist.init_process_group("muster", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=limit))
    except muster.Error as error:
        return str(error)
    return ""


def test_a_successor_rank_is_found(actor: Callable[[], Actor], tmp_path: Path) -> None:
    path = str(tmp_path / "store")
    impatient, successor, other = actor(), actor(), actor()
    impatient.begin(try_to_join, 0, 2, path, 0.2)
    assert "1 of 2 ranks came" in impatient.end()
    assert run(same(join_store, successor, other), path) == [None, None]
    assert run(same(total, successor, other)) == [3, 3]
