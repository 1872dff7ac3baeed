# SPDX-License-Identifier: Apache-2.0
"""The GPU kernels' own text, compiled as C++, and run on host memory.

``cuda_as_cpp.hpp`` lets a C++ compiler take it; UndefinedBehaviorSanitizer reports
loads and stores that a GPU would refuse because of their addresses.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np

from commrt.kernels.boxes import BoxTable
from commrt.kernels.source import modules, prelude
from commrt.vocabulary.dtypes import DType, ReduceOp

__all__ = ["Buffer", "OnCpu", "build"]

Array = np.ndarray[Any, Any]

_SOURCES = Path(__file__).with_name("kernels_on_cpu")
_BUILT = Path(__file__).parents[2] / "build" / "kernels_on_cpu"
_GUARD = 0xA5
# Without -ffp-contract=off some compilers make one instruction of a product and a sum.
_FLAGS = (
    "-std=c++17 -O1 -ffp-contract=off -fsanitize=undefined -shared -fPIC "
    "-Wall -Werror -Wno-unknown-pragmas"
)


def build() -> Path:
    """Return the library, compiled where the text has changed."""
    compiler = shutil.which("g++")
    assert compiler is not None, "building commrt needs g++, too"
    before, behind = (
        (_SOURCES / f"cuda_as_cpp{end}.hpp").read_text() for end in ("", "_launches")
    )
    bodies = "".join(module.body for module in modules())
    text = "\n".join([before, prelude(), bodies, behind])
    text = text.replace("#pragma once\n", "")
    digest = hashlib.sha256(f"{_FLAGS}\n{text}".encode()).hexdigest()
    made = _BUILT / digest[:16] / "kernels.so"
    if made.exists():
        return made
    made.parent.mkdir(parents=True, exist_ok=True)
    partial = made.with_name(f"{os.getpid()}.so")
    environ = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"}
    subprocess.run(
        [compiler, *_FLAGS.split(), "-x", "c++", "-", "-o", str(partial)],
        input=text,
        env=environ,
        text=True,
        check=True,
        timeout=300,
    )
    partial.rename(made)
    return made


class Buffer:
    """Bytes at any distance from a multiple of 64, between guards."""

    def __init__(self, content: Array, away: int = 0) -> None:
        self._whole = np.full(content.nbytes + 256, _GUARD, np.uint8)
        start = -self._whole.ctypes.data % 64 + 64 + away
        self._outside = np.ones(self._whole.size, bool)
        self._outside[start : start + content.nbytes] = False
        self.bytes = self._whole[start : start + content.nbytes]
        self.bytes[:] = np.frombuffer(content.tobytes(), np.uint8)

    @property
    def address(self) -> int:
        return self.bytes.ctypes.data

    def check_guards(self) -> None:
        assert (self._whole[self._outside] == _GUARD).all(), "written outside"


class _Arrays(ctypes.Structure):
    _fields_ = (("first", ctypes.c_void_p * 16),)


class _Table(ctypes.Structure):
    _fields_ = (
        ("boxes", ctypes.c_void_p),
        ("terms", ctypes.c_void_p),
        ("num_boxes", ctypes.c_uint32),
        ("units", ctypes.c_uint64),
    )


class OnCpu:
    """Launches kernels by name, over a few blocks of threads."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(str(build()))
        self._held: list[Buffer] = []

    def _launch(self, launch: str, kernel: str, blocks: int, *arguments: Any) -> None:
        address = ctypes.cast(getattr(self._library, kernel), ctypes.c_void_p)
        getattr(self._library, launch)(address, ctypes.c_uint(blocks), *arguments)

    def _launch_one(
        self, launch: str, kernel: str, thread: Any, *arguments: Any
    ) -> None:
        """Run one thread of a launch; ``thread`` is a structure of its numbers."""
        address = ctypes.cast(getattr(self._library, kernel), ctypes.c_void_p)
        getattr(self._library, launch)(address, ctypes.byref(thread), *arguments)

    def box_arguments(self, arrays: list[int], table: BoxTable) -> tuple[Any, Any]:
        """Return what a launch of boxes is given of arrays and a table, by address."""
        held = Buffer(np.frombuffer(table.content, np.uint8))
        self._held.append(held)
        first = _Arrays((ctypes.c_void_p * 16)(*arrays))
        at = held.address
        told = _Table(at, at + table.terms_at, table.num_boxes, table.units)
        return ctypes.byref(first), ctypes.byref(told)

    def reduce(
        self, op: str, dtype: DType, dst: Buffer, src: Buffer, blocks: int = 2
    ) -> None:
        count = ctypes.c_uint64(dst.bytes.size // dtype.itemsize)
        kernel = f"commrt_{op}_{dtype.name}"
        to, source = ctypes.c_void_p(dst.address), ctypes.c_void_p(src.address)
        self._launch("launch_reduce", kernel, blocks, to, source, count)

    def copy(self, dst: Buffer, src: Buffer, blocks: int = 2) -> None:
        to, source = ctypes.c_void_p(dst.address), ctypes.c_void_p(src.address)
        count = ctypes.c_uint64(dst.bytes.size)
        self._launch("launch_reduce", "commrt_copy", blocks, to, source, count)

    def scaled_sum(
        self,
        dtype: DType,
        dst: Buffer,
        src: Buffer,
        which: int,
        factor: tuple[float, int],
    ) -> None:
        self._launch(
            "launch_scaled",
            f"commrt_scaled_sum_{dtype.name}",
            2,
            ctypes.c_void_p(dst.address),
            ctypes.c_void_p(src.address),
            ctypes.c_uint64(dst.bytes.size // dtype.itemsize),
            ctypes.c_uint32(which),
            ctypes.c_double(factor[0]),
            ctypes.c_int64(factor[1]),
        )

    def divide(self, dtype: DType, dst: Buffer, divisor: int) -> None:
        count = ctypes.c_uint64(dst.bytes.size // dtype.itemsize)
        self._launch(
            "launch_divide",
            f"commrt_divide_{dtype.name}",
            2,
            ctypes.c_void_p(dst.address),
            count,
            ctypes.c_int64(divisor),
        )

    def move_boxes(
        self, kernel: str, buffer: Buffer, arrays: list[int], table: BoxTable
    ) -> None:
        """Pack or unpack boxes of the arrays at these addresses."""
        self._boxes("launch_boxes", f"commrt_{kernel}", buffer, arrays, table)

    def combine_boxes(
        self,
        dtype: DType,
        op: ReduceOp,
        buffer: Buffer,
        arrays: list[int],
        table: BoxTable,
    ) -> None:
        """Combine what the buffer holds with boxes of the arrays."""
        kernel = f"commrt_boxes_{dtype.name}"
        code = ctypes.c_uint32(int(op))
        self._boxes("launch_combine", kernel, buffer, arrays, table, code)

    def _boxes(
        self,
        launch: str,
        kernel: str,
        buffer: Buffer,
        arrays: list[int],
        table: BoxTable,
        *more: Any,
    ) -> None:
        held = Buffer(np.frombuffer(table.content, np.uint8))
        first = _Arrays((ctypes.c_void_p * 16)(*arrays))
        at = held.address
        told = _Table(at, at + table.terms_at, table.num_boxes, table.units)
        to = ctypes.c_void_p(buffer.address)
        both = ctypes.byref(first), ctypes.byref(told)
        self._launch(launch, kernel, 2, to, *both, *more)
        held.check_guards()

    def narrow(self, dtype: DType, bits: Array) -> Array:
        """Round float32s, given by their bits, to a short float."""
        rounded = np.zeros(bits.size, f"u{dtype.itemsize}")
        getattr(self._library, f"narrow_{dtype.name}")(
            ctypes.c_void_p(bits.ctypes.data),
            ctypes.c_void_p(rounded.ctypes.data),
            ctypes.c_uint64(bits.size),
        )
        return rounded

    def load_word(self, address: int) -> int:
        """Load four bytes as kernels do."""
        self._library.load_word.restype = ctypes.c_uint32
        return int(self._library.load_word(ctypes.c_void_p(address)))
