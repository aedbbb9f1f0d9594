"""Training between hosts with an unreliable network. Every result is checked."""

import json
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from hosts import Host
from launching import START_TIMEOUT, TIMEOUT

SECRET = "00112233445566778899aabbccddeeff"

# Each round checks a sum of whole numbers, which is exact, and a training step: a copy of the model repeats it alone on
# all ranks' batches.
TRAINING = """
import copy, json, os, signal, sys, torch, torch.distributed as dist, muster
from datetime import timedelta
folder, seed, timeout = sys.argv[1], int(sys.argv[2]), timedelta(seconds=float(sys.argv[3]))

def report(what, text):
    with open(f"{folder}/{what}.part", "w") as file:
        file.write(text)
    os.rename(f"{folder}/{what}.part", f"{folder}/{what}")

def drawn(*what):
    return torch.Generator().manual_seed(hash((seed, *what)) % 2**63)

def numbers(round, rank, count):
    return torch.randint(-1000, 1000, (count,), generator=drawn(round, rank, count)).float()

def batch(round, rank):
    return torch.randn(8, 64, generator=drawn(round, rank), dtype=torch.float64)

def step(model, optimizer, inputs):
    optimizer.zero_grad()
    model(inputs).square().mean().backward()
    optimizer.step()

dist.init_process_group("muster")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(seed)
alone = torch.nn.Linear(64, 16).double()
together = torch.nn.parallel.DistributedDataParallel(copy.deepcopy(alone))
optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (alone, together)]

def check_round(round):
    for count in (1, 1000, 20_000):
        data = numbers(round, rank, count)
        dist.all_reduce(data)
        assert torch.equal(data, sum(numbers(round, r, count) for r in range(size))), f"a wrong sum in round {round}"
    step(together, optimizers[1], batch(round, rank))
    step(alone, optimizers[0], torch.cat([batch(round, r) for r in range(size)]))
    for mine, theirs in zip(together.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)

try:
    over, round = torch.zeros(1), 0
    while not over.item():
        check_round(round)
        round += 1
        if rank == 0:
            report("rounds", str(round))
        over.fill_(os.path.exists(f"{folder}/stop"))
        dist.all_reduce(over, dist.ReduceOp.MAX)
        dist.distributed_c10d._set_pg_timeout(timeout)  # not before: ranks come late to form it
except (dist.DistBackendError, AssertionError) as error:
    named_rank = getattr(error, "rank", None)  # torch's DDP raises errors without it
    report(f"error.{rank}", json.dumps({"kind": type(error).__name__, "rank": named_rank, "text": str(error)}))
    signal.pause()  # the test ends all
dist.destroy_process_group()
print(f"{round} rounds were right", flush=True)
"""


class Training:
    """Runs two ranks on each host until it is ended."""

    def __init__(self, hosts: Sequence[Host], binary: Path, folder: Path, seed: int, timeout: float) -> None:
        self.folder = folder
        script = folder / "training.py"
        script.write_text(TRAINING)
        self.agents = []
        for node, host in enumerate(hosts):
            command = [str(binary), "run", "--nnodes=2", f"--node-rank={node}", "--nproc-per-node=2"]
            command += [f"--master-addr={hosts[0].address}", "--master-port=29500", "--rdzv-conf=heartbeat_timeout=600"]
            command += [str(script), str(folder), str(seed), str(timeout)]
            self.agents.append(host.start(command, env={"MUSTER_SECRET": SECRET}))

    def rounds(self) -> int:
        path = self.folder / "rounds"
        return int(path.read_text()) if path.exists() else 0

    def errors(self) -> list[dict[str, object]]:
        return [json.loads(path.read_text()) for path in sorted(self.folder.glob("error.[0-9]"))]

    def wait_until(self, done: Callable[[], bool], timeout: float = TIMEOUT, errors_expected: bool = False) -> None:
        deadline = time.monotonic() + timeout
        while not done():
            assert time.monotonic() < deadline, self.kill_and_describe()
            assert errors_expected or not self.errors(), self.errors()
            assert all(agent.poll() is None for agent in self.agents), self.kill_and_describe()
            threading.Event().wait(0.02)

    def kill_and_describe(self) -> str:
        ended = [agent.poll() for agent in self.agents]
        self.close()
        outputs = [agent.communicate(timeout=TIMEOUT)[0] for agent in self.agents]
        return f"{self.rounds()} rounds, errors {self.errors()}, statuses {ended}, outputs {outputs}"

    def wait_for_rounds(self, count: int) -> None:
        """Waits until `count` more rounds are done."""
        wanted = self.rounds() + count
        self.wait_until(lambda: self.rounds() >= wanted, TIMEOUT if self.rounds() > 0 else START_TIMEOUT)

    def end(self) -> list[str]:
        (self.folder / "stop").touch()
        return [agent.communicate(timeout=TIMEOUT)[0] for agent in self.agents]

    def close(self) -> None:
        for agent in self.agents:
            agent.kill()
            agent.wait(TIMEOUT)
