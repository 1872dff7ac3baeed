# SPDX-License-Identifier: Apache-2.0
"""Look-up of the device that an address belongs to.

CUDA devices are opened when the first array on one comes. Others, such as simulated
ones, are known by their arrays (``DeviceArray.device``), by a current stream of the
thread, or by ``serve``.
"""

from __future__ import annotations

import threading
from typing import Any

from commrt._native import Device
from commrt.devices.arrays import current_devices
from commrt.devices.cuda import CudaDevice, open_device
from commrt.errors import BufferError_, DeviceMissingError

__all__ = ["cuda_device", "find_device", "serve", "stop_serving"]

_DEVICE, _MANAGED = 1, 3
"""Codes of memory types that ``ptr_attributes()`` returns."""
_LOCK = threading.Lock()
_SERVED: list[Device] = []
_CUDA: dict[int, CudaDevice] = {}


def serve(device: Device) -> None:
    """Look for addresses on this device, too, before any CUDA device."""
    with _LOCK:
        if not any(each is device for each in _SERVED):
            _SERVED.append(device)


def stop_serving(device: Device) -> None:
    """Take ``serve`` back."""
    with _LOCK:
        _SERVED[:] = [each for each in _SERVED if each is not device]


def cuda_device(ordinal: int) -> CudaDevice:
    """Return the CUDA device of a number, with its kernels, always the same one.

    Raises DeviceMissingError where there is no driver or no such device, and
    BackendError where the installed packages for CUDA do not fit.
    """
    with _LOCK:
        if ordinal not in _CUDA:
            _CUDA[ordinal] = open_device(ordinal)
        return _CUDA[ordinal]


def find_device(address: int, what: str) -> tuple[Any, int]:
    """Return the device whose memory is at an address, and its number.

    Raises BufferError_, which names ``what``, for memory of another kind.
    """
    known = [*current_devices(), *_SERVED]
    for device in [*known, None]:
        try:
            on: Any = cuda_device(0) if device is None else device
        except DeviceMissingError:
            if not known:
                raise
            break
        kind, number, _, _ = on.ptr_attributes(address)
        if kind == _MANAGED:
            raise BufferError_(
                f"{what} is in managed memory, which moves between host and device "
                f"while a stream waits: copy it to an ordinary device array"
            )
        if kind == _DEVICE:
            return (cuda_device(number) if device is None and number else on), number
    raise BufferError_(
        f"{what} says that it is on a device, and no device knows its address "
        f"{address:#x}: it was freed, or belongs to another process or library"
    )
