# SPDX-License-Identifier: Apache-2.0
"""Tables come to the device whole, whatever was copied there before."""

from __future__ import annotations

import threading

from commrt.device_calls.uploads import Uploads
from commrt.devices.threaded import ThreadDevice


def content_of(number: int, nbytes: int) -> bytes:
    return bytes((number + at) % 251 for at in range(nbytes))


def read(device: ThreadDevice, address: int, nbytes: int) -> bytes:
    """Return what the device has at an address."""
    pinned, stream = device.pinned_alloc(nbytes), device.stream_create()
    device.memcpy_async(pinned, address, nbytes, stream)
    device.stream_synchronize(stream)
    found = bytes(device.read(pinned, nbytes))
    device.stream_destroy(stream)
    device.pinned_free(pinned)
    return found


def test_each_copy_has_its_own_content() -> None:
    lengths = [1, 64, 70_000, 3, 200_000, 64]
    with ThreadDevice(seed=3) as device:
        uploads = Uploads(device)
        places = []
        for number, nbytes in enumerate(lengths):
            address = device.alloc(nbytes)
            uploads.copy(address, content_of(number, nbytes))
            places.append((address, content_of(number, nbytes)))
        for address, wanted in places:
            assert read(device, address, len(wanted)) == wanted
            device.free(address)
        uploads.close()
        uploads.close()


def test_threads_take_turns() -> None:
    with ThreadDevice(seed=5) as device:
        uploads, count = Uploads(device), 20
        found: dict[int, bool] = {}

        def copies(number: int) -> None:
            address = device.alloc(5000)
            right = True
            for turn in range(count):
                wanted = content_of(7 * number + turn, 5000)
                uploads.copy(address, wanted)
                right &= read(device, address, 5000) == wanted
            found[number] = right
            device.free(address)

        threads = [threading.Thread(target=copies, args=(n,)) for n in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        uploads.close()
    assert found == {0: True, 1: True, 2: True}


class Counted(ThreadDevice):
    """Counts pinned memory and streams that are there."""

    made, given_back = 0, 0

    def pinned_alloc(self, nbytes: int) -> int:
        self.made += 1
        return super().pinned_alloc(nbytes)

    def pinned_free(self, ptr: int) -> None:
        self.given_back += 1
        super().pinned_free(ptr)

    def stream_create(self, priority: int = 0) -> int:
        self.made += 1
        return super().stream_create(priority)

    def stream_destroy(self, stream: int) -> None:
        self.given_back += 1
        super().stream_destroy(stream)


def test_memory_and_stream_stay_until_the_end() -> None:
    with Counted(seed=7) as device:
        address = device.alloc(100_000)
        uploads = Uploads(device)
        for _ in range(50):
            uploads.copy(address, bytes(100))
        assert (device.made, device.given_back) == (2, 0)
        uploads.copy(address, bytes(100_000))  # which needs more memory
        assert (device.made, device.given_back) == (3, 1)
        uploads.close()
        uploads.close()
        assert device.made == device.given_back == 3
        device.free(address)
