"""A page is the same bytes from the pool, from the checkpoint, or repaired; else an error that names it."""

from __future__ import annotations

import logging

import pytest
import torch

from actors.host_pool import HostPool
from actors.page_reader import PageReader
from model.expert_source import ExpertPageError
from tests.unit.actors.builders import (
    FakeCheckpoint,
    create_contents,
    create_pool,
    create_reader,
    map_pool,
    random_page,
)

EXPERTS_PER_LAYER = (3, 2)


def create(
    max_host_pages: int | None = None, damaged_page: int | None = None
) -> tuple[HostPool, FakeCheckpoint, PageReader]:
    owner = create_pool(create_contents(EXPERTS_PER_LAYER, max_host_pages=max_host_pages))
    if damaged_page is not None:
        owner.page(damaged_page)[9] ^= 4
    checkpoint = FakeCheckpoint()
    return owner, checkpoint, create_reader(map_pool(owner), checkpoint)


def assert_reads_every_page(reader: PageReader) -> None:
    for page in range(5):
        assert torch.equal(reader.read(page), random_page(page, reader.layout.num_bytes)), page


@pytest.mark.parametrize("max_host_pages", [None, 0, 2, 4, 9])
def test_pages_that_the_pool_does_not_hold_come_from_the_checkpoint(max_host_pages: int | None) -> None:
    owner, checkpoint, reader = create(max_host_pages)
    held = [page for page in range(5) if owner.holds(page)]
    assert len(held) == (5 if max_host_pages is None else min(5, max_host_pages))
    assert owner.region.segment.num_bytes == (
        4096 + (4096 if held else 0) + len(held) * reader.layout.num_bytes
    )
    assert_reads_every_page(reader)
    assert checkpoint.reads == [page for page in range(5) if page not in held]
    assert sum(reader.num_disk_reads) == len(checkpoint.reads)


def test_a_page_on_disk_that_cannot_be_read_is_an_error_each_time_and_no_other_is() -> None:
    _, checkpoint, reader = create(max_host_pages=0)
    checkpoint.unreadable.add(4)
    for _ in range(2):
        with pytest.raises(
            ExpertPageError, match="layer 1, expert 1: rank 0.* cannot be read .*shard: cannot be"
        ):
            reader.read(4)
    checkpoint.unreadable.clear()
    assert_reads_every_page(reader)


def test_a_damaged_page_of_the_pool_is_read_from_the_checkpoint_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    _, checkpoint, reader = create(damaged_page=3)
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            assert_reads_every_page(reader)
    assert checkpoint.reads == [3]
    assert reader.num_disk_reads == [0, 1]
    assert caplog.text.count("layer 1, expert 0") == 1
    assert "is corrupt" in caplog.text


@pytest.mark.parametrize(("fault", "reason"), [("damaged", "other bytes"), ("unreadable", "cannot be read")])
def test_a_page_that_no_tier_has_whole_is_an_error_for_good_after_one_attempt(
    fault: str, reason: str
) -> None:
    _, checkpoint, reader = create(damaged_page=3)
    getattr(checkpoint, fault).add(3)
    for _ in range(3):
        with pytest.raises(ExpertPageError, match=f"layer 1, expert 0: .* is corrupt .*, and .*{reason}"):
            reader.read(3)
    assert checkpoint.reads == [3]
    assert torch.equal(reader.read(2), random_page(2, reader.layout.num_bytes))
