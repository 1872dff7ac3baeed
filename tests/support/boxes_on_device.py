# SPDX-License-Identifier: Apache-2.0
"""A communicator whose halo, neighbour and redistribution calls run on a device.

Each numpy array that a call is given has a twin in the memory of a device, laid out
alike; its values go there before the call and come back behind it, by way of pinned
memory. So whatever is checked with host arrays is checked with device arrays.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


class Twin:
    """A numpy array's place on a device; an array of some GPU library to commrt."""

    def __init__(self, device: Any, given: Array, stream: int) -> None:
        self.device, self.given, self.stream = device, given, stream
        low, high = np.lib.array_utils.byte_bounds(given)
        if not given.size:
            low = high = given.ctypes.data
        self.nbytes = max(1, high - low)
        self.base = device.alloc(self.nbytes)
        self.pinned = device.pinned_alloc(self.nbytes)
        raw = (ctypes.c_uint8 * self.nbytes).from_address(self.pinned)
        self.offset = given.ctypes.data - low if given.size else 0
        self.here: Array = np.ndarray(
            given.shape, given.dtype, raw, self.offset, given.strides
        )

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": self.given.shape,
            "typestr": self.given.dtype.str,
            "data": (self.base + self.offset, not self.given.flags.writeable),
            "strides": self.given.strides,
            "version": 3,
            "stream": None,
        }

    def send(self) -> None:
        """Take the values of the host's array over."""
        self.here[...] = self.given
        self.device.memcpy_async(self.base, self.pinned, self.nbytes, self.stream)
        self.device.stream_synchronize(self.stream)

    def bring(self) -> None:
        """Give them back."""
        self.device.memcpy_async(self.pinned, self.base, self.nbytes, self.stream)
        self.device.stream_synchronize(self.stream)
        if self.given.flags.writeable:
            self.given[...] = self.here


class Twins:
    """The arrays of one call."""

    def __init__(self, rank: Any) -> None:
        self.rank = rank
        self.all: list[Twin] = []

    def of(self, given: Any) -> Any:
        """Return an argument, with twins in the place of arrays."""
        if isinstance(given, np.ndarray):
            stream = self.rank.stream.handle
            self.all.append(Twin(self.rank.device, given, stream))
            return self.all[-1]
        if isinstance(given, list | tuple) and any(
            isinstance(each, np.ndarray) for each in given
        ):
            return type(given)(self.of(each) for each in given)
        return given

    def original(self, result: Any) -> Any:
        """Return what the host calls a result."""
        if isinstance(result, list | tuple):
            return type(result)(self.original(each) for each in result)
        found = [twin.given for twin in self.all if twin is result]
        return found[0] if found else result

    def send(self) -> None:
        for twin in self.all:
            twin.send()

    def bring(self, result: Any) -> Any:
        self.rank.stream.synchronize()
        for twin in self.all:
            twin.bring()
        return self.original(result)


class Requested:
    """A request whose values come back."""

    def __init__(self, twins: Twins, request: Any) -> None:
        self.twins, self.request = twins, request

    def wait(self) -> Any:
        found = self.request.wait()
        self.request.synchronize()
        return self.twins.bring(found)


class BoundToTwins:
    """A persistent call."""

    def __init__(self, twins: Twins, call: Any) -> None:
        self.twins, self.call = twins, call
        assert call.label.startswith(f"{twins.rank.carrier}/")

    def __call__(self) -> Any:
        self.twins.send()
        return self.twins.bring(self.call())

    def start(self) -> Requested:
        self.twins.send()
        return Requested(self.twins, self.call.start())


class _Plans:
    def __init__(self, there: OnDevice) -> None:
        self.there = there

    def __getattr__(self, name: str) -> Any:
        def make(*args: Any, **kwargs: Any) -> BoundToTwins:
            twins, args, kwargs = self.there.arguments(name, args, kwargs)
            return BoundToTwins(
                twins, getattr(self.there.comm.plan, name)(*args, **kwargs)
            )

        return make


class OnDevice:
    """A communicator with its calls on twins of their arrays."""

    def __init__(self, comm: Any, rank: Any) -> None:
        """``rank`` has the device, its stream, and the name of what moves boxes."""
        self.comm, self.on = comm, rank
        self.rank, self.size = comm.rank, comm.size

    @property
    def plan(self) -> _Plans:
        return _Plans(self)

    def cart(self, *args: Any, **kwargs: Any) -> OnDevice:
        return OnDevice(self.comm.cart(*args, **kwargs), self.on)

    def graph(self, *args: Any, **kwargs: Any) -> OnDevice:
        return OnDevice(self.comm.graph(*args, **kwargs), self.on)

    def __enter__(self) -> OnDevice:
        return self

    def __exit__(self, *error: object) -> None:
        if error[0] is None:
            self.comm.free()

    def arguments(
        self, name: str, args: Any, kwargs: Any
    ) -> tuple[Twins, list[Any], dict[str, Any]]:
        twins = Twins(self.on)
        if name == "redistribute" and kwargs.get("out") is None:
            shape = args[2].local_shape(self.rank)
            kwargs = {**kwargs, "out": np.empty(shape, args[0].dtype)}
        args = [twins.of(each) for each in args]
        kwargs = {key: twins.of(each) for key, each in kwargs.items()}
        return twins, args, kwargs

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.comm, name)
        if not name.startswith(("neighbor_", "halo_", "redistribute")):
            return found

        def call(*args: Any, nonblocking: bool = False, **kwargs: Any) -> Any:
            twins, args, kwargs = self.arguments(name, args, kwargs)
            twins.send()
            returned = found(*args, nonblocking=nonblocking, **kwargs)
            if nonblocking:
                return Requested(twins, returned)
            return twins.bring(returned)

        return call
