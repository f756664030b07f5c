"""OtherProcess: a process of this machine, watched through a pidfd, which a reused pid cannot fool."""

from __future__ import annotations

import os
import select
import signal
import weakref


class OtherProcess:
    """A process that need not be a child of this one.

    Args:
        pid: of a process that is running.
    Raises: ProcessLookupError if it is not.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._pidfd = os.pidfd_open(pid)
        weakref.finalize(self, os.close, self._pidfd)
        self._exit = select.poll()
        self._exit.register(self._pidfd, select.POLLIN)

    def is_gone(self, timeout_s: float = 0.0) -> bool:
        """Whether it has ended, at the latest in `timeout_s`; a zombie has."""
        return bool(self._exit.poll(timeout_s * 1000))

    def kill(self) -> None:
        """End it at once; nothing happens if it has ended."""
        if not self.is_gone():
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
