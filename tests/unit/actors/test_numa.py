"""The pool goes to the NUMA node of the GPU, where there is a choice."""

from pathlib import Path

import pytest

from actors.numa import numa_node_of
from actors.shared_memory import SharedMapping


def create_sys(root: Path, num_nodes: int, node_of_gpu: str | None) -> Path:
    for node in range(num_nodes):
        (root / f"devices/system/node/node{node}").mkdir(parents=True)
    gpu = root / "bus/pci/devices/0001:c1:00.0"
    gpu.mkdir(parents=True)
    if node_of_gpu is not None:
        (gpu / "numa_node").write_text(f"{node_of_gpu}\n")
    return root


@pytest.mark.parametrize(
    ("num_nodes", "node_of_gpu", "expected"),
    [(2, "1", 1), (2, "0", 0), (2, "-1", None), (2, None, None), (1, "0", None)],
)
def test_the_node_of_a_gpu_is_what_sysfs_says_if_there_are_several(
    tmp_path, num_nodes, node_of_gpu, expected
):
    sys = create_sys(tmp_path, num_nodes, node_of_gpu)
    assert numa_node_of("0001:c1:00.0", sys) == expected


@pytest.mark.skipif(not Path("/proc/self/numa_maps").exists(), reason="this kernel knows no NUMA")
def test_memory_is_asked_of_the_preferred_node():
    mapping = SharedMapping.create("hotset-numa-test", 2**20, is_allocated=False)
    mapping.prefer_numa_node(0)
    mapping.allocate(0, 2**20)
    mapping.memory[0] = 1
    (line,) = [li for li in Path("/proc/self/numa_maps").read_text().splitlines() if "hotset-numa-test" in li]
    assert "prefer:0" in line
    assert "N0=" in line


def test_a_node_that_is_not_there_is_an_error():
    mapping = SharedMapping.create("hotset-numa-test", 4096, is_allocated=False)
    with pytest.raises(OSError, match="NUMA node 900"):
        mapping.prefer_numa_node(900)
