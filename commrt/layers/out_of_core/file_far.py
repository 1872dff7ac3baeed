# SPDX-License-Identifier: Apache-2.0
"""A file as far memory."""

from __future__ import annotations

import fcntl
import os
import stat
from pathlib import Path
from typing import NamedTuple, TypeAlias

import torch

from commrt.errors import UsageError
from commrt.layers.out_of_core.far import FarMemory, Job, Lane

__all__ = ["FileFar"]

Tensor: TypeAlias = torch.Tensor


class _Slot(NamedTuple):
    """A part of the file."""

    begin: int
    nbytes: int


class FileFar(FarMemory):
    """A file, written and read by two threads; it is removed when it is closed.

    Each process has a file of its own, locked while it is open. Parts that are freed
    are used again, the first one that is long enough. The file is as long as the most
    that was stored at a time, and a little more.

    Args:
        path: of the file; what it holds is lost.
        limit_nbytes: most bytes; None: as many as the disk has.

    Raises OSError if the file cannot be made, and UsageError if another FileFar has
    it, or if it is a device or the like. A disk that is full, or fails, is a
    BackendError of the step.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, limit_nbytes: int | None = None
    ) -> None:
        super().__init__(limit_nbytes)
        self._path = Path(path)
        self._file = _opened(self._path)
        self._out, self._in = Lane("commrt-file-out"), Lane("commrt-file-in")
        self._free: list[_Slot] = []
        self._end = 0
        self._is_closed = False

    def store(self, source: Tensor) -> tuple[_Slot, Job]:
        """Start to write bytes."""
        self._take(source.numel())
        slot = self._allocated(source.numel())
        try:
            job = self._out.do(
                lambda: _write(self._file, slot, source), f"FileFar {self._path}"
            )
        except BaseException:
            self.drop(slot)
            raise
        return slot, job

    def load(self, slot: _Slot, target: Tensor) -> Job:
        """Start to read bytes."""
        return self._in.do(
            lambda: _read(self._file, slot, target), f"FileFar {self._path}"
        )

    def drop(self, slot: _Slot) -> None:
        """Free a part of the file."""
        self._give(slot.nbytes)
        with self._lock:
            parts = sorted([*self._free, slot])
            self._free = []
            for part in parts:
                last = self._free[-1] if self._free else None
                if last is not None and last.begin + last.nbytes == part.begin:
                    self._free[-1] = _Slot(last.begin, last.nbytes + part.nbytes)
                else:
                    self._free.append(part)

    def close(self) -> None:
        """End the threads, and remove the file."""
        self._out.close()
        self._in.close()
        if not self._is_closed:
            self._is_closed = True
            self._path.unlink(missing_ok=True)
            os.close(self._file)

    def _allocated(self, nbytes: int) -> _Slot:
        with self._lock:
            for place, part in enumerate(self._free):
                if part.nbytes >= nbytes:
                    rest = _Slot(part.begin + nbytes, part.nbytes - nbytes)
                    self._free[place : place + 1] = [rest] if rest.nbytes else []
                    return _Slot(part.begin, nbytes)
            self._end += nbytes
            return _Slot(self._end - nbytes, nbytes)


def _opened(path: Path) -> int:
    """Return an empty file that no other FileFar has; two would mix their bytes."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    file = os.open(path, flags, 0o600)
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise UsageError(f"FileFar: {path} is no regular file; give another path")
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(file, 0)
    except BlockingIOError:
        os.close(file)
        raise UsageError(
            f"FileFar: another one has the file {path}; give each process a file of "
            f"its own, such as one with its rank in the name"
        ) from None
    except BaseException:
        os.close(file)
        raise
    return file


def _write(file: int, slot: _Slot, source: Tensor) -> None:
    """Write all bytes; a device's come to the host first."""
    left = memoryview(source.cpu().numpy())
    at = slot.begin
    while left:
        count = os.pwrite(file, left, at)
        left, at = left[count:], at + count


def _read(file: int, slot: _Slot, target: Tensor) -> None:
    """Read all bytes into a tensor of the host or of a device."""
    host = target if target.is_cpu else torch.empty(slot.nbytes, dtype=torch.uint8)
    left = memoryview(host.numpy())
    at = slot.begin
    while left:
        count = os.preadv(file, [left], at)
        if not count:
            raise OSError(f"the file ends at byte {at}, where saved tensors were")
        left, at = left[count:], at + count
    if host is not target:
        target.copy_(host)
