"""`muster explain --devices`."""

from __future__ import annotations

import argparse
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from muster.devices._links import link_between, nvlinks
from muster.devices._sysfs import Device, adapters, gpus

_PATTERNS = {1: "tree", 2: "tree", 3: "tree", 4: "ring", 5: "NVLS", 6: "CollNet"}  # of NCCL's ncclTopoGraph
_MEANINGS = {
    "NVLink": "a link of NVLink, and their number",
    "NVSwitch": "the same, through a switch",
    "one switch": "both are below one switch of PCIe",
    "switches": "several switches of PCIe, and no host bridge",
    "host bridge": "the same host bridge",
    "node": "the same NUMA node",
    "sockets": "the link between NUMA nodes",
    "?": "not known",
}


def describe(devices: list[Device], network: list[Device], links: dict[tuple[str, str], int]) -> str:
    """The devices, and a table with the link of each two."""
    every = [*devices, *network]
    if not every:
        return "no GPU and no network adapter was found"
    lines = []
    for device in every:
        node = f", NUMA node {device.numa_node}" if device.numa_node >= 0 else ""
        lines.append(f"{device.name:12} {device.address:14} {device.kind}{node}")
    if len(every) == 1:
        return "\n".join(lines)
    name_of = link_between(devices, links)
    table = {(one, other): name_of(one, other) for one in every for other in every if one is not other}
    width = max(map(len, [*table.values(), *(each.name for each in every)])) + 2
    lines += ["", f"{'':12} " + "".join(f"{each.name:{width}}" for each in every).rstrip()]
    for one in every:
        row = "".join(f"{table.get((one, other), '-'):{width}}" for other in every)
        lines.append(f"{one.name:12} {row}".rstrip())
    used = {name.split(" x")[0] for name in table.values()}
    return "\n".join([*lines, "", *(f"{name:12} {meaning}" for name, meaning in _MEANINGS.items() if name in used)])


def describe_nccl(file: Path) -> str:
    """What NCCL chose: the file that it writes where NCCL_GRAPH_DUMP_FILE says."""
    lines = []
    for graph in ElementTree.parse(file).getroot().iter("graph"):
        channels = graph.findall("channel")
        if not channels:
            continue
        pattern = _PATTERNS.get(int(graph.get("pattern", 0)), f"pattern {graph.get('pattern')}")
        speeds = f"{graph.get('speedintra')} GB/s each ({graph.get('typeintra')})"
        network = f", {graph.get('speedinter')} GB/s to other nodes ({graph.get('typeinter')})"
        has_network = any(channel.find("net") is not None for channel in channels)
        count = f"{len(channels)} channel{'s' if len(channels) > 1 else ''}"
        lines.append(f"{pattern}: {count}, {speeds}{network if has_network else ''}")
        paths: dict[str, int] = {}
        for channel in channels:
            path = " -> ".join(f"{each.tag}{each.get('dev')}" for each in channel)
            paths[path] = paths.get(path, 0) + 1
        lines += [f"  {path}" + (f"   ({times} times)" if times > 1 else "") for path, times in paths.items()]
    return "\n".join(lines) or "NCCL has chosen nothing: the group has one rank"


def main() -> None:
    parser = argparse.ArgumentParser(
        "muster explain --devices", description="Shows GPUs and network adapters, and how they are linked."
    )
    parser.add_argument(
        "--nccl-graph",
        type=Path,
        metavar="FILE",
        help="also show the rings and trees of NCCL: the file that a job with NCCL_GRAPH_DUMP_FILE=FILE has written",
    )
    parser.add_argument("--sys", type=Path, default=Path("/sys"), help=argparse.SUPPRESS)  # for tests
    parser.add_argument("--nvml", default="libnvidia-ml.so.1", help=argparse.SUPPRESS)
    options = parser.parse_args()
    print(describe(gpus(options.sys), adapters(options.sys), nvlinks(options.nvml)))
    if options.nccl_graph is not None:
        try:
            print("\n" + describe_nccl(options.nccl_graph))
        except (OSError, ElementTree.ParseError, ValueError) as error:
            sys.exit(f"muster explain: {options.nccl_graph} is not a graph of NCCL: {error}")


if __name__ == "__main__":
    main()
