# SPDX-License-Identifier: Apache-2.0
"""A folder as the store in which ranks of one machine meet: no torch, no MPI, no port.

``commrt.run`` makes the folder, which only its user may enter, and removes it. It has
the methods of a torch Store that ``StoreBootstrap`` uses.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from commrt.errors import BackendError
from commrt.files.write import write_file

__all__ = ["DirectoryStore"]


class DirectoryStore:
    """Keys are files; a value is there whole or not at all."""

    def __init__(self, folder: str | os.PathLike[str], size: int) -> None:
        self._folder = Path(folder)
        self._size = size
        self._prefix = f"{folder}/key-"
        if not self._folder.is_dir():
            raise BackendError(
                f"COMMRT_MEETING={self._folder} is no folder: python -m commrt.run, "
                f"which made it, has ended, or the variable was set by hand; unset it"
            )

    def set(self, key: str, value: bytes | str) -> None:
        """Write a value."""
        write_file(self._path(key), value)

    def get(self, key: str) -> bytes:
        """Return a value that is there."""
        with open(self._path(key), "rb") as file:
            return file.read()

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys have values."""
        return all(os.path.exists(self._path(key)) for key in keys)

    def add(self, key: str, amount: int) -> int:
        """Add to a counter that begins at 0; return what it is then."""
        with open(self._folder / "lock", "wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            before = self.get(key) if self.check([key]) else b"0"
            total = int(before) + amount
            self.set(key, str(total).encode())
        return total

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Write ``desired`` if the value is ``expected``, "" where there is none.

        Return the value then.
        """
        with open(self._folder / "lock", "wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            before = self.get(key) if self.check([key]) else b""
            if before != expected.encode():
                return before
            self.set(key, desired)
        return desired.encode()

    def delete_key(self, key: str) -> None:
        """Forget a value, if it is there."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path(key))

    def for_torch(self, purpose: str) -> Any:
        """Return a torch Store in the same folder; one for each purpose."""
        from torch.distributed import FileStore

        return FileStore(str(self._folder / f"torch-{quote(purpose, '')}"), self._size)

    def _path(self, key: str) -> str:
        # A string: pathlib interns the parts of each path, and there are many keys.
        name = key.replace("%", "%25").replace("/", "%2F")
        return f"{self._prefix}{name}"
