"""`muster explain --devices`, with a made-up /sys, a library in place of NVIDIA's, and a graph as NCCL writes it."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

GRAPH = """<graphs version="1">
  <graph id="0" pattern="4" crossnic="0" nchannels="2" speedintra="24" speedinter="21" latencyinter="0"
         typeintra="NVL" typeinter="PIX" samechannels="1">
    <channel><net dev="0"/><gpu dev="0"/><gpu dev="1"/><net dev="0"/></channel>
    <channel><net dev="0"/><gpu dev="0"/><gpu dev="1"/><net dev="0"/></channel>
  </graph>
  <graph id="1" pattern="1" crossnic="0" nchannels="1" speedintra="42" speedinter="42" latencyinter="0"
         typeintra="NVL" typeinter="PIX" samechannels="1">
    <channel><gpu dev="1"/><gpu dev="0"/></channel>
  </graph>
  <graph id="2" pattern="6" crossnic="0" nchannels="0" speedintra="0" speedinter="0" typeintra="LOC" typeinter="LOC"
         samechannels="1"/>
</graphs>
"""


def add_function(sys: Path, bridges: str, address: str, node: int, device_class: str, vendor: str = "0x10de") -> Path:
    directory = sys / "devices" / bridges / address
    directory.mkdir(parents=True)
    for name, text in (("class", device_class), ("vendor", vendor), ("numa_node", str(node))):
        (directory / name).write_text(text + "\n")
    listed = sys / "bus/pci/devices"
    listed.mkdir(parents=True, exist_ok=True)
    (listed / address).symlink_to(directory)
    return directory


@pytest.fixture
def sys(tmp_path: Path) -> Path:
    """Two sockets. On the first: gpu0 and an RDMA adapter below one switch, and gpu1. On the second: gpu2 and gpu3
    below two switches of one host bridge, and eth1.
    """
    sys = tmp_path / "sys"
    first, second = "pci0000:3a/0000:3a:00.0/0000:3a:01.0", "pci0000:85/0000:85:00.0"
    add_function(sys, f"{first}/0000:3b:00.1", "0000:3b:00.0", 0, "0x030200")
    rdma = add_function(sys, f"{first}/0000:3b:00.1", "0000:3b:00.4", 0, "0x020700", "0x15b3")
    add_function(sys, "pci0000:3c", "0000:3c:00.0", 0, "0x030200")
    for gpu, switch in (("0000:86:00.0", "0000:85:01.0/0000:85:02.0"), ("0000:87:00.0", "0000:85:03.0/0000:85:04.0")):
        add_function(sys, f"{second}/{switch}", gpu, 1, "0x030200")
    ethernet = add_function(sys, "pci0000:90", "0000:90:00.0", 1, "0x020000", "0x8086")
    (sys / "class/infiniband/mlx5_0/ports/1").mkdir(parents=True)
    (sys / "class/infiniband/mlx5_0/device").symlink_to(rdma)
    (sys / "class/infiniband/mlx5_0/ports/1/link_layer").write_text("InfiniBand\n")
    (sys / "class/infiniband/mlx5_0/ports/1/rate").write_text("400 Gb/sec (4X NDR)\n")
    for name, device in (("ib0", rdma), ("eth1", ethernet), ("lo", None)):
        (sys / "class/net" / name).mkdir(parents=True)
        if device is not None:
            (sys / "class/net" / name / "device").symlink_to(device)
    (sys / "class/net/eth1/speed").write_text("25000\n")
    return sys


def explain(*arguments: str | Path) -> str:
    done = subprocess.run(["muster", "explain", "--devices", *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def links_of(text: str) -> dict[tuple[str, str], str]:
    """The table, by row and column."""
    header, *rows = text.split("\n\n")[1].splitlines()
    names = re.split(r"\s\s+", header.strip())
    cells = {row.split()[0]: re.split(r"\s\s+", row[12:].strip()) for row in rows}
    return {(row, column): link for row, links in cells.items() for column, link in zip(names, links, strict=True)}


def test_links_of_pci_are_named(sys: Path) -> None:
    text = explain("--sys", sys, "--nvml", "/missing/libnvidia-ml.so")
    assert "gpu0         0000:3b:00.0   NVIDIA GPU, NUMA node 0\n" in text
    assert "mlx5_0       0000:3b:00.4   InfiniBand, 400 Gb/sec, NUMA node 0\n" in text
    assert "eth1         0000:90:00.0   Ethernet, 25 Gb/s, NUMA node 1\n" in text
    assert "ib0" not in text, "it is mlx5_0"
    links = links_of(text)
    assert links["gpu0", "mlx5_0"] == links["mlx5_0", "gpu0"] == "one switch"
    assert links["gpu0", "gpu1"] == "node"
    assert links["gpu2", "gpu3"] == "switches"
    assert links["gpu2", "eth1"] == "node"
    assert links["gpu0", "gpu2"] == "sockets"
    assert links["gpu0", "gpu0"] == "-"
    assert "NVLink" not in text


def test_nvlinks_and_switches_are_counted(sys: Path, tmp_path: Path) -> None:
    library = tmp_path / "libfake_nvml.so"
    source = Path(__file__).with_name("fake_nvml.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    links = links_of(explain("--sys", sys, "--nvml", library))
    assert links["gpu0", "gpu1"] == "NVLink x2"
    assert links["gpu2", "gpu3"] == "NVSwitch x6"
    assert links["gpu0", "gpu2"] == "sockets"


def test_the_rings_of_nccl_are_shown(sys: Path, tmp_path: Path) -> None:
    graph = tmp_path / "graph.xml"
    graph.write_text(GRAPH)
    text = explain("--sys", sys, "--nccl-graph", graph)
    assert "ring: 2 channels, 24 GB/s each (NVL), 21 GB/s to other nodes (PIX)\n" in text
    assert "  net0 -> gpu0 -> gpu1 -> net0   (2 times)\n" in text
    assert "tree: 1 channel, 42 GB/s each (NVL)\n  gpu1 -> gpu0\n" in text


def test_a_file_that_is_no_graph_is_refused(tmp_path: Path) -> None:
    (tmp_path / "graph.xml").write_text("no graph")
    command = ["muster", "explain", "--devices", "--nccl-graph", str(tmp_path / "graph.xml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "graph.xml is not a graph of NCCL: syntax error" in done.stderr


def test_a_machine_without_devices_says_so(tmp_path: Path) -> None:
    assert explain("--sys", tmp_path) == "no GPU and no network adapter was found\n"
