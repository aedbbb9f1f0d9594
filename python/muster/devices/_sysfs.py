"""Reads GPUs and network adapters from Linux's /sys."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

_GPU_VENDORS = {"0x10de": "NVIDIA", "0x1002": "AMD", "0x8086": "Intel"}
_FUNCTION = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")  # the address of a PCI function


@dataclass(frozen=True)
class Device:
    """A PCI device: a GPU or a network adapter."""

    name: str  # "gpu0", "mlx5_0"
    kind: str  # "NVIDIA GPU", "InfiniBand, 400 Gb/s"
    address: str  # of PCI; empty if it has none
    numa_node: int  # -1: not known
    bridges: tuple[str, ...] = field(repr=False)  # of PCI above it, the root complex first


def gpus(sys: Path = Path("/sys")) -> list[Device]:
    """In the order of their PCI addresses. With GPUs of NVIDIA or AMD, those of Intel are not counted."""
    found: dict[str, list[Path]] = {}
    for device in sorted((sys / "bus/pci/devices").glob("*")):
        vendor = _word(device / "vendor")
        if _word(device / "class").startswith("0x03") and vendor in _GPU_VENDORS:
            found.setdefault(vendor, []).append(device)
    for vendor, devices in sorted(found.items(), key=lambda each: list(_GPU_VENDORS).index(each[0])):
        return [_device(f"gpu{index}", f"{_GPU_VENDORS[vendor]} GPU", each) for index, each in enumerate(devices)]
    return []


def adapters(sys: Path = Path("/sys")) -> list[Device]:
    """RDMA adapters, then the other network interfaces that have hardware."""
    result, behind_rdma = [], set()
    for adapter in sorted((sys / "class/infiniband").glob("*")):
        port = next(iter(sorted((adapter / "ports").glob("*"))), adapter)
        fabric = "RoCE" if _word(port / "link_layer") == "Ethernet" else "InfiniBand"
        rate = " ".join(_text(port / "rate").split()[:2])
        result.append(_device(adapter.name, f"{fabric}, {rate}" if rate else fabric, adapter / "device"))
        behind_rdma.add((adapter / "device").resolve())
    for interface in sorted((sys / "class/net").glob("*")):
        device = interface / "device"
        if not device.exists() or device.resolve() in behind_rdma:
            continue
        speed = _word(interface / "speed")  # in Mbit/s; -1 or an error if it is not known
        rate = f", {int(speed) / 1000:g} Gb/s" if speed.isdigit() and int(speed) > 0 else ""
        result.append(_device(interface.name, f"Ethernet{rate}", device))
    return result


def _device(name: str, kind: str, directory: Path) -> Device:
    path = directory.resolve()
    while path.name and not _FUNCTION.fullmatch(path.name):  # such as virtio2, which is below a PCI function
        path = path.parent
    node = _word(path / "numa_node")
    bridges = tuple(part for part in path.parent.parts if part.startswith("pci") or _FUNCTION.fullmatch(part))
    return Device(name, kind, path.name, int(node) if node.lstrip("-").isdigit() else -1, bridges)


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # such as the speed of an interface that is down
        return ""


def _word(path: Path) -> str:
    return (_text(path).split() or [""])[0]
