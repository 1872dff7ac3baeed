# SPDX-License-Identifier: Apache-2.0
"""GPUs, through the CUDA driver of the machine; nothing of CUDA is installed."""

from __future__ import annotations

from commrt._native import CudaDevice
from commrt.errors import DeviceMissingError

__all__ = ["CudaDevice", "why_missing"]


def why_missing(ordinal: int = 0) -> str | None:
    """Return why CUDA device ``ordinal`` cannot be used; None where it can."""
    try:
        CudaDevice(ordinal)
    except DeviceMissingError as error:
        return str(error)
    return None
