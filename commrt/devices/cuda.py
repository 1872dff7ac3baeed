# SPDX-License-Identifier: Apache-2.0
"""GPUs, through the CUDA driver of the machine; nothing of CUDA is installed."""

from __future__ import annotations

from collections.abc import Sequence

from commrt import _native, kernels
from commrt.devices import packages
from commrt.errors import DeviceError, DeviceMissingError, KernelsMissingError
from commrt.kernels.nvrtc import find

__all__ = ["CudaDevice", "open_device", "why_missing", "why_no_card"]


class CudaDevice(_native.CudaDevice):
    """A GPU, through the CUDA driver."""

    why_no_kernels: str | None = "load_kernels() has not been called"
    """Reason why launches will not find their kernels; None if they will."""

    def load_kernels(
        self, image: bytes | None = None, names: Sequence[str] = ()
    ) -> None:
        """Load commrt's kernels, compiled for this card, or a module of one's own.

        All of them are ready when this returns: loading one at its first launch would
        wait for the device, and for ever where a stream waits for a flag. Raises
        KernelsMissingError where NVRTC, which compiles them, is not to be found.
        """
        if image is not None:
            super().load_kernels(image, list(names))
            return
        nvrtc = find(self.driver_version)
        for each in kernels.images(self.capability, nvrtc=nvrtc):
            try:
                super().load_kernels(each.content, list(each.kernels))
            except DeviceError as error:
                if error.status != "no_kernels":
                    raise
                raise KernelsMissingError(
                    f"the driver does not take the kernels that {nvrtc} has compiled "
                    f"for {kernels.target_for(self.capability, nvrtc)}: {error}. Take "
                    f"an NVRTC that is no newer than the driver, by COMMRT_NVRTC_LIB, "
                    f"or a newer driver"
                ) from None
        self.why_no_kernels = None


def open_device(ordinal: int = 0, *, memory_flags: bool = True) -> CudaDevice:
    """Return a CUDA device with its kernels loaded.

    Copies and NCCL need no kernels: where these cannot be had, the device says why in
    ``why_no_kernels``, and launches raise. Raises DeviceMissingError where there is no
    driver or no such device, and BackendError where the installed packages for CUDA do
    not fit each other or the driver.
    """
    device = CudaDevice(ordinal, memory_flags=memory_flags)
    packages.check(device.driver_version)
    try:
        device.load_kernels()
    except KernelsMissingError as error:
        device.why_no_kernels = str(error)
    return device


def why_no_card() -> str | None:
    """Return why this process sees no GPU, without opening any; None where it does."""
    try:
        _, _, cards = _native.cuda_driver("")
    except DeviceMissingError as error:
        return str(error)
    if not cards:
        return "the CUDA driver shows no device: look at CUDA_VISIBLE_DEVICES"
    return None


def why_missing(ordinal: int = 0) -> str | None:
    """Return why CUDA device ``ordinal`` cannot be used; None where it can."""
    try:
        CudaDevice(ordinal)
    except DeviceMissingError as error:
        return str(error)
    return None
