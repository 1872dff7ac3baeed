# SPDX-License-Identifier: Apache-2.0
"""Ranges of NVTX around calls, for profilers: off unless ``COMMRT_NVTX=1``.

Where it is off, a communicator's methods are what they always are, and nothing is
looked at per call. Where it is on, each communicator gets methods of its own that put a
range around the call: what a stream is given in between, a profiler shows below it.
The range says operation, bytes, algorithm and communicator, as in ``allreduce 4096 B
nccl/native world``, and has the bytes as its payload. It ends as the call returns,
which for a nonblocking one is before its work does.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import importlib.metadata
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar, cast

from commrt import env
from commrt.arrays.device import is_on_device
from commrt.errors import BackendError, CommError
from commrt.trace.methods import named_behind_first
from commrt.trace.traced import Traced
from commrt.vocabulary.operations import (
    COLLECTIVES,
    ROWS,
    operation,
    rule_nbytes,
)
from commrt.vocabulary.reduction_names import reduction_word

__all__ = ["NamedCall", "Ranges", "plans_with_ranges", "put_ranges", "wanted_ranges"]

SONAMES = ("libnvtx3interop.so.1", "libnvToolsExt.so.1")
"""NVTX 3 as a library, in wheels from CUDA 12.9 on; and what came before it."""
_WHEELS = ("nvidia-nvtx", "nvidia-nvtx-cu12", "nvidia-nvtx-cu11")
_NAMES = tuple(row.name for row in ROWS)
_ASCII, _UINT64 = 1, 1
"""Kinds of a message and of a payload."""
_MOST_LABELS = 4096


class _Attributes(ctypes.Structure):
    """``nvtxEventAttributes_t`` of version 2, which is that of 3 as well."""

    _fields_ = (
        ("version", ctypes.c_uint16),
        ("size", ctypes.c_uint16),
        ("category", ctypes.c_uint32),
        ("color_type", ctypes.c_int32),
        ("color", ctypes.c_uint32),
        ("payload_type", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
        ("payload", ctypes.c_uint64),
        ("message_type", ctypes.c_int32),
        ("message", ctypes.c_char_p),
    )


class Ranges:
    """The library, and commrt's domain in it."""

    def __init__(self, path: str) -> None:
        """Open a library; BackendError where it cannot be."""
        try:
            self._library = ctypes.CDLL(path)
            create = self._library.nvtxDomainCreateA
            self._push_range = self._library.nvtxDomainRangePushEx
            self._pop_range = self._library.nvtxDomainRangePop
        except (OSError, AttributeError) as error:
            raise BackendError(f"COMMRT_NVTX=1: {path} cannot be used: {error}") from (
                error
            )
        create.restype = ctypes.c_void_p
        self._domain = ctypes.c_void_p(create(b"commrt"))
        self._labels: dict[Any, str] = {}

    def run(
        self, label: str, nbytes: int, call: Callable[..., Any], *args: Any, **more: Any
    ) -> Any:
        """Make a call with a range around it, and return its result."""
        said = _Attributes(
            version=2,
            size=ctypes.sizeof(_Attributes),
            payload_type=_UINT64,
            payload=nbytes,
            message_type=_ASCII,
            message=label.encode(),
        )
        self._push_range(self._domain, ctypes.byref(said))
        try:
            return call(*args, **more)
        finally:
            self._pop_range(self._domain)

    def label(
        self, comm: Traced, name: str, args: tuple[Any, ...], more: dict[str, Any]
    ) -> tuple[str, int]:
        """Return the text of a call's range, and the bytes of its arrays here."""
        args, more = named_behind_first(name, args, more)
        x = args[0] if args else more.get("x", more.get("fields"))
        out = more.get("out")
        array = x if x is not None else out
        nbytes = _nbytes(array)
        parts = [name, f"{nbytes} B" if array is not None else "", comm.name]
        if name in COLLECTIVES:
            with suppress(CommError, TypeError):  # of which the call will speak
                parts.insert(2, self._algorithm(comm, name, x, out, more))
        return " ".join(filter(None, parts)), nbytes

    def _algorithm(
        self, comm: Traced, name: str, x: Any, out: Any, more: dict[str, Any]
    ) -> str:
        """Return the candidate that would run a call; it is kept while it holds."""
        asked = more.get("algorithm") or more.get("backend")
        if asked is not None:
            return str(asked)
        array = x if x is not None else out
        on_device = array is not None and is_on_device(array)
        op, root = reduction_word(more.get("op", "sum")), more.get("root", 0)
        elements = _elements_nbytes(comm.size, name, x, out)
        key = comm.identity, name, elements, str(getattr(array, "dtype", "")), op, root
        if key not in self._labels:
            found = comm.explain(
                name,
                rule_nbytes(name, elements, comm.size),
                dtype=str(getattr(array, "dtype", "uint8")).removeprefix("torch."),
                **({"op": op} if operation(name).reduces else {}),
                root=root,
                device="cuda" if on_device else "host",
            )
            if on_device and not comm.carriers_agreed:
                return str(found.choice.candidate)  # of which the ranks may know better
            if len(self._labels) >= _MOST_LABELS:
                self._labels.clear()
            self._labels[key] = str(found.choice.candidate)
        return self._labels[key]


