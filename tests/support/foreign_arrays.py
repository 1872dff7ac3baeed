# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for torch and cupy with arrays on devices: what commrt asks of them.

Neither can have such arrays here. What they answer is what their own documentation
says of the attributes; each array lies in the memory of a ``DeviceArray``.
"""

from __future__ import annotations

import sys
from math import prod
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from commrt.devices import DeviceArray
from commrt.devices.arrays import current_stream

__all__ = ["Exported", "OtherStreams", "cupy_here", "torch_here"]


class OtherStreams:
    """The current stream of a library, which is not that of commrt's own arrays."""

    def __init__(self) -> None:
        self.handle: int | None = None
        """None: that of commrt."""
        self.elsewhere: int | None = None
        """That of the library's current device, where arrays are on another one."""
        self.asked = 0

    def of(self, device: Any) -> int:
        """Return it."""
        self.asked += 1
        return current_stream(device) if self.handle is None else self.handle


class _Dtype:
    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"torch.{self.name}"


class Tensor:
    """A tensor of torch; ``facts`` are those that are unusual."""

    _dtypes: dict[str, _Dtype] = {}  # noqa: RUF012  one for each type, as torch's
    requires_grad = False

    def __init__(self, array: DeviceArray, index: int = 0, **facts: Any) -> None:
        self.array = array
        name = facts.get("dtype", array.dtype.name)
        self.dtype = self._dtypes.setdefault(name, _Dtype(name))
        self.device = SimpleNamespace(type=facts.get("type", "cuda"), index=index)
        self.is_cuda = self.device.type == "cuda"
        self.is_sparse = facts.get("sparse", False)
        self.is_quantized = self.is_nested = False
        self.layout = "torch.sparse_coo" if self.is_sparse else "torch.strided"
        self.shape = array.shape
        self.facts = facts

    def get_device(self) -> int:
        return int(self.device.index)

    def is_contiguous(self) -> bool:
        return bool(self.facts.get("contiguous", True))

    def is_conj(self) -> bool:
        return bool(self.facts.get("conj", False))

    def is_neg(self) -> bool:
        return bool(self.facts.get("neg", False))

    def data_ptr(self) -> int:
        error = self.facts.get("error")
        if error is not None:
            raise error
        return self.array.address

    def untyped_storage(self) -> Any:
        nbytes = self.facts.get("storage_nbytes", self.array.size * 16)
        address = self.data_ptr() if nbytes else 0
        return SimpleNamespace(nbytes=lambda: nbytes, data_ptr=lambda: address)

    def storage_offset(self) -> int:
        return 0

    def element_size(self) -> int:
        return int(self.array.dtype.itemsize)

    def numel(self) -> int:
        return self.array.size

    def stride(self) -> tuple[int, ...]:
        return tuple(prod(self.shape[i + 1 :]) for i in range(len(self.shape)))


def torch_here(
    monkeypatch: pytest.MonkeyPatch, devices: dict[int, Any], *, has_raw: bool = True
) -> tuple[type[Tensor], OtherStreams]:
    """Pretend that torch was imported, with arrays on these devices.

    ``has_raw`` says whether it has the function that compilers of its programs call.
    """
    streams = OtherStreams()
    torch: Any = ModuleType("torch")
    torch.Tensor = type("Tensor", (Tensor,), {"__module__": "torch"})
    torch.cuda = SimpleNamespace(
        current_stream=lambda device: SimpleNamespace(
            cuda_stream=streams.of(devices[device.index])
        )
    )
    if has_raw:
        torch._C = SimpleNamespace(
            _cuda_getCurrentRawStream=lambda index: streams.of(devices[index])
        )
    monkeypatch.setitem(sys.modules, "torch", torch)
    return torch.Tensor, streams


class CupyArray:
    """An array of cupy; ``facts`` are those that are unusual.

    Its interface says the current stream of the current device, as cupy's does.
    """

    streams: OtherStreams

    def __init__(self, array: DeviceArray, **facts: Any) -> None:
        self.array = array
        self.dtype = np.dtype(facts.get("dtype", array.dtype))
        self.shape, self.size = array.shape, array.size
        self.data = SimpleNamespace(ptr=array.address)  # also of no elements
        self.flags = SimpleNamespace(c_contiguous="strides" not in facts)
        self.strides = facts.get("strides")

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (self.data.ptr if self.size else 0, False),
            "strides": self.strides,
            "version": 3,
            "stream": self.streams.elsewhere or self.streams.of(self.array.device) or 1,
        }


def cupy_here(
    monkeypatch: pytest.MonkeyPatch, device_of: Any
) -> tuple[type[CupyArray], OtherStreams]:
    """Pretend that cupy was imported; ``device_of()`` is the current device."""
    streams = OtherStreams()
    cupy: Any = ModuleType("cupy")
    cupy.ndarray = type("ndarray", (CupyArray,), {"__module__": "cupy"})
    cupy.ndarray.streams = streams

    def get_current_stream(device_id: int = -1) -> Any:
        if device_id == -1 and streams.elsewhere is not None:
            return SimpleNamespace(ptr=streams.elsewhere)
        return SimpleNamespace(ptr=streams.of(device_of()))

    cupy.cuda = SimpleNamespace(get_current_stream=get_current_stream)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    return cupy.ndarray, streams


class Exported:
    """An array of a library that is known by its interface alone, as numba's."""

    def __init__(self, array: DeviceArray, **changes: Any) -> None:
        self.array = array
        self.changes = changes

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {**self.array.__cuda_array_interface__, **self.changes}
