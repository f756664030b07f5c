import subprocess
import sys

import pytest

from actors.process import OtherProcess


def start_process() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)


def test_a_process_is_gone_when_it_has_ended_also_before_it_is_reaped():
    child = start_process()
    process = OtherProcess(child.pid)
    assert not process.is_gone()
    process.kill()
    assert process.is_gone(timeout_s=20)
    child.communicate()
    process.kill()


def test_a_pid_of_nobody_is_refused():
    child = start_process()
    child.communicate(b"\n")
    with pytest.raises(ProcessLookupError):
        OtherProcess(child.pid)
