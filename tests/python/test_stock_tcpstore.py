"""Tests clients of the installed torch's own TCPStore with muster's store server."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import TCPStore

ROOT = Path(__file__).resolve().parents[2]
LONG = timedelta(seconds=60)  # for answers that must arrive


SERVER = Path(os.environ.get("MUSTER_BUILD_DIR", ROOT / "build/release")) / "tests/store/store_serve"
pytestmark = pytest.mark.skipif(not SERVER.exists(), reason=f"{SERVER} is not built")


@pytest.fixture(params=["root", "proxy", "tiered"])
def port(request: pytest.FixtureRequest) -> Iterator[int]:
    command = [str(SERVER), f"--{request.param}"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield int(process.stdout.readline())
        process.communicate(timeout=30)
        assert process.returncode == 0


@pytest.fixture(params=[True, False], ids=["libuv", "legacy"])
def connect(request: pytest.FixtureRequest, port: int) -> Callable[[], Any]:
    def connect() -> TCPStore:
        return TCPStore(
            "127.0.0.1",
            port,
            None,
            is_master=False,
            timeout=LONG,
            wait_for_workers=False,
            use_libuv=request.param,
        )

    return connect


def in_thread(body: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(body()))
    thread.start()
    return thread, results


def test_keys(connect: Callable[[], Any]) -> None:
    store = connect()
    store.set("k", "v")
    assert store.get("k") == b"v"
    binary = bytes(range(256)) * 40000
    store.set("binary", binary)
    assert connect().get("binary") == binary
    assert store.num_keys() == 2
    assert store.delete_key("k")
    assert not store.delete_key("k")
    assert store.check(["binary"])
    assert not store.check(["binary", "k"])
    assert store.check([])
    assert store.list_keys() == ["binary"]


def test_counters_and_compare_set(connect: Callable[[], Any]) -> None:
    store = connect()
    assert store.add("n", 5) == 5
    assert store.add("n", -7) == -2
    assert store.get("n") == b"-2"
    assert store.compare_set("c", "absent", "x") == b"absent"
    assert store.compare_set("c", "", "1") == b"1"
    assert store.compare_set("c", "0", "2") == b"1"
    assert store.compare_set("c", "1", "2") == b"2"


def test_append_and_many_keys(connect: Callable[[], Any]) -> None:
    store = connect()
    assert store.has_extended_api()
    store.append("a", "one ")
    store.append("a", "two")
    assert store.get("a") == b"one two"
    keys = [f"key {i}" for i in range(1000)]
    store.multi_set(keys, [str(i) for i in range(1000)])
    assert store.multi_get(keys[::-1]) == [str(i).encode() for i in range(999, -1, -1)]


def test_queues(connect: Callable[[], Any]) -> None:
    store = connect()
    try:
        store.queue_push("q", "1")
    except NotImplementedError:
        pytest.skip("torch's legacy backend has no queues")
    store.queue_push("q", "2")
    assert store.queue_len("q") == 2
    assert store.num_keys() == 0
    assert store.queue_pop("q") == b"1"
    assert store.queue_pop("q", block=False) == b"2"
    with pytest.raises(dist.QueueEmptyError):
        store.queue_pop("q", block=False)
    other = connect()
    thread, results = in_thread(lambda: other.queue_pop("later"))
    store.queue_push("later", "3")
    thread.join()
    assert results == [b"3"]


def test_waits_are_released(connect: Callable[[], Any]) -> None:
    waiting, setting = connect(), connect()
    thread, results = in_thread(lambda: (waiting.wait(["a", "b"]), waiting.get("a"))[1])
    setting.set("b", "2")
    setting.set("a", "1")
    thread.join()
    assert results == [b"1"]


def test_timeouts_leave_the_connection_usable(connect: Callable[[], Any]) -> None:
    store = connect()
    for _ in range(3):
        store.set_timeout(timedelta(seconds=0.2))
        with pytest.raises(dist.DistStoreError, match="timeout"):
            store.get("missing")
        store.set_timeout(LONG)  # so that a slow server can still answer
        with pytest.raises(dist.DistStoreError, match="timeout"):
            store.wait(["missing", "too"], timedelta(milliseconds=50))
        store.set("k", "v")
        assert store.get("k") == b"v"


def test_a_release_after_a_cancellation_is_dropped(connect: Callable[[], Any]) -> None:
    """The timeout of a wait and the arrival of its key cross, many times. Client and server must stay in step."""
    setting, waiting = connect(), connect()
    for i in range(60):
        timer = threading.Timer(0.0185 + 0.00005 * i, setting.set, (f"crossing {i}", "v"))
        timer.start()
        try:
            waiting.wait([f"crossing {i}"], timedelta(milliseconds=20))
        except dist.DistStoreError as error:
            assert "timeout" in str(error)
        timer.join()
        assert waiting.add(f"in step {i}", 7) == 7


def test_barriers(connect: Callable[[], Any]) -> None:
    stores = [connect() for _ in range(4)]
    if not hasattr(stores[0], "barrier"):
        pytest.skip("this torch has no store barrier")
    for _ in range(20):  # the same key each time: torch's own server releases a reused one at once
        threads = [in_thread(partial(s.barrier, "b", 4, timedelta(seconds=60)))[0] for s in stores]
        for thread in threads:
            thread.join()
    with pytest.raises(dist.DistStoreError):
        stores[0].barrier("lonely", 2, timedelta(milliseconds=50))
    assert stores[0].add("in step", 1) == 1


def test_clones_and_prefixes(connect: Callable[[], Any]) -> None:
    store = connect()
    copy = store.clone()
    copy.set("k", "v")
    assert store.get("k") == b"v"
    prefixed = dist.PrefixStore("p", store)
    prefixed.set("k", "w")
    assert store.get("p/k") == b"w"


def test_add_to_text_closes_only_that_connection(connect: Callable[[], Any]) -> None:
    store = connect()
    store.set("text", "no number")
    with pytest.raises(dist.DistError):
        store.add("text", 1)
    assert connect().get("text") == b"no number"


def test_a_timeout_names_keys_and_duration(connect: Callable[[], Any]) -> None:
    store = connect()
    with pytest.raises(dist.DistStoreError, match=r"wait timeout after 30ms, keys: .*/missing"):
        store.wait(["missing"], timedelta(milliseconds=30))
    store.set_timeout(timedelta(milliseconds=40))
    assert store.timeout == timedelta(milliseconds=40)
    with pytest.raises(dist.DistStoreError, match="timeout"):
        store.multi_get(["missing", "too"])
    store.set_timeout(LONG)
    store.set("too", "late")
    assert store.get("too") == b"late"


def test_keys_are_counted_once(connect: Callable[[], Any]) -> None:
    store = connect()
    assert store.num_keys() == 0
    for _ in range(3):
        store.set("set", "v")
        store.add("counter", 1)
        store.append("appended", "v")
        store.compare_set("compared", "", "v")
    assert store.num_keys() == 4
    assert sorted(store.list_keys()) == ["appended", "compared", "counter", "set"]
    for key in store.list_keys():
        assert store.delete_key(key)
    assert store.num_keys() == 0
    assert store.list_keys() == []
    assert not store.check(["set"])


def test_many_keys_are_waited_for(connect: Callable[[], Any]) -> None:
    waiting, setting = connect(), connect()
    keys = [f"rank {i}" for i in range(50)]
    thread, results = in_thread(lambda: waiting.multi_get(keys))
    for key in reversed(keys):
        setting.set(key, key.upper())
    thread.join()
    assert results == [[key.upper().encode() for key in keys]]
    setting.multi_set(["empty", "full"], ["", "x" * 100_000])
    assert waiting.multi_get(["full", "empty"]) == [b"x" * 100_000, b""]


def test_a_queue_is_first_in_first_out(connect: Callable[[], Any]) -> None:
    store, other = connect(), connect()
    try:
        store.queue_push("q", "0")
    except NotImplementedError:
        pytest.skip("torch's legacy backend has no queues")
    for i in range(1, 20):
        other.queue_push("q", str(i))
    assert [store.queue_pop("q") for _ in range(20)] == [str(i).encode() for i in range(20)]
    assert store.queue_len("q") == 0
    store.set_timeout(timedelta(milliseconds=40))
    with pytest.raises(dist.DistStoreError, match="timeout"):
        store.queue_pop("q")
    store.set_timeout(LONG)
    other.queue_push("q", "kept")
    assert store.queue_pop("q") == b"kept"


def test_prefixes_isolate_clients(connect: Callable[[], Any]) -> None:
    store = connect()
    tenants = [dist.PrefixStore(f"tenant {i}", store) for i in range(3)]
    for i, tenant in enumerate(tenants):
        tenant.set("k", str(i))
        assert tenant.add("n", i) == i
        assert tenant.compare_set("c", "", str(i)) == str(i).encode()
    assert [tenant.get("k") for tenant in tenants] == [b"0", b"1", b"2"]
    nested: Any = dist.PrefixStore("inner", tenants[0])
    nested.multi_set(["a", "b"], ["1", "2"])
    assert store.multi_get(["tenant 0/inner/a", "tenant 0/inner/b"]) == [b"1", b"2"]
    assert tenants[1].delete_key("k")
    assert not tenants[1].check(["k"])
    assert tenants[2].check(["k"])


def test_waiting_for_workers_leaves_one_key(port: int) -> None:
    def join(_: int) -> TCPStore:
        return TCPStore("127.0.0.1", port, 4, is_master=False, timeout=timedelta(seconds=60), wait_for_workers=True)

    with ThreadPoolExecutor(4) as pool:
        stores = list(pool.map(join, range(4)))
    assert [store.num_keys() for store in stores] == [1] * 4


def test_many_clients_share_a_counter_and_a_barrier(connect: Callable[[], Any]) -> None:
    def work(store: Any) -> bytes:
        for _ in range(50):
            store.add("sum", 1)
        if store.add("done", 1) == 8:
            store.set("all done", store.get("sum"))
        return bytes(store.get("all done"))

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(work, [connect() for _ in range(8)])) == [b"400"] * 8


def test_garbage_closes_the_connection(port: int) -> None:
    for garbage in (b"GET / HTTP/1.1\r\n\r\n", b"\x00\x01\x02\x03\x04", b"\x00\xce\xf7\x85\x3c\xff"):
        with socket.create_connection(("127.0.0.1", port), timeout=30) as client:
            client.sendall(garbage)
            assert client.recv(1) == b""


WORKER = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")  # env://, and the store is a server that is there already
tensor = torch.full((4,), float(dist.get_rank() + 1))
dist.all_reduce(tensor)
assert tensor.tolist() == [6.0] * 4, tensor
dist.barrier()
dist.destroy_process_group()
"""


def test_gloo_forms_its_group_over_it(port: int) -> None:
    """Sets TORCHELASTIC_USE_AGENT_STORE as torchrun does, which makes every rank a client."""
    environment = os.environ | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": "3",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    workers = [
        subprocess.Popen([sys.executable, "-c", WORKER], env=environment | {"RANK": str(rank)}) for rank in range(3)
    ]
    assert [worker.wait(timeout=240) for worker in workers] == [0, 0, 0]
