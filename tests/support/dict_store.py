# SPDX-License-Identifier: Apache-2.0
"""A store like torch's, for ranks that are threads."""

from __future__ import annotations

import threading

__all__ = ["DictStore"]


class DictStore:
    """The part of torch's Store that commrt uses, in a dictionary."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def set(self, key: str, value: bytes | str) -> None:
        with self._lock:
            self.values[key] = value.encode() if isinstance(value, str) else value

    def get(self, key: str) -> bytes:
        with self._lock:
            return self.values[key]

    def add(self, key: str, amount: int) -> int:
        with self._lock:
            total = int(self.values.get(key, b"0")) + amount
            self.values[key] = str(total).encode()
            return total

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        with self._lock:
            before = self.values.get(key, b"")
            if before == expected.encode():
                before = self.values[key] = desired.encode()
            return before

    def check(self, keys: list[str]) -> bool:
        with self._lock:
            return all(key in self.values for key in keys)

    def delete_key(self, key: str) -> bool:
        with self._lock:
            return self.values.pop(key, None) is not None
