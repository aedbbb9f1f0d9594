"""Trains between two hosts whose network loses, delays and reorders packets, and is cut for a while. All sums must be
right. MUSTER_SOAK_SECONDS sets the duration, MUSTER_SEED replays a run."""

import os
import random
import time
from pathlib import Path

from hosts import two_lossy_hosts
from lossy_training import Training

LONGEST_CUT = 4.0  # seconds: far shorter than the group's timeout


def test_training_is_right_through_loss_and_partitions(release_build: Path, tmp_path: Path) -> None:
    seed = int(os.environ.get("MUSTER_SEED", random.randrange(1 << 31)))
    print(f"MUSTER_SEED={seed}")
    draw = random.Random(seed)
    began = time.monotonic()
    until = began + float(os.environ.get("MUSTER_SOAK_SECONDS", 0))
    cuts: list[float] = []
    with two_lossy_hosts(seed=seed, loss=0.05, delay=0.05, jitter=0.02, reorder=0.05) as (hosts, network):
        training = Training(hosts, release_build / "src/muster/cli/muster", tmp_path, seed, timeout=300)
        try:
            training.wait_for_rounds(1)
            while not cuts or time.monotonic() < until:
                cuts.append(draw.uniform(1, LONGEST_CUT))
                network.cut(cuts[-1], draw.choice((None, 0, 1)))
                network.wait_until_healed()
                training.wait_for_rounds(3)
            outputs = training.end()
        finally:
            training.close()
        packets = network.end()
    assert [agent.returncode for agent in training.agents] == [0, 0], outputs
    assert all(text.count(f"{training.rounds()} rounds were right") == 2 for text in outputs), outputs
    assert packets["lost"] > 0 and packets["reordered"] > 0 and packets["cut"] > 0, packets
    print(
        f"soak: network: seed {seed}, {time.monotonic() - began:.0f} s: {training.rounds()} rounds of 4 ranks right,"
        f" {len(cuts)} partitions of up to {max(cuts):.1f} s healed; of {packets['packets']} packets {packets['lost']}"
        f" lost, {packets['reordered']} reordered, {packets['cut']} cut off"
    )
