# SPDX-License-Identifier: Apache-2.0
"""Devices: one interface, implemented by a simulation, by threads and by CUDA.

Importing this loads no driver. docs/internals/devices.md describes each implementation.
"""

from __future__ import annotations

from commrt._native import Device
from commrt.devices.arrays import DeviceArray, DeviceStream
from commrt.devices.cuda import CudaDevice
from commrt.devices.registry import serve, stop_serving
from commrt.devices.simulated import SimDevice, SimOptions, SimWorld
from commrt.devices.threaded import ThreadDevice

__all__ = [
    "CudaDevice",
    "Device",
    "DeviceArray",
    "DeviceStream",
    "SimDevice",
    "SimOptions",
    "SimWorld",
    "ThreadDevice",
    "serve",
    "stop_serving",
]
