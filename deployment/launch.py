"""`serve run` in a Ray cluster that no other machine reaches and that ends with the process that started it.

    python -m deployment.launch [arguments of serve run; serve_config.yaml if there are none]

By itself, `serve run serve_config.yaml` does the same with Ray's own defaults, which are made for clusters of
many machines: addresses that others can reach, and a token to talk to them. That is the command for a cluster
that already runs.
"""

import ctypes
import os
import signal
import sys
from pathlib import Path

PR_SET_PDEATHSIG = 1  # linux/prctl.h

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


def main() -> None:
    """Become `serve run`."""
    if sys.platform == "linux":
        end_with_parent()
    serve = Path(sys.executable).with_name("serve")
    arguments = sys.argv[1:] or ["serve_config.yaml"]
    os.execve(serve, [str(serve), "run", *arguments], LOCAL_ENVIRONMENT | os.environ)


def end_with_parent() -> None:
    """Get a SIGTERM when the parent (make, a shell) ends, also by a SIGKILL; this outlasts the `exec`."""
    parent = os.getppid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:  # it ended before the call
        os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
