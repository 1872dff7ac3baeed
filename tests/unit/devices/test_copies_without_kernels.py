# SPDX-License-Identifier: Apache-2.0
"""Who asks for kernels that copy, where none are loaded, gets the copy engines."""

from __future__ import annotations

from pathlib import Path

from test_cuda_device import Fake, built

from commrt.comm import Communicator
from commrt.devices import CudaDevice, DeviceArray, DeviceStream
from commrt.local import run


def test_kernels_copy_once_they_are_loaded(tmp_path: Path) -> None:
    fake = Fake(built(tmp_path))
    fake.reset()
    device = CudaDevice(library=fake.path)

    def copies(comm: Communicator) -> tuple[int, int]:
        """Make a call; return the launches and the copies that the driver was given."""
        before = len(fake.calls)
        with DeviceStream(device):
            x = DeviceArray(device, 16)
            request = comm.allreduce(
                x, nonblocking=True, backend="staged", params={"copies": "kernel"}
            )
            request.synchronize(timeout_s=300)
        given = [call.partition("(")[0] for call in fake.calls[before:]]
        return given.count("cuLaunchKernel"), given.count("cuMemcpyAsync")

    assert run(1, copies) == [(0, 2)]
    device.load_kernels(b"image\0", ["commrt_copy"])
    assert run(1, copies) == [(2, 0)]
