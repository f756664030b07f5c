"""Which NUMA node a GPU hangs on: host memory of another one is reached over the link between the sockets."""

from __future__ import annotations

from pathlib import Path
from typing import Final

_SYS: Final = Path("/sys")


def numa_node_of(pci_address: str, sys: Path = _SYS) -> int | None:
    """The NUMA node of a PCI device.

    Args:
        pci_address: such as `0000:c1:00.0`.
        sys: where sysfs is mounted.
    Returns: None if the machine has one node, or does not tell.
    """
    if len(list((sys / "devices/system/node").glob("node[0-9]*"))) < 2:
        return None
    file = sys / f"bus/pci/devices/{pci_address}/numa_node"
    node = int(file.read_text()) if file.exists() else -1
    return None if node < 0 else node
