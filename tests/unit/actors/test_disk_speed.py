"""The disk's own speed is measured where there is a disk, and is None where there is not."""

from pathlib import Path

from actors import disk_speed
from actors.disk_speed import read_speed


def write(path: Path, num_bytes: int) -> Path:
    path.write_bytes(bytes(num_bytes))
    return path


def test_blocks_all_over_the_file_are_read_once(tmp_path, monkeypatch):
    read: list[int] = []
    monkeypatch.setattr(disk_speed, "_read_block", lambda fd, offset: read.append(offset) or 2**22)
    speed = read_speed(write(tmp_path / "file", 10 * 2**22 + 5), num_threads=3, max_bytes=5 * 2**22)
    if speed is not None:  # the file system has O_DIRECT
        assert sorted(read) == [i * 2**23 for i in range(5)]
        assert speed > 0


def test_a_file_that_is_smaller_than_a_block_says_nothing(tmp_path):
    assert read_speed(write(tmp_path / "file", 100), num_threads=1, max_bytes=2**30) is None


def test_a_read_past_the_cache_gives_a_plausible_speed(tmp_path):
    speed = read_speed(write(tmp_path / "file", 2**24), num_threads=2, max_bytes=2**24)
    assert speed is None or 1e5 < speed < 1e12
