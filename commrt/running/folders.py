# SPDX-License-Identifier: Apache-2.0
"""The folder in which ranks of one machine meet: its lock, and its end."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["meeting_folder"]

_FOLDER = "commrt-run-"
_NEW_S = 60.0
"""A folder so young may belong to a launcher that has yet to lock it."""


@contextmanager
def meeting_folder() -> Iterator[str]:
    """Make a folder that only this user may enter, and remove it at the end.

    Folders of launchers that were killed are removed, too.
    """
    _remove_leftovers(Path(tempfile.gettempdir()))
    folder = tempfile.mkdtemp(prefix=_FOLDER)
    lock = _lock_of(Path(folder))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _lock_of(folder: Path) -> int:
    """Return a descriptor of the folder's lock, which this process holds to its end."""
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise
    return lock


def _remove_leftovers(parent: Path) -> None:
    """Remove the folders of this user's launchers that were killed.

    A launcher that lives holds its folder's lock, in whatever container it runs.
    """
    for folder in parent.glob(f"{_FOLDER}*"):
        with contextlib.suppress(OSError):
            status = folder.lstat()
            is_new = time.time() - status.st_mtime < _NEW_S
            if status.st_uid != os.geteuid() or is_new:
                continue
            lock = _lock_of(folder)
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)
