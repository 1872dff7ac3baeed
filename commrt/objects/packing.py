# SPDX-License-Identifier: Apache-2.0
"""One object as bytes: a head, and the parts that are large.

Pickle's protocol 5 leaves the memory of arrays out of the pickle. The parts of an
object are its pickle and the memory of its arrays. Parts of at least ``LARGE_NBYTES``
are sent from where they are, and received where they stay. The others are put into the
head.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from commrt.errors import MemoryError_, ObjectError

__all__ = ["LARGE_NBYTES", "Packed", "Refusal", "memory_for_large", "pack", "unpack"]

LARGE_NBYTES = 65536
Bytes = npt.NDArray[np.uint8]
_MOST_TEXT = 2000
_WORD = 8


@dataclass(frozen=True)
class Packed:
    """An object as bytes."""

    head: Bytes
    """The number of parts, their lengths, and the small ones."""
    large: tuple[Bytes, ...] = ()
    """The memory of large parts, where it is."""


@dataclass(frozen=True)
class Refusal:
    """The reason why a rank has no object to send."""

    text: str
    """What all ranks are told."""
    cause: Exception | None = None
    """The exception on this rank, if there is one."""

    @property
    def head(self) -> Bytes:
        """The text as bytes."""
        raw = self.text[:_MOST_TEXT].encode(errors="replace")
        return np.frombuffer(raw, np.uint8)


def pack(x: Any, called: str = "x") -> Packed | Refusal:
    """Return an object as bytes, or why it cannot be pickled.

    Args:
        x: the object.
        called: what messages call it.
    """
    buffers: list[memoryview] = []

    def keep(buffer: pickle.PickleBuffer) -> bool:
        """Take memory out of the pickle; True leaves it in."""
        try:
            buffers.append(buffer.raw())
        except BufferError:  # it is not contiguous
            return True
        return False

    try:
        pickled = pickle.dumps(x, protocol=5, buffer_callback=keep)
    except Exception as error:  # noqa: BLE001 - an object raises what it likes
        kind = type(error).__name__
        return Refusal(f"{called} cannot be pickled ({kind}: {_text(error)})", error)
    parts = [memoryview(pickled), *buffers]
    lengths = np.array([len(parts), *(part.nbytes for part in parts)], "<i8")
    small = [part for part in parts if part.nbytes < LARGE_NBYTES]
    head = bytearray().join([lengths.data, *small])
    large = [
        np.frombuffer(part, np.uint8) for part in parts if part.nbytes >= LARGE_NBYTES
    ]
    return Packed(np.frombuffer(head, np.uint8), tuple(large))


def memory_for_large(head: Bytes) -> tuple[Bytes, ...]:
    """Return memory for the large parts of an object that is to come."""
    try:
        return tuple(
            np.empty(nbytes, np.uint8)
            for nbytes in _lengths(head)
            if nbytes >= LARGE_NBYTES
        )
    except MemoryError as error:
        raise MemoryError_(
            f"an object that comes does not fit into memory ({error}): send it in parts"
        ) from error


def unpack(what: str, head: Bytes, large: tuple[Bytes, ...]) -> Any:
    """Return the object; ObjectError where it cannot be unpickled here."""
    lengths = _lengths(head)
    at = _WORD * (1 + len(lengths))
    parts: list[Any] = []
    left = iter(large)
    for nbytes in lengths:
        if nbytes >= LARGE_NBYTES:
            parts.append(next(left).data)
        else:  # a copy, so that one small array does not keep the memory of all
            parts.append(bytearray(head[at : at + nbytes]))
            at += nbytes
    try:
        return pickle.loads(parts[0], buffers=parts[1:])
    except Exception as error:
        raise ObjectError(
            f"{what}: the object that came cannot be unpickled here "
            f"({type(error).__name__}: {_text(error)}): its classes must be importable "
            f"on every rank"
        ) from error


def _lengths(head: Bytes) -> list[int]:
    """Return the bytes of each part."""
    number = int(head[:_WORD].view("<i8")[0])
    found: list[int] = head[_WORD : _WORD * (1 + number)].view("<i8").tolist()
    return found


def _text(error: Exception) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - an object's own exception
        return "an error that cannot be shown"
