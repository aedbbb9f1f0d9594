"""init_process_group(init_method="redis://..." or "etcd://..."): the ranks meet in a store that outlives them.

The store may still hold keys of earlier jobs with the same URL, even of jobs that died during the rendezvous.
Therefore each rank above 0 pushes a new random name, and rank 0 answers with a token for this rendezvous. Keys that
have the token as their prefix belong to this job only. Rank 0 also answers names of dead ranks; no process reads these
answers.
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

JOINING = "joining"  # a queue of messages to rank 0: each rank's name, and then the token as a confirmation


def handler(url: str, timeout: timedelta = default_pg_timeout, **_: object) -> Iterator[tuple[Store, int, int]]:
    """A handler for torch.distributed.register_rendezvous_handler()."""
    address, rank, size = _without_rank_and_size(url)
    store = open_store(address, timeout=timeout)
    yield PrefixStore(_agree_on_token(store, rank, size), store), rank, size
    raise RuntimeError(
        f"the ranks cannot rendezvous again over {urlsplit(url).scheme}://; call init_process_group() again"
    )


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


def _agree_on_token(store: Store, rank: int, size: int) -> str:
    """Returns the token of this rendezvous."""
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
