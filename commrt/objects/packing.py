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

__all__ = [
    "LARGE_NBYTES",
    "Packed",
    "Refusal",
    "memory_for_large",
    "no_memory_to_pickle",
    "pack",
    "unpack",
]

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

    @property
    def large_nbytes(self) -> int:
        """The bytes of all large parts."""
        return sum(part.nbytes for part in self.large)


@dataclass(frozen=True)
class Refusal:
    """The reason why a rank has no object to send."""

    text: str
    """What all ranks are told."""
    cause: Exception | None = None
    """The exception on this rank, if there is one."""
    for_memory: bool = False
    """True if there is no memory to pickle it."""

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
        return _packed([memoryview(pickled), *buffers])
    except MemoryError as error:
        return no_memory_to_pickle(called, error)
    except Exception as error:  # noqa: BLE001 - an object raises what it likes
        kind = type(error).__name__
        return Refusal(f"{called} cannot be pickled ({kind}: {_text(error)})", error)


def no_memory_to_pickle(called: str, error: MemoryError) -> Refusal:
    """Return the reason why a rank has no object to send: it has no memory for it."""
    why = f"there is no memory to pickle {called}{_in_brackets(error)}"
    return Refusal(why, error, for_memory=True)


def _packed(parts: list[memoryview]) -> Packed:
    """Return the parts of an object with the small ones put together."""
    lengths = np.array([len(parts), *(part.nbytes for part in parts)], "<i8")
    small = [part for part in parts if part.nbytes < LARGE_NBYTES]
    head = bytearray().join([lengths.data, *small])
    large = [
        np.frombuffer(part, np.uint8) for part in parts if part.nbytes >= LARGE_NBYTES
    ]
    return Packed(np.frombuffer(head, np.uint8), tuple(large))


def memory_for_large(head: Bytes) -> tuple[Bytes, ...]:
    """Return memory for the large parts of an object that is to come.

    Raises MemoryError where there is none.
    """
    return tuple(
        np.empty(nbytes, np.uint8)
        for nbytes in _lengths(head)
        if nbytes >= LARGE_NBYTES
    )


def unpack(what: str, head: Bytes, large: tuple[Bytes, ...]) -> Any:
    """Return the object; ObjectError where it cannot be unpickled here.

    Raises MemoryError_ where there is no memory to unpickle it.
    """
    try:
        parts = _parts(head, large)
        return pickle.loads(parts[0], buffers=parts[1:])
    except MemoryError as error:
        raise MemoryError_(
            f"{what}: there is no memory here to unpickle the object that "
            f"came{_in_brackets(error)}: free memory, or send less at a time"
        ) from error
    except Exception as error:
        raise ObjectError(
            f"{what}: the object that came cannot be unpickled here "
            f"({type(error).__name__}: {_text(error)}): its classes must be importable "
            f"on every rank"
        ) from error


def _parts(head: Bytes, large: tuple[Bytes, ...]) -> list[Any]:
    """Return all parts of an object, in their order."""
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
    return parts


def _lengths(head: Bytes) -> list[int]:
    """Return the bytes of each part."""
    number = int(head[:_WORD].view("<i8")[0])
    found: list[int] = head[_WORD : _WORD * (1 + number)].view("<i8").tolist()
    return found


def _in_brackets(error: MemoryError) -> str:
    """Return an error's text to stand behind others; often it has none."""
    text = _text(error)
    return f" ({text})" if text else ""


def _text(error: Exception) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - an object's own exception
        return "an error that cannot be shown"
