# SPDX-License-Identifier: Apache-2.0
"""Tables that the host writes and a device reads, copied before a call needs them."""

from __future__ import annotations

import sys
import threading
from contextlib import suppress

from commrt._native import Device
from commrt.devices.arrays import give_back
from commrt.errors import CommError

__all__ = ["Uploads"]

_LEAST_NBYTES = 64 << 10


class Uploads:
    """Copies to one device, through pinned memory and by a stream that stay.

    To get these anew for each copy takes longer than the copy, and may wait for the
    device.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._turn = threading.Lock()
        self._pinned = self._nbytes = self._stream = 0

    def copy(self, address: int, content: bytes) -> None:
        """Copy bytes to an address on the device, which has them on return."""
        device, nbytes = self._device, len(content)
        with self._turn:
            if nbytes > self._nbytes:
                pinned, self._pinned, self._nbytes = self._pinned, 0, 0
                give_back(device, 0, pinned)
                most = max(_LEAST_NBYTES, nbytes)
                self._pinned = device.pinned_alloc(most)
                self._nbytes = most
            if not self._stream:
                self._stream = device.stream_create(0)
            device.write(self._pinned, content)
            device.memcpy_async(address, self._pinned, nbytes, self._stream)
            device.stream_synchronize(self._stream)

    def close(self) -> None:
        """Give memory and stream back; idempotent."""
        pinned, stream = self._pinned, self._stream
        self._pinned = self._nbytes = self._stream = 0
        if stream:
            self._device.stream_destroy(stream)
        give_back(self._device, 0, pinned)

    def __del__(self) -> None:
        if sys.is_finalizing():
            return
        with suppress(CommError):  # a device that is gone took it along
            self.close()
