# SPDX-License-Identifier: Apache-2.0
"""Objects of this package that the engine (C++) calls, by name: one table.

The engine looks each name up once, when it first needs it, and keeps what it finds
(``native/python_callbacks.hpp``). So a module moves by a change of this table.
"""

from __future__ import annotations

from importlib import import_module

PLACES = {
    "as_stream": "commrt.arrays.device:as_stream",
    "call_site": "commrt.group.call_site:call_site",
    "code_of_interface_type": "commrt.arrays.device:code_of",
    "code_of_torch_type": "commrt.arrays.tensors:code_of",
    "cuda_devices": "commrt.devices.registry:_CUDA",
    "current_stream_of": "commrt.arrays.device:current_stream_of",
    "current_streams": "commrt.devices.arrays:_CURRENT",
    "device_array": "commrt.devices.arrays:DeviceArray",
    "errors": "commrt.errors:",
    "recorder": "commrt.trace.recorder:recorder",
    "refuse_messages": "commrt.group.refusals:refuse_messages",
    "request_failed": "commrt.device_calls.requests:failed",
    "request_late": "commrt.device_calls.requests:late",
    "request_not_blocking": "commrt.device_calls.requests:not_blocking",
    "request_not_running": "commrt.device_calls.requests:not_running",
    "request_not_waiting": "commrt.device_calls.requests:not_waiting",
    "served_devices": "commrt.devices.registry:_SERVED",
}
"""Module of each name and, behind the colon, the object in it. An entry that ends with
the colon is the module itself."""


def find(name: str) -> object:
    """Return the object that the engine calls by this name."""
    module, _, attribute = PLACES[name].partition(":")
    found = import_module(module)
    return getattr(found, attribute) if attribute else found
