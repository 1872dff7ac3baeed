# SPDX-License-Identifier: Apache-2.0
"""The one way in which commrt writes a file that has a name.

- A regular file is written beside its place and renamed. A reader sees the old content
  or the new one, and a write that fails leaves the old one. Mode and owner stay.
- A symbolic link stays a link: the file that it names is written.
- A device, a FIFO and an open descriptor such as ``/dev/stdout`` are written in place:
  a file renamed onto them would replace them, for every program of the machine.
- A regular file that cannot be renamed onto is written in place, too. Its folder may
  refuse new files, another user may own it, or it may be mounted where it is.

A FIFO that nobody reads is waited for, as the shell does.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

__all__ = ["check_writable", "is_replaceable", "open_stream", "write_file"]

_Path = str | os.PathLike[str]
_MOST_LINKS = 40
"""Links that Linux follows, one after the other."""


def write_file(
    path: _Path, content: bytes | str, *, mode: int = 0o666, parents: bool = False
) -> None:
    """Write a whole file.

    Args:
        path: its name, or the name of a device or a link.
        content: bytes, or text that is written as UTF-8.
        mode: permissions of a new file, less the umask.
        parents: make the folders that are missing.

    Raises:
        OSError: it cannot be written. A regular file that was renamed onto is as it
            was before.
    """
    raw = content if isinstance(content, bytes) else encoded(content)
    with _errors_name(path):
        found = _found(path, parents)
        if found is not None and not _is_regular(path, found):
            _write_in_place(path, raw)
            return
        try:
            _rename_onto(Path(os.path.realpath(path)), raw, found, mode)
        except OSError as error:
            if found is None or error.errno not in _RENAMING_REFUSED:
                raise
            _write_in_place(path, raw)


def encoded(text: str) -> bytes:
    """Return text as UTF-8; names of files may hold what is no character."""
    return text.encode("utf-8", "backslashreplace")


def check_writable(path: _Path, *, parents: bool = False) -> None:
    """Raise the OSError that ``write_file`` would; what is there stays as it is."""
    with _errors_name(path):
        found = _found(path, parents)
        if found is not None and not _is_regular(path, found):
            return
        part = _part(Path(os.path.realpath(path)))
        try:
            os.close(os.open(part, _NEW))
        except OSError as error:
            if found is None or error.errno not in _RENAMING_REFUSED:
                raise
        else:
            part.unlink()


def is_replaceable(path: _Path) -> bool:
    """Return whether a later ``write_file`` replaces what an earlier one has written.

    A device or a FIFO has passed the earlier content on.
    """
    try:
        found = os.stat(path)
    except OSError:
        return True
    return _is_regular(path, found)


def open_stream(path: _Path) -> BinaryIO:
    """Return an empty file, written in place, for the output of a process."""
    with _errors_name(path):
        _found(path, parents=False)
        return open(path, "wb")


_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
_RENAMING_REFUSED = frozenset(
    (errno.EACCES, errno.EPERM, errno.EBUSY, errno.EROFS, errno.EXDEV)
)
"""A folder that takes no new file, another owner, a file mounted where it is."""


@contextmanager
def _errors_name(path: _Path) -> Iterator[None]:
    """Let errors name the file that was asked for, not one beside it."""
    try:
        yield
    except OSError as error:
        error.filename = os.fspath(path)
        if error.filename2 is not None:
            del error.filename2  # set to None, it would be a part of the text
        raise


def _found(path: _Path, parents: bool) -> os.stat_result | None:
    """Return what is there, links followed; None if nothing is.

    Raises:
        OSError: it is a folder, or may not be written.
    """
    if parents:
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
        except FileExistsError:
            raise OSError(errno.ENOTDIR, os.strerror(errno.ENOTDIR)) from None
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    if stat.S_ISDIR(found.st_mode):
        raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
    allowed = os.access(path, os.W_OK, effective_ids=True)
    if not allowed and _own_descriptor(path) is None:
        # The folder would let it be replaced, but somebody has protected the file.
        raise OSError(errno.EACCES, os.strerror(errno.EACCES))
    return found


def _is_regular(path: _Path, found: os.stat_result) -> bool:
    """Return whether a name means a regular file that can be renamed onto.

    The link of an open descriptor can name a regular file, too. Renamed onto, the file
    would no longer be the one that is open.
    """
    return stat.S_ISREG(found.st_mode) and _link_of_descriptor(path) is None


def _rename_onto(
    place: Path, raw: bytes, found: os.stat_result | None, mode: int
) -> None:
    part = _part(place)
    made = os.open(part, _NEW, mode)
    try:
        try:
            if found is not None:
                _look_like(made, found)
            _write_all(made, raw)
        finally:
            os.close(made)
        os.replace(part, place)
    except BaseException:
        with suppress(OSError):
            part.unlink()
        raise


def _part(place: Path) -> Path:
    # Not the name itself and more: that could be too long for a name.
    return place.with_name(f".commrt-{secrets.token_hex(8)}.part")


def _look_like(made: int, found: os.stat_result) -> None:
    """Give a new file the owner and the mode of the one that it replaces."""
    own = os.fstat(made)
    if (own.st_uid, own.st_gid) != (found.st_uid, found.st_gid):
        os.fchown(made, found.st_uid, found.st_gid)
    wanted = stat.S_IMODE(found.st_mode)
    if stat.S_IMODE(os.fstat(made).st_mode) != wanted:
        os.fchmod(made, wanted)


def _write_in_place(path: _Path, raw: bytes) -> None:
    own = _own_descriptor(path)
    if own is not None:
        # A socket's link cannot be opened; and what was printed so far comes first.
        for stream in (sys.stdout, sys.stderr):
            with suppress(AttributeError, ValueError):
                stream.flush()
        _write_all(own, raw)
        return
    flags = os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC | os.O_NOCTTY
    opened = os.open(path, flags)
    try:
        _write_all(opened, raw)
    finally:
        os.close(opened)


def _write_all(descriptor: int, raw: bytes) -> None:
    rest = memoryview(raw)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def _own_descriptor(path: _Path) -> int | None:
    """Return this process's open descriptor that a name such as /dev/stdout means."""
    link = _link_of_descriptor(path)
    if link is None or not link.name.isdecimal():
        return None
    own = ("/proc/self/fd", "/proc/thread-self/fd")
    return int(link.name) if str(link.parent) in map(os.path.realpath, own) else None


def _link_of_descriptor(path: _Path) -> Path | None:
    """Return the link of the kernel, below /proc, that a name leads to, if it does."""
    for _ in range(_MOST_LINKS):
        place = Path(os.path.realpath(Path(path).parent), Path(path).name)
        if place.parts[:2] == ("/", "proc"):
            return place
        try:
            path = Path(place.parent, os.readlink(place))
        except OSError:  # no link
            return None
    return None
