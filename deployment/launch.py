"""`serve run` in a Ray cluster that no other machine reaches and of which nothing stays, however it ends.

    python -m deployment.launch [arguments of serve run; serve_config.yaml if there are none]

By itself, `serve run serve_config.yaml` does the same with Ray's own defaults, which are made for clusters of
many machines: addresses that others can reach, and a token to talk to them. That is the command for a cluster
that already runs.

On Linux this process stays as the parent: orphans among its descendants become its children (they do so of a
"child subreaper"), so when `serve run` has ended, or was killed, the launcher finds and kills all that remains.
"""

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

LOCAL_ENVIRONMENT = {
    # The node's address is 127.0.0.1, so every server of Ray listens there (but for one: `containment.py`).
    # Ray reads this on Linux too, whatever its name says.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    # Only this machine reaches the cluster, so no token has to be carried to its clients.
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Only control messages pass through the object store; the memory is for the host pool.
    "RAY_DEFAULT_OBJECT_STORE_MAX_MEMORY_BYTES": str(512 * 1024**2),
    # The host pool fills the machine on purpose; the monitor kills workers when 95 % of the memory is in use.
    "RAY_memory_monitor_refresh_ms": "0",
}
"""Defaults: a variable that the environment already has keeps its value."""

SHUTDOWN_TIMEOUT_S = 40
"""For an orderly end; more than the replicas' graceful_shutdown_timeout_s."""

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h

PARENT_DIED = signal.SIGUSR1
"""What the kernel sends when the process that started this one (make, a shell) has ended."""


class Terminated(Exception):
    """The command has to end in its own way."""


class Abandoned(Exception):
    """Nobody waits for the command to end in its own way."""


def main() -> None:
    """Run `serve run`, with its own exit status."""
    arguments = sys.argv[1:] or ["serve_config.yaml"]
    command = [sys.executable, "-m", "deployment.serve_run", *arguments]
    sys.exit(run(command, LOCAL_ENVIRONMENT | os.environ))


def run(command: list[str], environment: dict[str, str]) -> int:
    """Run a command until it ends, and then kill what it has left behind.

    Ctrl-C reaches the command through the terminal; SIGTERM and SIGHUP become a Ctrl-C for it. Then it has
    SHUTDOWN_TIMEOUT_S. When the parent of this process dies, the command is killed.

    Returns: the command's exit status, or 128 and the signal that ended it.
    """
    if sys.platform == "linux":
        parent = os.getppid()
        _prctl(PR_SET_PDEATHSIG, PARENT_DIED)
        if os.getppid() != parent:  # it ended before the call
            return 128 + PARENT_DIED
        _prctl(PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGINT, lambda signum, frame: _limit_shutdown())
    for signum in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(signum) is not signal.SIG_IGN:  # as nohup does
            signal.signal(signum, _raise(Terminated))
    for signum in (PARENT_DIED, signal.SIGALRM):
        signal.signal(signum, _raise(Abandoned))
    try:
        process = subprocess.Popen(command, env=environment, preexec_fn=_die_with_parent)
        try:
            process.returncode = _wait_for(process.pid)
        except Terminated:
            process.send_signal(signal.SIGINT)
            _limit_shutdown()
            process.returncode = _wait_for(process.pid)
        return process.returncode if process.returncode >= 0 else 128 - process.returncode
    except (Terminated, Abandoned):
        return 128 + signal.SIGKILL
    finally:
        for signum in (signal.SIGTERM, signal.SIGHUP, PARENT_DIED, signal.SIGALRM):
            signal.signal(signum, signal.SIG_IGN)
        _kill_children()


def children_of(pid: int) -> list[int]:
    """The processes whose parent is `pid`; none where there is no /proc."""
    children = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            stat = path.read_text(errors="replace")
        except OSError:  # it has ended
            continue
        ppid = stat.rpartition(")")[2].split()[1]  # fields after the name, which may hold anything
        if int(ppid) == pid:
            children.append(int(path.parent.name))
    return children


def _raise(exception: type[Exception]) -> Callable[[int, FrameType | None], None]:
    def handler(signum: int, frame: FrameType | None) -> None:
        raise exception

    return handler


def _limit_shutdown() -> None:
    signal.alarm(SHUTDOWN_TIMEOUT_S)


def _wait_for(pid: int) -> int:
    """Wait for a child, and bury the orphans that end before it. Returns its status, negative for a signal."""
    while True:
        child, status = os.wait()
        if child == pid:
            return os.waitstatus_to_exitcode(status)


def _kill_children() -> None:
    """Kill all children, and theirs, which the death of their parent makes children of this process."""
    while True:
        for pid in children_of(os.getpid()):
            os.kill(pid, signal.SIGKILL)
        try:
            os.wait()
        except ChildProcessError:
            return


def _die_with_parent() -> None:
    if sys.platform == "linux":
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")


if __name__ == "__main__":
    main()
