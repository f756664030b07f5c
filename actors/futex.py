"""Sleep until a word of shared memory changes: the Linux futex call, which Python's library does not offer.

It works between unrelated processes that map the same memory, costs nothing while asleep, and loses no
wake-up: the kernel compares the word with the expected value before it lets the caller sleep.
Source: futex(2).
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
from typing import Final

_SYSCALL_NUMBER: Final = {"x86_64": 202, "aarch64": 98}.get(platform.machine())
_WAIT: Final = 0
_WAKE: Final = 1
_EVERYONE: Final = 2**31 - 1
_NOTHING_WRONG: Final = (
    errno.EAGAIN,  # the word already differs
    errno.ETIMEDOUT,
    errno.EINTR,
)


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_int64), ("nanoseconds", ctypes.c_int64))


_syscall = ctypes.CDLL(None, use_errno=True).syscall  # releases the GIL
_syscall.argtypes = (
    ctypes.c_long,
    ctypes.c_void_p,
    ctypes.c_int,
    ctypes.c_uint32,
    ctypes.POINTER(_Timespec),
    ctypes.c_void_p,
    ctypes.c_uint32,
)
_syscall.restype = ctypes.c_long


def wait(address: int, expected: int, timeout_s: float) -> None:
    """Sleep while the 32-bit word at `address` equals `expected`, at most `timeout_s`; may return early."""
    seconds, fraction = divmod(max(timeout_s, 0.0), 1.0)
    timeout = _Timespec(int(seconds), int(fraction * 1e9))
    if _call(address, _WAIT, expected, timeout) < 0 and ctypes.get_errno() not in _NOTHING_WRONG:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def wake_all(address: int) -> None:
    """Wake every sleeper on the word at `address`, in all processes."""
    if _call(address, _WAKE, _EVERYONE, None) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _call(address: int, operation: int, value: int, timeout: _Timespec | None) -> int:
    if _SYSCALL_NUMBER is None:
        raise OSError(
            errno.ENOSYS, f"no futex call known for {platform.machine()}; use x86_64 or aarch64 Linux"
        )
    result: int = _syscall(_SYSCALL_NUMBER, address, operation, value, timeout, None, 0)
    return result