class NamedCall:
    """A call that ``comm.plan`` has bound, with a range around each run."""

    def __init__(self, bound: Any, ranges: Ranges, label: str, nbytes: int) -> None:
        self._bound, self._ranges = bound, ranges
        self._label, self._nbytes = label, nbytes

    def __call__(self) -> Any:
        """Run the operation and return its output."""
        return self._ranges.run(self._label, self._nbytes, self._bound)

    def start(self) -> Any:
        """Start the operation and return its request."""
        return self._ranges.run(self._label, self._nbytes, self._bound.start)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bound, name)

    def __repr__(self) -> str:
        return repr(self._bound)


class NamedPlans:
    """A communicator's plans, with a range around each run of what they make."""

    def __init__(self, plans: Any, comm: Traced, ranges: Ranges) -> None:
        self._plans, self._comm, self._ranges = plans, comm, ranges

    def __getattr__(self, name: str) -> Any:
        make = getattr(self._plans, name)
        if name not in _NAMES:
            return make

        def named(*args: Any, **more: Any) -> NamedCall:
            made = make(*args, **more)
            said = self._ranges.label(self._comm, name, args, more)
            return NamedCall(made, self._ranges, *said)

        return named

    def __dir__(self) -> list[str]:
        return dir(self._plans)


P = TypeVar("P")


def plans_with_ranges(plans: P, comm: Traced) -> P:
    """Return plans whose calls a profiler sees, where it is to see any."""
    ranges = comm.ranges
    if ranges is None:
        return plans
    named: Any = NamedPlans(plans, comm, ranges)
    return cast("P", named)


def wanted_ranges() -> Ranges | None:
    """Return what shows calls to a profiler; None where nobody asks for it.

    Raises BackendError where somebody does, and there is no library.
    """
    if not env.read_bool("COMMRT_NVTX"):
        return None
    return _library(env.read_str("COMMRT_NVTX_LIB") or "")


def put_ranges(held: object, comm: Traced) -> None:
    """Put ranges around the calls of what a program holds, if they are wanted.

    ``comm`` has the facts of that, or is it.
    """
    ranges = comm.ranges
    if ranges is None:
        return
    for name in _NAMES:
        if hasattr(type(held), name):
            setattr(held, name, _named(ranges, held, comm, name))


def _named(ranges: Ranges, held: object, comm: Traced, name: str) -> Callable[..., Any]:
    """Return a method that, as a bound one, keeps its object."""

    def call(*args: Any, **more: Any) -> Any:
        label, nbytes = ranges.label(comm, name, args, more)
        method = getattr(type(held), name)
        return ranges.run(label, nbytes, method, held, *args, **more)

    call.__name__ = name
    return call


def _nbytes(array: Any) -> int:
    """Return the bytes of an array of any library, or of several; 0 if unknown."""
    if isinstance(array, list | tuple):
        return sum(map(_nbytes, array))
    found = getattr(array, "nbytes", None)
    if isinstance(found, int):
        return found
    size = getattr(array, "size", None)
    itemsize = getattr(getattr(array, "dtype", None), "itemsize", None)
    if isinstance(size, int) and isinstance(itemsize, int):
        return size * itemsize
    return 0


def _elements_nbytes(size: int, name: str, x: Any, out: Any) -> int:
    """Return the bytes of the whole vector, as rules count them."""
    spec = operation(name)
    if x is None:
        return _nbytes(out) * (size if spec.out_count == "div_size" else 1)
    return _nbytes(x) * (size if spec.out_count == "times_size" else 1)


@lru_cache(maxsize=4)
def _library(given: str) -> Ranges:
    """Return the library: the one that is named, a wheel's, or the system's."""
    if given:
        return Ranges(given)
    tried = []
    for path in (*_wheel_files(), *SONAMES):
        try:
            return Ranges(path)
        except BackendError as error:
            tried.append(str(error.__cause__ or error))
    raise BackendError(
        f"COMMRT_NVTX=1 asks for ranges, and there is no {' or '.join(SONAMES)} "
        f"({'; '.join(tried)}): pip install nvidia-nvtx-cu12, or nvidia-nvtx for CUDA "
        f"13, or set COMMRT_NVTX_LIB to its path, or leave COMMRT_NVTX out"
    )


def _wheel_files() -> Iterator[str]:
    for wheel in _WHEELS:
        try:
            files = importlib.metadata.distribution(wheel).files or ()
        except importlib.metadata.PackageNotFoundError:
            continue
        for file in files:
            if file.name in SONAMES:
                yield os.fspath(Path(os.fspath(file.locate())))
