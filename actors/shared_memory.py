"""SharedMapping: anonymous shared memory that lives exactly as long as the processes that map it.

A memfd has no name in any file system, so nothing is left behind however its users end; other processes of
the same user open it through `/proc/<pid>/fd/<fd>` of the process that made it, or of one that passes it on, and
keep it when that process dies.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import weakref
from typing import Final

from actors.messages import SharedSegment

_FIXED_SIZE = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_LIBC = ctypes.CDLL(None, use_errno=True)
"""For calls that Python's library does not offer."""
_MBIND: Final = {"x86_64": 237, "aarch64": 235}
"""Number of the system call, for which libc has no function."""
_MPOL_PREFERRED: Final = 1


class AttachError(RuntimeError):
    """Another process's memory cannot be mapped: the process is gone, or this is other memory."""


class SharedMapping:
    """One memfd, mapped into this process.

    The maker calls `create` and sends `segment`; the others call `attach`. The size never changes (it is
    sealed), so an access inside `memory` cannot fault because another process truncated it.

    Others may attach until the object of the maker, or of whoever passes it on, is closed or dropped. The mapping
    itself ends with the last view of `memory`, never under one.
    """

    def __init__(self, memory: mmap.mmap, segment: SharedSegment) -> None:
        self.memory = memory
        self.segment = segment
        self._close_fd: weakref.finalize[..., SharedMapping] | None = None

    @classmethod
    def create(cls, name: str, num_bytes: int, *, is_allocated: bool = True) -> SharedMapping:
        """Make zeroed memory of `num_bytes`; `name` only shows in `/proc/<pid>/maps`.

        All of it is allocated now, unless `is_allocated` is False; then `allocate` does it, or the first access. NOTE:
        Linux answers a lack of memory by killing processes, not by an error; who asks for much looks first what is
        available.
        """
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, num_bytes)
            if is_allocated:
                os.posix_fallocate(fd, 0, num_bytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _FIXED_SIZE)
            memory = mmap.mmap(fd, num_bytes, mmap.MAP_SHARED)
        except BaseException:
            os.close(fd)
            raise
        return cls._published(memory, fd, num_bytes)

    @classmethod
    def attach(cls, segment: SharedSegment, *, writable: bool, pass_on: bool = False) -> SharedMapping:
        """Map the memory that another process made.

        Args:
            segment: from that process.
            writable: whether this process writes.
            pass_on: whether others may attach through this process, too; `segment` of the result is for them.
        Raises: AttachError if it is gone or has another size.
        """
        path = f"/proc/{segment.pid}/fd/{segment.fd}"
        try:
            fd = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)
        except OSError as error:
            raise AttachError(f"{path}: cannot open shared memory ({error.strerror})") from error
        try:
            size = os.fstat(fd).st_size
            if size != segment.num_bytes or not _is_sealed(fd):
                raise AttachError(
                    f"{path}: {size} bytes of other memory, expected {segment.num_bytes} sealed bytes"
                )
            protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
            memory = mmap.mmap(fd, size, mmap.MAP_SHARED, protection)
        except BaseException:
            os.close(fd)
            raise
        if pass_on:
            return cls._published(memory, fd, size)
        os.close(fd)  # the mapping keeps the memory
        return cls(memory, segment)

    @classmethod
    def _published(cls, memory: mmap.mmap, fd: int, num_bytes: int) -> SharedMapping:
        """A mapping that others attach to through this process's `fd`, which is its own from now on."""
        mapping = cls(memory, SharedSegment(pid=os.getpid(), fd=fd, num_bytes=num_bytes))
        mapping._close_fd = weakref.finalize(mapping, os.close, fd)
        return mapping

    def allocate(self, offset: int, num_bytes: int) -> None:
        """Allocate a part of the memory that this process made; other threads run meanwhile.

        Raises: OSError.
        """
        os.posix_fallocate(self.segment.fd, offset, num_bytes)

    def prefer_numa_node(self, node: int) -> None:
        """Let what is not allocated yet come from a NUMA node, as long as that has any.

        Raises: OSError if there is no such node.
        """
        number = _MBIND.get(os.uname().machine)
        if number is None:
            return  # a preference, on a machine that nobody tried yet
        nodes = (ctypes.c_ulong * (node // 64 + 1))()
        nodes[node // 64] = 1 << node % 64
        address, length = ctypes.c_void_p(self._address), ctypes.c_ulong(len(self.memory))
        max_node = ctypes.c_ulong(64 * len(nodes) + 1)
        if _LIBC.syscall(ctypes.c_long(number), address, length, _MPOL_PREFERRED, nodes, max_node, 0):
            raise OSError(ctypes.get_errno(), f"mbind to NUMA node {node} failed")

    def make_read_only(self) -> None:
        """Let this process write no more through this mapping, as if it had been attached so.

        Raises: OSError.
        """
        if _LIBC.mprotect(ctypes.c_void_p(self._address), ctypes.c_size_t(len(self.memory)), mmap.PROT_READ):
            raise OSError(ctypes.get_errno(), "mprotect of shared memory failed")

    def close(self) -> None:
        """Let no one attach any more through this process; safe to call twice."""
        if self._close_fd is not None:
            self._close_fd()

    @property
    def _address(self) -> int:
        """Where writable memory begins in this process."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self.memory))


def _is_sealed(fd: int) -> bool:
    try:
        return fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _FIXED_SIZE == _FIXED_SIZE
    except OSError:  # not a memfd
        return False
