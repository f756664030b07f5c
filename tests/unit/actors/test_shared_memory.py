import gc
import os

import pytest

from actors.shared_memory import AttachError, SharedMapping


def test_what_one_side_writes_the_other_reads():
    made = SharedMapping.create("hotset-test", 4096)
    attached = SharedMapping.attach(made.segment, writable=True)
    made.memory[:5] = b"hello"
    attached.memory[5:11] = b" world"
    assert made.memory[:11] == attached.memory[:11] == b"hello world"


def test_a_read_only_mapping_cannot_be_written():
    made = SharedMapping.create("hotset-test", 4096)
    with pytest.raises(TypeError, match="readonly"):
        SharedMapping.attach(made.segment, writable=False).memory[0] = 1


def test_no_one_can_shrink_memory_that_others_map():
    made = SharedMapping.create("hotset-test", 4096)
    with pytest.raises(PermissionError):
        os.truncate(f"/proc/self/fd/{made.segment.fd}", 0)


def test_memory_cannot_be_attached_once_it_is_closed_but_stays_mapped():
    made = SharedMapping.create("hotset-test", 4096)
    attached = SharedMapping.attach(made.segment, writable=False)
    made.memory[0] = 7
    made.close()
    made.close()
    with pytest.raises(AttachError):
        SharedMapping.attach(made.segment, writable=False)
    assert attached.memory[0] == 7


def test_memory_that_is_dropped_leaves_no_descriptor():
    before = set(os.listdir("/proc/self/fd"))
    made = SharedMapping.create("hotset-test", 4096)
    assert set(os.listdir("/proc/self/fd")) > before
    del made
    gc.collect()
    assert set(os.listdir("/proc/self/fd")) <= before


def test_memory_can_be_passed_on_after_its_maker_is_gone():
    made = SharedMapping.create("hotset-test", 4096)
    attached = SharedMapping.attach(made.segment, writable=False, pass_on=True)
    made.memory[0] = 7
    made.close()
    later = SharedMapping.attach(attached.segment, writable=True)
    later.memory[1] = 8
    assert attached.memory[:2] == b"\x07\x08"
    attached.close()
    with pytest.raises(AttachError):
        SharedMapping.attach(attached.segment, writable=False)
