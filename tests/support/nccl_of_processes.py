# SPDX-License-Identifier: Apache-2.0
"""A pretended libnccl for ranks that are processes, and what tests ask it.

    nccl = NcclOfProcesses(tmp_path, 22809)
    ranks(2, function, env=nccl.environment)   # they find it as they find the real one
    assert nccl.complaints() == []             # what the real one would not like

The library is C++ (tests/support/nccl_of_processes), compiled once. Its ranks meet in
shared memory, and its kernels are host functions in the streams of a libcuda; with
``has_streams=False`` there is no CUDA, and a call does all at once. In a rank, ``here``
makes calls fail and counts them.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stub_library import build_stub

from commrt.errors import CommError
from commrt.nccl import NcclComm
from commrt.vocabulary.dtypes import ReduceOp, dtype_by_name
from commrt.vocabulary.operations import operation

__all__ = ["Here", "NcclOfProcesses", "OverNccl", "build", "error_of", "here"]


def build() -> Path:
    """Return the compiled library, made where the sources have changed."""
    return build_stub(
        *("nccl_of_processes", "libnccl.so.2"),
        beside=["nccl_common"],
        headers=["devices/device.hpp", "devices/cuda_driver.hpp"],
    )


@dataclass(frozen=True)
class NcclOfProcesses:
    """The library as a test gives it to its ranks."""

    folder: Path
    """Where complaints are kept."""
    version: int = 22809
    has_streams: bool = True
    """True if there is a libcuda, whose streams it works in."""
    polls: int = 1
    """How often a communicator that does not block says that it is in progress."""

    @property
    def environment(self) -> dict[str, str]:
        """Variables of the ranks."""
        return {
            "COMMRT_NCCL_LIB": str(build()),
            "NCCL_STUB_VERSION": str(self.version),
            "NCCL_STUB_POLLS": str(self.polls),
            "NCCL_STUB_COMPLAINTS": str(self._file),
            **({} if self.has_streams else {"NCCL_STUB_STREAMS": "none"}),
        }

    def complaints(self) -> list[str]:
        """Return what the ranks have called wrongly."""
        return self._file.read_text().splitlines() if self._file.exists() else []

    @property
    def _file(self) -> Path:
        return self.folder / "complaints of NCCL"


class Here:
    """The library of this process, as a rank's function sees it."""

    def __init__(self) -> None:
        self._stub = ctypes.CDLL(os.environ["COMMRT_NCCL_LIB"])
        self._stub.stub_counter.restype = ctypes.c_long

    def fail(self, function: str, code: int, after: int = 0) -> None:
        """Make one call of ``function``, after ``after`` others, return ``code``."""
        self._stub.stub_fail(function.encode(), code, ctypes.c_long(after))

    def async_error(self, code: int) -> None:
        """Let this process's communicators fail in the background."""
        self._stub.stub_async_error(code)

    def counter(self, name: str) -> int:
        """Return how many calls, groups, kernels, copies, made, destroyed, aborted."""
        return int(self._stub.stub_counter(name.encode()))


def here() -> Here:
    """Return the library of this process."""
    return Here()


class OverNccl:
    """commrt's collectives on host arrays, by an ``NcclComm`` without streams."""

    def __init__(self, comm: NcclComm) -> None:
        self.comm = comm
        self.rank = comm.rank

    def __getattr__(self, coll: str) -> Any:
        """Return the collective of that name."""

        def call(x: Any, *, out: Any = None, **arguments: Any) -> Any:
            return self._run(coll, x, x if out is None else out, arguments, out)

        return call

    def _run(
        self, coll: str, x: Any, to: Any, arguments: dict[str, Any], out: Any
    ) -> Any:
        spec = operation(coll)
        op = arguments.pop("op", None)
        common: dict[str, Any] = {
            "x": x.ctypes.data,
            "out": to.ctypes.data,
            "dtype": dtype_by_name(x.dtype.name),
            "stream": 0,
            "op": None if op is None else ReduceOp[op.upper()],
        }
        if spec.count_arguments:
            sent: Sequence[int] | None = arguments.pop("send_counts", None)
            counts = arguments.pop("counts", sent)
            self.comm.run_counted(coll, counts=counts, **common, **arguments)
        else:
            blocks = self.comm.size
            count = x.size // blocks if coll in _BLOCKS_OF_X else x.size
            self.comm.run(coll, count=count, **common, **arguments)
        has_root_only = coll in ("reduce", "gather", "gatherv")
        if out is None and has_root_only and self.rank != arguments["root"]:
            return None
        return to


_BLOCKS_OF_X = ("reduce_scatter", "alltoall", "scatter")


def error_of(call: Callable[[], object]) -> str:
    """Return the error of a call in words."""
    try:
        call()
    except CommError as error:
        return f"{type(error).__name__}: {error}"
    return "none"
