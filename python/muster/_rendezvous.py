"""init_process_group(init_method="redis://..." or "etcd://..."): the ranks meet in a store that outlives them.

Such a store still holds what earlier jobs left under the same URL, also those that died half-way. So each rank above 0
pushes a name that nobody had before, and rank 0 answers to it with a token that it made for this meeting: what has the
token for a prefix is of this job alone. Names of the dead get an answer that nobody reads.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING
from urllib.parse import urlsplit, urlunsplit

from torch._C._distributed_c10d import PrefixStore
from torch.distributed.constants import default_pg_timeout

from muster._store import store as open_store

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

JOINING = "joining"  # the queue in which ranks tell rank 0 who they are, and then that they know the token


def handler(url: str, timeout: timedelta = default_pg_timeout, **_: object) -> Iterator[tuple[Store, int, int]]:
    """What torch.distributed.register_rendezvous_handler takes."""
    address, rank, size = _without_rank_and_size(url)
    store = open_store(address, timeout=timeout)
    yield PrefixStore(_meet(store, rank, size), store), rank, size
    raise RuntimeError(f"the ranks cannot meet again by {urlsplit(url).scheme}://; call init_process_group() again")


def _without_rank_and_size(url: str) -> tuple[str, int, int]:
    parts = urlsplit(url)
    pairs = [pair.partition("=") for pair in parts.query.split("&") if pair]
    ours = {name: value for name, _, value in pairs if name in ("rank", "world_size")}
    rest = "&".join("".join(pair) for pair in pairs if pair[0] not in ours)
    try:
        return urlunsplit(parts._replace(query=rest)), int(ours["rank"]), int(ours["world_size"])
    except (KeyError, ValueError):
        raise ValueError(
            f"init_method {parts.scheme}:// needs the arguments rank= and world_size= of init_process_group()"
        ) from None


def _meet(store: Store, rank: int, size: int) -> str:
    """The token of this meeting."""
    name = secrets.token_hex(16)
    if rank > 0:
        store.queue_push(JOINING, f"{rank} {name}")
        token = store.get(f"meeting/{name}").decode()
        store.delete_key(f"meeting/{name}")
        store.queue_push(JOINING, f"{rank} {token}")
        return token
    missing = set(range(1, size))
    while missing:
        other, said = store.queue_pop(JOINING).decode().split()
        if said == name:
            missing.discard(int(other))
        else:
            store.set(f"meeting/{said}", name)
    return name
