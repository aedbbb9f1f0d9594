"""How two devices are linked."""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Callable
from typing import Any

from muster.devices._sysfs import Device

_SUCCESS = 0
_MAX_LINKS = 36  # of a GPU; NVML has 18 for those of 2022


def pci_link(one: Device, other: Device) -> str:
    """The nearest thing that both are below, in words."""
    common = 0
    for a, b in zip(one.bridges, other.bridges, strict=False):
        if a != b:
            break
        common += 1
    if common > 1 or (common == 1 and not one.bridges[0].startswith("pci")):
        bridges = max(len(one.bridges), len(other.bridges)) - common
        return "one switch" if bridges <= 1 else "switches"
    if common == 1:
        return "host bridge"
    if min(one.numa_node, other.numa_node) < 0:
        return "?"
    return "node" if one.numa_node == other.numa_node else "sockets"


def nvlinks(library: str = "libnvidia-ml.so.1") -> dict[tuple[str, str], int]:
    """The number of NVLinks by the PCI addresses of both ends: a GPU, and another GPU or a switch of NVLink. Empty
    without the library of NVIDIA's driver.
    """
    try:
        nvml = ctypes.CDLL(library)
        if nvml.nvmlInit_v2() != _SUCCESS:
            return {}
    except (OSError, AttributeError):
        return {}
    try:
        return dict(_count_links(nvml))
    except AttributeError:  # a driver that is too old
        return {}
    finally:
        nvml.nvmlShutdown()


class _PciInfo(ctypes.Structure):
    _fields_ = (
        ("bus_id_legacy", ctypes.c_char * 16),
        ("domain", ctypes.c_uint),
        ("bus", ctypes.c_uint),
        ("device", ctypes.c_uint),
        ("pci_device_id", ctypes.c_uint),
        ("pci_sub_system_id", ctypes.c_uint),
        ("bus_id", ctypes.c_char * 32),
    )

    def address(self) -> str:
        """As /sys has it: "0000:3b:00.0"."""
        domain, *rest = self.bus_id.decode().lower().split(":")
        return ":".join([domain[-4:], *rest])


def _count_links(nvml: Any) -> Counter[tuple[str, str]]:
    links: Counter[tuple[str, str]] = Counter()
    count = ctypes.c_uint()
    nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
    for index in range(count.value):
        device = ctypes.c_void_p()
        if nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)) != _SUCCESS:
            continue
        here = _PciInfo()
        nvml.nvmlDeviceGetPciInfo_v3(device, ctypes.byref(here))
        for link in range(_MAX_LINKS):
            active, there = ctypes.c_uint(), _PciInfo()
            if nvml.nvmlDeviceGetNvLinkState(device, link, ctypes.byref(active)) != _SUCCESS or not active.value:
                continue
            if nvml.nvmlDeviceGetNvLinkRemotePciInfo_v2(device, link, ctypes.byref(there)) == _SUCCESS:
                links[here.address(), there.address()] += 1
    return links


def link_between(gpus: list[Device], links: dict[tuple[str, str], int]) -> Callable[[Device, Device], str]:
    """A function that names the link of two devices. GPUs that reach a switch of NVLink reach each other through it."""
    own = {gpu.address for gpu in gpus}
    to_switch = Counter[str]()
    for (here, there), count in links.items():
        if there not in own:
            to_switch[here] += count

    def name(one: Device, other: Device) -> str:
        direct = links.get((one.address, other.address), 0)
        if direct:
            return f"NVLink x{direct}"
        through = min(to_switch[one.address], to_switch[other.address])
        return f"NVSwitch x{through}" if through else pci_link(one, other)

    return name
