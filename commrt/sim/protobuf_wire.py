# SPDX-License-Identifier: Apache-2.0
"""Protocol buffers' wire format, as far as a writer of small messages needs it.

The format is that of Google's "Protocol Buffers: Encoding": a field is a tag and a
value, whole numbers are base-128 varints, and all else has its length before it.
"""

from __future__ import annotations

from collections.abc import Iterable

__all__ = [
    "bytes_field",
    "delimited",
    "int_field",
    "ints_field",
    "text_field",
    "varint",
]

_VARINT, _DELIMITED = 0, 2
_MOST = 1 << 64


def varint(value: int) -> bytes:
    """Return a whole number from 0 to 2**64 - 1, seven bits a byte, lowest first."""
    assert 0 <= value < _MOST, value
    found = bytearray()
    while value > 0x7F:
        found.append(0x80 | value & 0x7F)
        value >>= 7
    found.append(value)
    return bytes(found)


def int_field(field: int, value: int) -> bytes:
    """Return a field with a whole number from 0 on, an enumeration or a truth value."""
    return varint(field << 3 | _VARINT) + varint(value)


def ints_field(field: int, values: Iterable[int]) -> bytes:
    """Return a repeated field of whole numbers, packed; nothing if there are none."""
    packed = b"".join(map(varint, values))
    return bytes_field(field, packed) if packed else b""


def text_field(field: int, text: str) -> bytes:
    """Return a field with text."""
    return bytes_field(field, text.encode())


def bytes_field(field: int, data: bytes) -> bytes:
    """Return a field with bytes, or with an inner message."""
    return varint(field << 3 | _DELIMITED) + delimited(data)


def delimited(message: bytes) -> bytes:
    """Return a message behind its length, as files of several messages have them."""
    return varint(len(message)) + message
