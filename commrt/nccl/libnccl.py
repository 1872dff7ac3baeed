# SPDX-License-Identifier: Apache-2.0
"""Find libnccl.so.2: one per process, the same one that torch and cupy use.

A second copy would have communicators, threads and a configuration of its own, and
adopted communicators are pointers into the copy that made them. So the one that is
loaded already comes first.
"""

from __future__ import annotations

import importlib.metadata
import os
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from commrt import _native, env
from commrt.errors import BackendError, DeviceMissingError
from commrt.nccl.features import OLDEST, version_text

__all__ = [
    "Library",
    "describe",
    "find",
    "library",
    "taken",
    "wheel_files",
    "why_missing",
]

SONAME = "libnccl.so.2"
WHEELS = ("nvidia-nccl-cu12", "nvidia-nccl-cu13")
_INSTALL = (
    "pip install 'commrt[cuda12]' or 'commrt[cuda13]', or set COMMRT_NCCL_LIB to the "
    "path of a libnccl.so.2"
)


@dataclass(frozen=True)
class Library:
    """The library that was taken, and why it was."""

    native: _native.NcclLibrary
    """Its function table."""
    why: str
    """The place where it was found, in words."""
    serves: frozenset[str] = frozenset(("cuda",))
    """Kinds of devices whose memory and streams it takes: a pretended one takes those
    of tests."""

    @property
    def path(self) -> str:
        """The file."""
        return self.native.path

    @property
    def version(self) -> int:
        """The version, as ``ncclGetVersion`` counts: 22809 is 2.28.9."""
        return self.native.version

    def __str__(self) -> str:
        return f"NCCL {version_text(self.version)}, {self.path} ({self.why})"


_lock = threading.Lock()
_found: list[Library] = []


def library() -> Library:
    """Return the process's NCCL, opened at the first call.

    Raises BackendError with everything that was tried where there is none.
    """
    with _lock:
        if not _found:
            _found.append(find())
        return _found[0]


def taken() -> Library | None:
    """Return the NCCL that ``library`` has opened, without looking for it."""
    with _lock:
        return _found[0] if _found else None


def why_missing() -> str | None:
    """Return why this process has no use of NCCL; None where it has.

    Opens the library, where there is a GPU.
    """
    try:
        _, _, cards = _native.cuda_driver("")
    except DeviceMissingError as error:
        return str(error)
    if not cards:
        return "the CUDA driver shows no device: look at CUDA_VISIBLE_DEVICES"
    try:
        library()
    except BackendError as error:
        return str(error)
    return None


def find(environ: Mapping[str, str] | None = None) -> Library:
    """Open the first NCCL of: loaded already, COMMRT_NCCL_LIB, a wheel, the system.

    A path that the user gave and that cannot be used is an error, not passed over. So
    is a library that is too old where it is loaded already: a second one beside it
    would do harm.
    """
    tried = []
    for path, why, only_loaded, is_final in _candidates(environ):
        opened, problem = _native.nccl_open(path, only_loaded=only_loaded)
        if opened is None and not is_final:
            tried.append(f"{why}: {problem}")
            continue
        if opened is None:
            raise BackendError(
                f"NCCL: {why} is {path}, which cannot be used: {problem}. Correct it, "
                f"or unset it for the usual search"
            )
        if opened.version >= OLDEST:
            return Library(opened, why)
        problem = (
            f"{opened.path} is NCCL {version_text(opened.version)}, and commrt needs "
            f"{version_text(OLDEST)} or newer"
        )
        if is_final or only_loaded:
            raise BackendError(f"NCCL: {why}: {problem}. To install one: {_INSTALL}")
        tried.append(f"{why}: {problem}")
    raise BackendError(
        f"NCCL is not to be found. Tried: {'; '.join(tried)}. To install it: {_INSTALL}"
    )


def _candidates(
    environ: Mapping[str, str] | None,
) -> Iterator[tuple[str, str, bool, bool]]:
    """Yield path, reason, whether to look only in the process, whether it must do."""
    yield SONAME, "loaded already in this process", True, False
    named = env.value("COMMRT_NCCL_LIB", environ)
    if named is not None:
        yield named, "COMMRT_NCCL_LIB", False, True
    for wheel, path in wheel_files():
        yield str(path), f"wheel {wheel}", False, False
    yield SONAME, "system", False, False


def wheel_files() -> Iterator[tuple[str, Path]]:
    """Yield the installed NCCL wheels and their library, without importing anything.

    Both wheels unpack into one folder: where both are installed, the file is that of
    the one installed last.
    """
    for wheel in WHEELS:
        try:
            files = importlib.metadata.distribution(wheel).files or ()
        except importlib.metadata.PackageNotFoundError:
            continue
        for file in files:
            if file.name == SONAME:
                yield wheel, Path(os.fspath(file.locate()))


def describe() -> Iterator[str]:
    """Yield lines for ``python -m commrt info``: what is there, or why nothing is."""
    try:
        taken = library()
    except BackendError as error:
        yield f"not available: {error}"
        return
    yield f"NCCL {version_text(taken.version)}, taken because: {taken.why}"
    yield taken.path
    wheels = [wheel for wheel, _ in wheel_files()]
    if len(wheels) > 1:
        yield (
            f"{' and '.join(wheels)} are both installed and overwrite each other: "
            f"uninstall both, then install the one for your driver"
        )
