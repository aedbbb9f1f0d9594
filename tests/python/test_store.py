"""Tests muster's stores through torch's interface, and torch's stores through muster's."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launching import free_port
from ranks import run_ranks

import muster


def test_a_muster_store_is_a_torch_store() -> None:
    store: Any = muster.store("memory:")
    assert issubclass(type(store), dist.Store)
    store.set("k", "v")
    assert store.get("k") == b"v"
    assert store.add("n", 5) == 5
    assert store.add("n", -2) == 3
    assert store.compare_set("k", "v", "w") == b"w"
    assert store.compare_set("k", "x", "y") == b"w"
    assert store.compare_set("absent", "x", "y") == b"x"
    assert store.check(["k", "n"])
    assert not store.check(["k", "absent"])
    assert store.num_keys() == 2
    assert store.delete_key("n")
    assert not store.delete_key("n")
    store.append("k", "+")
    store.multi_set(["a", "b"], ["1", "2"])
    assert store.multi_get(["b", "k"]) == [b"2", b"w+"]
    assert store.has_extended_api()
    store.queue_push("q", "item")
    assert store.queue_len("q") == 1
    assert store.queue_pop("q") == b"item"
    with pytest.raises(dist.QueueEmptyError):
        store.queue_pop("q", False)
    store.wait(["a", "b"])
    assert store.clone().get("a") == b"1"
    prefixed = dist.PrefixStore("group", store)
    prefixed.set("k", "inner")
    assert store.get("group/k") == b"inner"
    assert (store.host, store.port) == (None, None)


def test_wait_timeouts_match_torch() -> None:
    thirty = timedelta(milliseconds=30)
    for timeout in (0.03, thirty):
        store: Any = muster.store("memory:", timeout=timeout)
        assert store.timeout == thirty
    with pytest.raises(dist.DistStoreError, match="absent"):
        store.get("absent")
    with pytest.raises(dist.DistStoreError, match="absent"):
        store.wait(["absent"], timedelta(milliseconds=20))


def test_wrong_addresses_raise_clear_errors() -> None:
    with pytest.raises(ValueError, match="file://"):
        muster.store("gopher://localhost")
    with pytest.raises(muster.Error, match=r"127\.0\.0\.1:1"):
        muster.store("tcp://127.0.0.1:1", timeout=timedelta(seconds=1))


def test_weak_secrets_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="secret: a secret of 2 bytes can be guessed; it takes 16 or more"):
        muster.store("tcp://127.0.0.1:1", secret=b"ab")
    monkeypatch.setenv("MUSTER_SECRET", "abcd")
    with pytest.raises(ValueError, match="MUSTER_SECRET: a secret of 2 bytes"):
        muster.store("tcp://127.0.0.1:1")


def test_a_store_server_is_a_torch_store(release_build: Path) -> None:
    secret = bytes(range(32))
    command: list[str | Path] = [release_build / "src/muster/cli/muster", "store", "serve", "--listen", "127.0.0.1:0"]
    environment = os.environ | {"MUSTER_SECRET": secret.hex()}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as server:
        try:
            assert server.stdout is not None
            url = server.stdout.readline().strip()
            store: Any = muster.store(url, secret=secret)
            other: Any = muster.store(url, secret=secret)
            prefixed: Any = dist.PrefixStore("group", store)
            for each in (store, other.clone(), prefixed.underlying_store):
                assert f"tcp://{each.host}:{each.port}" == url
            store.set("k", b"\x00\xff")
            assert other.get("k") == b"\x00\xff"
            assert [store.add("n", 2), other.add("n", 3)] == [2, 5]
            assert other.clone().num_keys() == 2
            with pytest.raises(dist.DistStoreError, match="absent"):
                store.wait(["absent"], timedelta(milliseconds=20))
            with pytest.raises(muster.Error, match="secret"):
                muster.store(url, secret=b"another job's secret", timeout=timedelta(seconds=30))
        finally:
            server.terminate()


def over_a_muster_store(rank: int, url: str) -> None:
    dist.barrier()  # a Gloo group fails to form at a rank if another rank leaves already
    dist.destroy_process_group()
    dist.init_process_group("muster", store=muster.store(url), rank=rank, world_size=2)
    data = torch.ones(2)
    dist.all_reduce(data)
    assert data.tolist() == [2.0, 2.0]


def test_groups_form_over_a_muster_store(tmp_path: Path) -> None:
    run_ranks(2, over_a_muster_store, f"file://{tmp_path}/job", backend="gloo")


def over_torchs_tcp_store(rank: int) -> None:
    server = dist.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False) if rank == 0 else None
    port = [server.port if server else 0]
    dist.broadcast_object_list(port)
    store = server or dist.TCPStore("127.0.0.1", port[0], 2, is_master=False)
    dist.destroy_process_group()
    dist.init_process_group("muster", store=store, rank=rank, world_size=2)
    data = torch.ones(2)
    dist.all_reduce(data)
    assert data.tolist() == [2.0, 2.0]
    dist.barrier()


def test_groups_form_over_torchs_tcp_store() -> None:
    run_ranks(2, over_torchs_tcp_store, backend="gloo")


JOB = """
import torch.distributed as dist
import muster
dist.init_process_group("muster")
store = muster.store()
rank, size = dist.get_rank(), dist.get_world_size()
store.set(f"from {rank}", str(rank))
print(store.get(f"from {(rank + 1) % size}").decode(), store.add("seen", 1) <= size)
dist.destroy_process_group()
"""


def test_the_ranks_of_a_job_share_its_store(release_build: Path, run: Callable[..., str], tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(JOB)
    command = [release_build / "src/muster/cli/muster", "run", "--nproc-per-node", "2", script]
    output = run(command, env={"MUSTER_PYTHON": sys.executable})
    assert sorted(output.splitlines()) == ["[rank 0] 1 True", "[rank 1] 0 True"]


def absent(rank: int) -> str:
    dist.destroy_process_group()
    with pytest.raises(muster.Error) as caught:
        dist.init_process_group(
            "muster", store=dist.HashStore(), rank=0, world_size=3, timeout=timedelta(milliseconds=300)
        )
    return f"{type(caught.value).__name__}: {caught.value}"


def test_missing_ranks_are_named() -> None:
    (message,) = run_ranks(1, absent)
    assert message.startswith("TimeoutError: ")
    assert "1" in message
    assert "2" in message


def serve(program: str, *arguments: str) -> subprocess.Popen[bytes]:
    """Starts a server program. Skips the test if it is not installed, unless MUSTER_REQUIRE_STORES is set."""
    path = shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin")
    if path is None and not os.environ.get("MUSTER_REQUIRE_STORES"):
        pytest.skip(f"{program} is not installed")
    assert path is not None, f"{program} is not installed"
    return subprocess.Popen([path, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def open_when_up(url: str) -> dist.Store:
    deadline = time.monotonic() + 60
    while True:
        try:
            return muster.store(url)
        except muster.Error:
            if time.monotonic() > deadline:
                raise


def certificate_for(host: str, folder: Path) -> dict[str, Path]:
    """A certificate of its own authority."""
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl to make certificates")
    files = {"cert-file": folder / "redis.pem", "key-file": folder / "redis.key", "ca-cert-file": folder / "redis.pem"}
    words = ["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "1"]
    words += ["-subj", "/CN=redis", "-addext", f"subjectAltName=IP:{host}"]
    words += ["-keyout", str(files["key-file"]), "-out", str(files["cert-file"])]
    subprocess.run(["openssl", *words], check=True, capture_output=True, timeout=100)
    return files


@pytest.fixture(scope="module", params=["redis", "rediss", "etcd"])
def url(request: pytest.FixtureRequest, server_folder: Path) -> Iterator[str]:
    """The URL of a Redis or an etcd server that the test starts."""
    port, peer = free_port(), free_port()
    environment = pytest.MonkeyPatch()
    if request.param in ("redis", "rediss"):
        options = {"port": port, "bind": "127.0.0.1", "dir": server_folder, "save": ""}
        if request.param == "rediss":
            files = certificate_for("127.0.0.1", server_folder)
            options |= {"port": 0, "tls-port": port, "tls-auth-clients": "no"}
            options |= {f"tls-{name}": file for name, file in files.items()}
            environment.setenv("SSL_CERT_FILE", str(files["ca-cert-file"]))  # an authority that the system trusts
        server = serve("redis-server", *(word for name, value in options.items() for word in (f"--{name}", str(value))))
    else:
        client, peers = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{peer}"
        options = {
            "data-dir": server_folder,
            "heartbeat-interval": 20,
            "election-timeout": 200,
            "listen-client-urls": client,
            "advertise-client-urls": client,
            "listen-peer-urls": peers,
            "initial-advertise-peer-urls": peers,
            "initial-cluster": f"default={peers}",
        }
        server = serve("etcd", *(f"--{name}={value}" for name, value in options.items()))
    try:
        yield f"{request.param}://127.0.0.1:{port}/python"
    finally:
        environment.undo()
        server.kill()
        server.wait()


def test_redis_and_etcd_are_torch_stores(url: str) -> None:
    store: Any = open_when_up(f"{url}/store")
    assert issubclass(type(store), dist.Store)
    server = ("127.0.0.1", int(url.split(":")[2].split("/")[0])) if url.startswith("redis") else (None, None)
    assert (store.host, store.port) == server
    store.set("k", b"\x00\xff")
    assert store.get("k") == b"\x00\xff"
    assert store.add("n", 2) == 2
    assert store.num_keys() == 2
    store.queue_push("q", "item")
    assert store.queue_pop("q") == b"item"
    store.set_timeout(timedelta(milliseconds=50))
    with pytest.raises(dist.DistStoreError, match="absent"):
        store.get("absent")


def by_init_method(rank: int, url: str, *backends: str) -> list[float]:
    for backend in backends:
        dist.destroy_process_group()
        dist.init_process_group(backend, init_method=url, rank=rank, world_size=2, timeout=timedelta(seconds=60))
        data = torch.full((2,), float(rank + 1))
        dist.all_reduce(data)
    return data.tolist()


def test_groups_form_by_the_url_of_redis_or_etcd(url: str) -> None:
    store = open_when_up(url)
    store.queue_push("joining", "1 0123456789abcdef0123456789abcdef")  # left by a rank that died while it joined
    # A new group must not read the keys that an earlier group left in the store.
    assert run_ranks(2, by_init_method, url, "muster", "muster", "gloo") == [[3.0, 3.0], [3.0, 3.0]]


@pytest.mark.parametrize("scheme", ["file", "tcp"])
def test_groups_form_by_torchs_own_urls(scheme: str, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/file" if scheme == "file" else f"tcp://127.0.0.1:{free_port()}"
    assert run_ranks(2, by_init_method, url, "muster") == [[3.0, 3.0], [3.0, 3.0]]


def test_an_init_method_without_a_rank_names_what_is_missing() -> None:
    with pytest.raises(ValueError, match="rank= and world_size="):
        dist.init_process_group("muster", init_method="redis://127.0.0.1:1")
