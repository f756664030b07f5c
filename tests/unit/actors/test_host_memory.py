from pathlib import Path

import pytest

from actors.host_memory import available_memory_bytes

GIB = 2**30


def create_root(root: Path, cgroup: str | None, files: dict[str, str]) -> Path:
    files = {"proc/meminfo": f"MemTotal: {64 * 2**20} kB\nMemAvailable: {48 * 2**20} kB\n", **files}
    if cgroup is not None:
        files["proc/self/cgroup"] = cgroup
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return root


def v2(path: str, limit: int | str, usage: int, inactive_file: int = 0) -> dict[str, str]:
    return {
        f"sys/fs/cgroup{path}/memory.max": f"{limit}\n",
        f"sys/fs/cgroup{path}/memory.current": f"{usage}\n",
        f"sys/fs/cgroup{path}/memory.stat": f"anon 1\ninactive_file {inactive_file}\nactive_file 7\n",
    }


def v1(path: str, limit: int, usage: int, inactive_file: int = 0) -> dict[str, str]:
    return {
        f"sys/fs/cgroup/memory{path}/memory.limit_in_bytes": f"{limit}\n",
        f"sys/fs/cgroup/memory{path}/memory.usage_in_bytes": f"{usage}\n",
        f"sys/fs/cgroup/memory{path}/memory.stat": f"cache 5\ntotal_inactive_file {inactive_file}\n",
    }


@pytest.mark.parametrize(
    ("cgroup", "files", "expected"),
    [
        (None, {}, 48 * GIB),
        ("0::/\n", {}, 48 * GIB),
        ("0::/a\n", v2("/a", "max", 3 * GIB), 48 * GIB),
        ("0::/a\n", v2("/a", 8 * GIB, 3 * GIB), 5 * GIB),
        ("0::/a\n", v2("/a", 8 * GIB, 3 * GIB, inactive_file=2 * GIB), 7 * GIB),
        ("0::/a/b\n", v2("/a", 8 * GIB, 3 * GIB) | v2("/a/b", "max", GIB), 5 * GIB),
        ("0::/a/b\n", v2("/a", 8 * GIB, 3 * GIB) | v2("/a/b", 4 * GIB, GIB), 3 * GIB),
        ("0::/a\n", v2("/a", 2 * GIB, 3 * GIB), 0),
        ("5:cpu:/x\n4:memory,hugetlb:/a\n", v1("/a", 8 * GIB, 3 * GIB, GIB), 6 * GIB),
        ("4:memory:/a\n0::/a\n", v1("", 2**63 - 4096, 3 * GIB) | v1("/a", 6 * GIB, GIB), 5 * GIB),
    ],
)
def test_the_tightest_bound_counts(
    cgroup: str | None, files: dict[str, str], expected: int, tmp_path: Path
) -> None:
    assert available_memory_bytes(create_root(tmp_path, cgroup, files)) == expected


def test_this_machine_has_some() -> None:
    assert available_memory_bytes() > 0
