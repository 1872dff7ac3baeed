# SPDX-License-Identifier: Apache-2.0
"""Frames between the launcher and its process on a host, through a remote shell.

A frame has a kind, a number and data. It begins with the length of the data.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from enum import IntEnum

__all__ = ["HELLO", "Frames", "Kind", "frame"]

HELLO = b"commrt.run: host process 1\n"
"""Begins what a host's process sends; a shell may have printed words before it."""
_HEAD = struct.Struct("!BII")
_LONGEST_NBYTES = 1 << 30


class Kind(IntEnum):
    """The meaning of a frame."""

    # To a host:
    START = 0
    """JSON: the ranks to start, and how."""
    SIGNAL = 1
    """The number is a signal for all ranks."""
    END = 2
    """The number is a signal for all ranks, which are killed after their grace."""
    ANSWER = 3
    """The number is a connection of a rank's with the store."""
    # To the launcher:
    PLACE = 4
    """JSON: the host's address and a port that is free."""
    STARTED = 5
    """JSON: the process of each rank."""
    OUT = 6
    """The number is a rank, which has printed the data."""
    ERR = 7
    """The number is a rank, which has printed the data as errors."""
    ENDED = 8
    """The number is a rank; the data its exit status, or minus a signal."""
    ASK = 9
    """The number is a connection of a rank's with the store."""
    FAILED = 10
    """The host cannot do what it is asked for; the data say why."""
    # Both ways:
    ALIVE = 11
    """Says that there is somebody."""


def frame(kind: Kind, number: int = 0, data: bytes = b"") -> bytes:
    """Return a frame as bytes."""
    return _HEAD.pack(kind, number, len(data)) + data


class Frames:
    """Frames out of the bytes that come."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, piece: bytes) -> Iterator[tuple[Kind, int, bytes]]:
        """Take bytes; yield the kind, number and data of each frame that is whole.

        Raises ValueError where the bytes are no frames.
        """
        self._buffer += piece
        while len(self._buffer) >= _HEAD.size:
            kind, number, length = _HEAD.unpack_from(self._buffer)
            if length > _LONGEST_NBYTES:
                raise ValueError(f"a frame of {length} bytes")
            end = _HEAD.size + length
            if len(self._buffer) < end:
                return
            data = bytes(self._buffer[_HEAD.size : end])
            del self._buffer[:end]
            yield Kind(kind), number, data
