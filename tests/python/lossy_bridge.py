"""A network between two hosts that loses, delays and reorders packets, and can be cut. It does what tc's netem does,
for kernels without netem. It connects two TUN devices, one in the network namespace of each host.

    lossy_bridge.py [--seed N] [--loss P] [--delay S] [--jitter S] [--reorder P] NAMESPACE NAMESPACE

The devices are called tun0. A line "cut SECONDS" on standard input drops all packets for that time, "cut SECONDS 0"
only those from the first host, and "cut SECONDS 1" only those from the second host. Afterwards it prints "healed". It
ends when standard input ends, and then prints its packet counts as a line of JSON.
"""

import argparse
import ctypes
import fcntl
import heapq
import json
import os
import random
import select
import struct
import time
from dataclasses import asdict, dataclass
from pathlib import Path

TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
CLONE_NEWNET = 0x40000000
LARGEST_PACKET = 65536
MOST_ON_THE_WAY = 20_000


@dataclass
class Figures:
    packets: int = 0
    lost: int = 0
    reordered: int = 0  # delivered after a packet that arrived later
    cut: int = 0
    crowded_out: int = 0
    cuts: int = 0


def device_in(namespace: str) -> int:
    """A TUN device in the network namespace. It stays there when this process enters another namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{namespace}") as file:
        if libc.setns(file.fileno(), CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"setns to {namespace}")
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", b"tun0", IFF_TUN | IFF_NO_PI))
    return device


class Bridge:
    def __init__(self, devices: list[int], options: argparse.Namespace) -> None:
        self.devices, self.options = devices, options
        self.figures = Figures()
        self.draw = [random.Random(f"{options.seed} {side}") for side in range(2)]
        # A heap, by delivery time: (due, number, the device to deliver to, packet).
        self.on_the_way: list[tuple[float, int, int, bytes]] = []
        self.numbers = 0
        self.last_to_leave = [0, 0]
        self.cut_sides: set[int] = set()
        self.cut_until = 0.0

    def accept(self, side: int, packet: bytes) -> None:
        """Drops, delays or reorders a packet from that host."""
        draw, options = self.draw[side], self.options
        lost, late = draw.random() < options.loss, draw.random() < options.reorder
        delay = options.delay + draw.uniform(0, options.jitter) + (options.delay if late else 0)
        self.figures.packets += 1
        self.numbers += 1
        if side in self.cut_sides:
            self.figures.cut += 1
        elif lost:
            self.figures.lost += 1
        elif len(self.on_the_way) >= MOST_ON_THE_WAY:
            self.figures.crowded_out += 1
        else:
            heapq.heappush(self.on_the_way, (time.monotonic() + delay, self.numbers, 1 - side, packet))

    def deliver(self) -> None:
        now = time.monotonic()
        while self.on_the_way and self.on_the_way[0][0] <= now:
            _, number, side, packet = heapq.heappop(self.on_the_way)
            if 1 - side in self.cut_sides:
                self.figures.cut += 1
                continue
            if number < self.last_to_leave[side]:
                self.figures.reordered += 1
            self.last_to_leave[side] = max(self.last_to_leave[side], number)
            try:
                os.write(self.devices[side], packet)
            except OSError:  # the device is down, or full
                self.figures.crowded_out += 1
        if self.cut_sides and now >= self.cut_until:
            self.cut_sides = set()
            print("healed", flush=True)

    def obey(self, line: str) -> None:
        _, seconds, *side = line.split()
        self.cut_sides = {int(side[0])} if side else {0, 1}
        self.cut_until = time.monotonic() + float(seconds)
        self.figures.cuts += 1

    def timeout(self) -> float | None:
        """Milliseconds until the next packet is due or the cut ends; None if nothing is planned."""
        due = [self.on_the_way[0][0]] if self.on_the_way else []
        due += [self.cut_until] if self.cut_sides else []
        return max(0.0, (min(due) - time.monotonic()) * 1000 + 0.5) if due else None

    def run(self) -> None:
        poll = select.poll()
        for file in (*self.devices, 0):
            poll.register(file, select.POLLIN)
        while True:
            for file, _ in poll.poll(self.timeout()):
                if file == 0:
                    lines = os.read(0, 4096).decode().splitlines()
                    if not lines:
                        return
                    for line in lines:
                        self.obey(line)
                else:
                    self.read_all(self.devices.index(file))
            self.deliver()

    def read_all(self, side: int) -> None:
        """Reads at most 64 packets, so that packets that are due are delivered in time."""
        for _ in range(64):
            try:
                packet = os.read(self.devices[side], LARGEST_PACKET)
            except OSError:  # no more packets, or the device is down
                return
            self.accept(side, packet)


def main() -> None:
    parser = argparse.ArgumentParser(description=Path(__file__).name)
    parser.add_argument("--seed", type=int, default=0)
    for name in ("loss", "delay", "jitter", "reorder"):
        parser.add_argument(f"--{name}", type=float, default=0.0)
    parser.add_argument("namespaces", nargs=2)
    options = parser.parse_args()
    bridge = Bridge([device_in(namespace) for namespace in options.namespaces], options)
    print("ready", flush=True)
    bridge.run()
    print(json.dumps(asdict(bridge.figures)), flush=True)


if __name__ == "__main__":
    main()
