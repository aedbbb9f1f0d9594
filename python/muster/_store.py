"""Stores that the processes of a job share."""

from __future__ import annotations

from datetime import timedelta

from muster import _C


def store(
    url: str | None = None, *, timeout: timedelta | float = timedelta(minutes=5), secret: bytes | None = None
) -> _C.Store:
    """Opens a store, usable wherever torch takes one: `init_process_group("muster", store=muster.store(url), ...)`.

    url: "tcp://host:port", "unix:/path" or "unix:@name" (a muster store server), "redis://[:password@]host[/prefix]",
        "rediss://..." (over TLS), "etcd://host[,host...][/prefix]", "file:///path", or "memory:" (this process only);
        docs/reference/store.md has the details. None: the job's own store, in a program started by `muster run`.
    timeout: for opening it, and for each later wait (set_timeout() changes that); a number is in seconds.
    secret: the job's secret, for tcp: and unix:, of 16 bytes or more, or empty for none; by default MUSTER_SECRET (hex)
        from the environment.

    The result is a torch.distributed.Store. Its `host` and `port` are those of the server at tcp: or redis:, like a
    TCPStore's, and None for other URLs and for the job's own store.

    Raises ValueError for a malformed URL or a secret that is too short, and muster.Error for a store that is
    unreachable or not in this build.
    """
    given = timeout if isinstance(timeout, timedelta) else timedelta(seconds=timeout)
    if url is None:
        return _C.store_from_environment(given)
    return _C.open_store(url, secret, given)
