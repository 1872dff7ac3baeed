# SPDX-License-Identifier: Apache-2.0
"""Values that a launcher keeps for ranks of several hosts, and the words for asking.

A question is a list of words: what to do, and its arguments. The answer is one, too.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Sequence
from pathlib import Path

__all__ = ["KeptValues", "pack", "socket_in", "unpack"]

_LENGTH = struct.Struct("!I")


def pack(words: Sequence[bytes]) -> bytes:
    """Return words as bytes, each behind its length."""
    return b"".join(_LENGTH.pack(len(word)) + word for word in words)


def unpack(text: bytes) -> list[bytes]:
    """Return the words that ``pack`` has packed; raise ValueError if it has not."""
    words = []
    at = 0
    while at < len(text):
        if at + _LENGTH.size > len(text):
            raise ValueError("a word's length is cut off")
        (length,) = _LENGTH.unpack_from(text, at)
        at += _LENGTH.size
        if at + length > len(text):
            raise ValueError("a word is cut off")
        words.append(text[at : at + length])
        at += length
    return words


def socket_in(folder: str) -> Path:
    """Return the socket of a folder behind which a launcher keeps values."""
    return Path(folder, "launcher")


class KeptValues:
    """Values by key, for threads that answer the ranks of one host each."""

    def __init__(self) -> None:
        self._values: dict[bytes, bytes] = {}
        self._lock = threading.Lock()

    def answer(self, question: bytes) -> bytes:
        """Do what a rank asks for; return the words of the answer.

        The first word is ``ok``, or ``no`` where there is no such value or question.
        """
        try:
            name, *words = unpack(question)
            with self._lock:
                found = self._do(name, words)
        except ValueError:
            found = None
        return pack([b"no"] if found is None else [b"ok", found])

    def set(self, key: str, value: str) -> None:
        """Write a value of the launcher's own."""
        with self._lock:
            self._values[key.encode()] = value.encode()

    def _do(self, name: bytes, words: list[bytes]) -> bytes | None:
        values = self._values
        if name == b"check":
            return b"1" if all(key in values for key in words) else b"0"
        if name == b"get":
            (key,) = words
            return values.get(key)
        if name == b"set":
            key, value = words
            values[key] = value
            return b""
        if name == b"add":
            key, amount = words
            values[key] = b"%d" % (int(values.get(key, b"0")) + int(amount))
            return values[key]
        if name == b"compare_set":
            key, expected, desired = words
            if values.get(key, b"") == expected:
                values[key] = desired
            return values.get(key, b"")
        if name == b"delete":
            (key,) = words
            return b"0" if values.pop(key, None) is None else b"1"
        return None
