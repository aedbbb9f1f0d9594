"""Identifiers that were renamed to the field's terms, and must not come back."""

from __future__ import annotations

import re
from collections.abc import Iterator

CODE = re.compile(r"^(src|tests|benchmarks|examples|python/bindings)/.*\.(h|inc|cpp)$")

# By the folders in which a name is retired: what it is called now.
RETIRED: dict[str, dict[str, str]] = {
    r"": {
        "C10dOverStore": "C10dStoreAdapter",
        "CoreKeeper": "CpuMigrator",
        "Extent": "CostInputs",
        "Linker": "LinkTable",
        "MessageOffice": "P2pDelegate",
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
    r"src/muster/torch/": {"Filling": "OpenBucket", "TwoStepHook": "TwoPhaseHook", "give_memory": "allocate_buckets"},
}

Row = tuple[str, int, str, str]  # path, line, rule, advice


def check(code: dict[str, str]) -> Iterator[Row]:
    """`code`: the C++ files, their comments and literals blanked."""
    for path, text in code.items():
        if not CODE.match(path):
            continue
        now = {old: new for folder, names in RETIRED.items() if re.match(folder, path) for old, new in names.items()}
        pattern = re.compile(rf"\b({'|'.join(now)})\b")
        for number, line in enumerate(text.split("\n"), start=1):
            for match in pattern.finditer(line):
                yield path, number, "retired-name", f"{match[1]} is called {now[match[1]]}"
