# SPDX-License-Identifier: Apache-2.0
"""A pretended MPI library that takes device memory, for ranks that are threads.

The library is C++ (tests/support/mpi_stub), compiled once: a progress thread that
needed the GIL for a call of MPI would stop who waits for it. It runs MPI's own
collectives on the memory of devices without hardware, and writes down what MPI would
not like.
"""

from __future__ import annotations

import ctypes
import itertools
from typing import Any

from stub_library import build_stub

from commrt import _native
from commrt.bootstrap.lending import Lease
from commrt.mpi import library
from commrt.vocabulary.dtypes import ReduceOp

__all__ = ["ERR_OTHER", "FakeDeviceMpi", "PretendedComms"]

ERR_TRUNCATE, ERR_OTHER = 15, 16
_BYTE, _FIRST_TYPE, _FIRST_OP = 0x100, 0x101, 0x200
_TYPES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32"),
    *("uint64", "float32", "float64", "complex64", "complex128"),
)
_WORLDS = itertools.count(1)


class FakeDeviceMpi:
    """The library, and its state. One at a time."""

    def __init__(self) -> None:
        path = build_stub("mpi_stub", "libpretended_mpi.so")
        self._stub = ctypes.CDLL(str(path))
        self._stub.stub_violations.restype = ctypes.c_char_p
        self._stub.stub_counter.restype = ctypes.c_long
        self._stub.stub_outstanding.restype = ctypes.c_long
        self._stub.stub_in_place.restype = ctypes.c_uint64
        self.forget()
        table = {name: self._address(name) for name in library.FUNCTIONS}
        _native.load_mpi(table, _BYTE, self._stub.stub_in_place(), ERR_TRUNCATE)
        self.constants = {"BYTE": _BYTE}
        for number, name in enumerate(_TYPES):
            self.constants[f"dtype:{name}"] = _FIRST_TYPE + number
        for op in library._MPI_OPS:
            self.constants[f"op:{op.name.lower()}"] = _FIRST_OP + int(ReduceOp(op))

    def forget(self) -> None:
        """Forget all that was called, and all that was set."""
        self._stub.stub_reset(ctypes.c_void_p(_native.current_device_function()))

    def _address(self, name: str) -> int:
        """Return where a function is; 0 for those that are not called here."""
        function = getattr(self._stub, name, None)
        if function is None:
            return 0
        return ctypes.cast(function, ctypes.c_void_p).value or 0

    def set(self, name: str, value: int) -> None:
        """Set ``looks``, tests that say no of what is complete, or ``hold``: all do.

        With ``needs_current`` no thread may call without a current device.
        """
        self._stub.stub_set(name.encode(), ctypes.c_long(value))

    def hold(self, rank: int, held: bool) -> None:
        """Let the tests of one rank's requests say no, whatever is complete."""
        self.set(f"hold {rank}", int(held))

    def fail(self, function: str, code: int = ERR_OTHER, after: int = 0) -> None:
        """Make one call of ``function``, after ``after`` others, return ``code``."""
        self._stub.stub_fail(function.encode(), code, ctypes.c_long(after))

    def counter(self, name: str) -> int:
        """Return how many calls of a function there were; ``done``: ended ones."""
        return int(self._stub.stub_counter(name.encode()))

    def outstanding(self) -> int:
        """Return how many requests have not ended."""
        return int(self._stub.stub_outstanding())

    def violations(self) -> list[str]:
        """Return what was called that MPI would not like."""
        said: bytes = self._stub.stub_violations()
        return said.decode().splitlines()

    def check(self) -> None:
        """Nothing wrong was called, and nothing is left."""
        assert self.violations() == []
        assert self.outstanding() == 0


class PretendedComms:
    """Lends communicators of the library: a number, the ranks, and who calls."""

    def __init__(self, world: Any, rank: int) -> None:
        self._world = vars(world).setdefault("mpi_number", next(_WORLDS))
        self._rank = rank
        self.left = 1000
        """How many may be lent yet."""

    def lend(
        self, ranks: tuple[int, ...], number: int, tag: int, timeout_s: float
    ) -> Lease | None:
        """Return one over ``ranks``, which all call this; None where none is left."""
        self.left -= 1
        if self.left < 0:
            return None
        whole = (self._world << 16 | number) << 16
        handle = whole | len(ranks) << 8 | ranks.index(self._rank)
        return Lease(ranks, number, handle)

    def give_back(self, lease: Lease) -> None:
        """It is not lent again."""

    def create(self, ranks: Any, tag: int) -> int:
        """Return one for the user's own."""
        return tag
