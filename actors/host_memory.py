"""How much memory processes of this machine, or of this container, can still take."""

from __future__ import annotations

from pathlib import Path


def available_memory_bytes(root: Path = Path("/")) -> int:
    """Memory that can still be taken without swapping or being killed for it.

    The least of what the kernel calls available and what every control group (v2 or v1) above this process has
    left, not counting page cache that it can drop.

    Args:
        root: of the file system; another one in tests.
    """
    bounds = [_meminfo(root)["MemAvailable"], *_left_in_groups(root)]
    return max(0, min(bounds))


def _meminfo(root: Path) -> dict[str, int]:
    """Bytes by name."""
    entries = {}
    for line in (root / "proc/meminfo").read_text(encoding="ascii").splitlines():
        name, value = line.split(":")
        entries[name] = int(value.split()[0]) * 1024
    return entries


def _left_in_groups(root: Path) -> list[int]:
    """What is left in the groups of this process that have a limit."""
    try:
        memberships = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    left = []
    for membership in memberships:
        _, controllers, path = membership.split(":", 2)
        if controllers == "":
            files = ("memory.max", "memory.current", "inactive_file")
            top = root / "sys/fs/cgroup"
        elif "memory" in controllers.split(","):
            files = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            top = root / "sys/fs/cgroup/memory"
        else:
            continue
        group = top / path.lstrip("/")
        for directory in (group, *group.parents):
            bytes_left = _left_in_group(directory, *files)
            if bytes_left is not None:
                left.append(bytes_left)
            if directory == top:
                break
    return left


def _left_in_group(directory: Path, limit_file: str, usage_file: str, droppable: str) -> int | None:
    """What a group has left; None if it has no limit or no such files, as the topmost one of v2."""
    try:
        limit = (directory / limit_file).read_text(encoding="ascii").strip()
        usage = int((directory / usage_file).read_text(encoding="ascii"))
        statistics = (directory / "memory.stat").read_text(encoding="ascii")
    except OSError:
        return None
    if limit == "max":
        return None
    cache = next(
        (int(line.split()[1]) for line in statistics.splitlines() if line.split()[0] == droppable), 0
    )
    return int(limit) - usage + cache
