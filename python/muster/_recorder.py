"""The recorded operations of this process, and traces of all ranks on one clock."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from muster import _C
from muster._group import all_gather, gather_bytes, process_group_of

_ROUNDS = 20  # in which the ranks exchange times


def dump(last: int | None = None) -> list[dict[str, Any]]:
    """Returns the last operations of each group of this process, in the format of `muster dump --json`. They are
    ordered by group, and in a group the oldest operation comes first.

    Returns at most `last` operations of each group; by default all recorded ones (MUSTER_RECORDER, 1024 by default).
    Times are in seconds since 1970, durations in microseconds.
    """
    recordings: list[dict[str, Any]] = json.loads(_C.recordings(sys.maxsize if last is None else last))
    return recordings


def trace(path: str | os.PathLike[str], group: dist.ProcessGroup | None = None) -> None:
    """Writes the recorded operations to `path`, for https://ui.perfetto.dev or chrome://tracing.

    Without `group`, these are the operations of this process. With `group`, all its ranks must call this, and its rank
    0 writes one trace of all ranks on its own clock. Ranks of one host share a clock. Between hosts, messages measure
    the difference of the clocks, to within half of the fastest round trip.
    """
    write(json.loads(_C.trace()), path, group)


def write(own: dict[str, Any], path: str | os.PathLike[str], group: dist.ProcessGroup | None) -> None:
    """Does the work of trace(). `own`: the trace of this process."""
    if group is None:
        _merge([own], path)
        return
    group = process_group_of(group)
    difference = _clock_difference(group)
    own["otherData"]["begin_monotonic_ns"] -= difference
    texts = gather_bytes(json.dumps(own).encode(), group)
    if texts:
        _merge([json.loads(text) for text in texts], path)


def _merge(traces: list[dict[str, Any]], path: str | os.PathLike[str]) -> None:
    begins = [trace["otherData"]["begin_monotonic_ns"] for trace in traces if trace["traceEvents"]]
    first = min(begins, default=0)
    events = []
    for number, trace in enumerate(traces):
        later = (trace["otherData"]["begin_monotonic_ns"] - first) / 1000
        for event in trace["traceEvents"]:
            if "ts" in event:
                event["ts"] += later
            event["pid"] += number << 16  # each trace numbers its processes from one
            events.append(event)
    merged = {"displayTimeUnit": "ns", "otherData": {"begin_monotonic_ns": first}, "traceEvents": events}
    Path(path).write_text(json.dumps(merged))


def _clock() -> bytes:
    """Identifies the monotonic clock: by the boot, and by the time namespace with its offset (time_namespaces(7))."""
    boot, namespace = Path("/proc/sys/kernel/random/boot_id").read_text(), Path("/proc/self/ns/time")
    return hashlib.sha256(f"{boot}{namespace.readlink() if namespace.is_symlink() else ''}".encode()).digest()


def _clock_difference(group: dist.ProcessGroup) -> int:
    """Returns by how many ns this rank's monotonic clock is ahead of that of the group's rank 0.

    No message arrives before it was sent. So the times at which this rank sent and rank 0 received bound the
    difference on one side, and the reverse direction bounds it on the other side. The result uses the tightest bounds
    of several rounds.
    """
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    begins = torch.empty(_ROUNDS, size, dtype=torch.int64)
    ends = torch.empty(_ROUNDS, dtype=torch.int64)
    for number in range(_ROUNDS):
        begun = all_gather(torch.tensor([time.monotonic_ns()]), group)
        ends[number] = time.monotonic_ns()
        begins[number] = begun[:, 0]
    all_ends = all_gather(ends, group)
    clocks = all_gather(torch.frombuffer(bytearray(_clock()), dtype=torch.uint8), group)
    if torch.equal(clocks[0], clocks[rank]):
        return 0
    at_most = int((ends - begins[:, 0]).min())
    at_least = int((begins[:, rank] - all_ends[0]).max())
    return (at_least + at_most) // 2
