"""Rejects identifiers that were renamed to standard terms."""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterator

CODE = re.compile(r"^(src|tests|benchmarks|examples|python)/.*\.(h|inc|cpp|pyi?)$")

# The new names of retired identifiers, by the folders in which they are retired.
RETIRED: dict[str, dict[str, str]] = {
    r"": {
        "C10dOverStore": "C10dStoreAdapter",
        "CoreKeeper": "CpuMigrator",
        "Extent": "CostInputs",
        "Linker": "LinkTable",
        "MessageOffice": "P2pEngine",
        "Messenger": "P2pEngine",
        "NodeMember": "RendezvousClient",
        "Passage": "ScheduleRunner",
        "QuietLog": "RateLimitedLog",
        "SessionEnd": "ReliableSession",
        "SessionHost": "ServerSession",
        "Sighting": "RankState",
        "StoreOverC10d": "MusterStoreAdapter",
        "Team": "HostComm",
        "TeamMemory": "HostCommMemory",
        "kLargestNote": "kMaxControlMessage",
    },
    r"src/muster/(group|flight|collective)/": {"Member": "RankInfo", "Runner": "CollectiveEngine"},
    r"src/muster/group/": {
        "Rendezvous": "RankExchange",
        "Turn": "ExecutionLock",
        "Untold": "HookQueue",
        "drained_": "Departure",
        "kLastWords": "kLastReportTime",
        "kOffer": "kRequestToSend",
        "untold_": "HookQueue",
        "watch_process": "monitor_process",
    },
    r"src/muster/transport/": {"Opening": "LinkNegotiation", "Opened": "NegotiatedLink", "parcel": "packet"},
    r"src/muster/store/": {
        "Channel": "BufferedConnection",
        "Dialect": "Protocol",
        "Hold": "ShardLock",
        "Newcomer": "AcceptedConnection",
        "Pulse": "FrameTiming",
    },
    r"src/muster/launch/": {
        "LastWord": "DeathNotice",
        "LocalHost": "SpawnLauncher",
        "NodeCall": "NodeEvent",
        "Outlet": "AsyncWriter",
        "WorkerHost": "WorkerLauncher",
        "complain": "print_error",
    },
    r"python/muster/": {
        "Averager": "DiLoCo",
        "OuterOptimizer": "PeriodicSyncOptimizer",
        "PendingAverage": "DiLoCo",
        "_Apart": "_HookGroup",
        "_HOMES": "_LAZY_IMPORTS",
        "_OneBucketAtATime": "_SerializedHook",
        "_Surroundings": "_ThreadLocalState",
        "_gates": "_torch_patches",
        "seen_step_report": "step_report_from_times",
    },
    r"python/muster/_zygote/": {
        "ALSO": "COMMON_MODULES",
        "HELPFUL": "BACKEND_MODULES",
        "Tops": "ImportedPackages",
        "_occupied": "_has_children",
        "_told": "_asked_to_end",
    },
    r"python/muster/bench/": {"Way": "Variant", "renew": "recreate"},
    r"tests/python/": {
        "PATIENCE": "TIMEOUT",
        "dawdle": "delay_until_returned",
        "losing": "lose_rank_in_backward",
        "outside": "external_server",
        "starving": "end_data_early",
        "whom": "victim",
        "widow": "name_dead_rank",
    },
    r"src/muster/torch/": {
        "Filling": "OpenBucket",
        "Pending": "PendingWorks",
        "TwoStepHook": "TwoPhaseHook",
        "give_memory": "allocate",
        "settle": "complete",
        "with_store": "hold_store",
    },
    r"src/muster/steps/": {"OfRank": "RankStats", "stands_out": "is_significant"},
}

Row = tuple[str, int, str, str]  # path, line, rule, advice


def check(code: dict[str, str], text: dict[str, str]) -> Iterator[Row]:
    """`code` has the C++ files, without comments and literals. `text` has all files, including those of Python."""
    python = {path: text[path] for path in text if path.endswith((".py", ".pyi"))}
    for path, source in {**code, **python}.items():
        now = {old: new for folder, names in RETIRED.items() if re.match(folder, path) for old, new in names.items()}
        if CODE.match(path) and any(old in source for old in now):
            for line, name in _identifiers(path, source):
                if name in now:
                    yield path, line, "retired-name", f"{name} is called {now[name]}"


def _identifiers(path: str, source: str) -> Iterator[tuple[int, str]]:
    """Yields line numbers and identifiers."""
    if not path.endswith((".py", ".pyi")):
        for number, line in enumerate(source.split("\n"), start=1):
            yield from ((number, name) for name in re.findall(r"\w+", line))
        return
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.NAME:
            yield token.start[0], token.string
