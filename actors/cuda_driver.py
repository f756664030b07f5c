"""CudaDriver: the few calls of the CUDA driver that PyTorch does not offer.

Not of the runtime: the driver returns an error and keeps none, while the runtime's "last error" would come up again in
whatever kernel PyTorch launches next.
"""

from __future__ import annotations

import ctypes
from typing import Final

_PORTABLE: Final = 0x01
"""CU_MEMHOSTREGISTER_PORTABLE: for every context of the process."""
_DEVICE_MAP: Final = 0x02
"""CU_MEMHOSTREGISTER_DEVICEMAP: readable by the GPU under an address."""


class CudaDriverError(RuntimeError):
    """A call of the driver failed."""


class CudaDriver:
    """The driver, in the context that is current in the calling thread (PyTorch's, once it was used there)."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")
        self._call("cuInit", ctypes.c_uint(0))

    def register(self, address: int, num_bytes: int) -> None:
        """Pin a range of host memory, which then has the same address on the device.

        Raises: CudaDriverError; nothing is pinned then.
        """
        flags = ctypes.c_uint(_PORTABLE | _DEVICE_MAP)
        host = ctypes.c_void_p(address)
        self._call("cuMemHostRegister_v2", host, ctypes.c_size_t(num_bytes), flags)
        on_device = ctypes.c_uint64()
        try:
            self._call("cuMemHostGetDevicePointer_v2", ctypes.byref(on_device), host, ctypes.c_uint(0))
            if on_device.value != address:
                raise CudaDriverError(f"host address {address:#x} is {on_device.value:#x} on the device")
        except CudaDriverError:
            self.unregister(address)
            raise

    def unregister(self, address: int) -> None:
        """Undo `register`. Raises: CudaDriverError."""
        self._call("cuMemHostUnregister", ctypes.c_void_p(address))

    def pci_address(self, index: int = 0) -> str:
        """Where a device of this process is, as sysfs spells it. Raises: CudaDriverError."""
        name = ctypes.create_string_buffer(32)
        self._call("cuDeviceGetPCIBusId", name, ctypes.c_int(len(name)), ctypes.c_int(index))
        return name.value.decode().lower()

    def _call(self, function: str, *arguments: object) -> None:
        status: int = getattr(self._library, function)(*arguments)
        if status != 0:
            name = ctypes.c_char_p()
            self._library.cuGetErrorName(ctypes.c_int(status), ctypes.byref(name))
            reason = name.value.decode() if name.value else "an unknown error"
            raise CudaDriverError(f"{function} gave {reason} ({status})")
