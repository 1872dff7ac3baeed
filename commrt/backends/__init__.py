# SPDX-License-Identifier: Apache-2.0
"""The registry of backends.

Third parties add theirs by the entry-point group ``commrt.backends``: each entry names
a class without arguments, see ``base.Backend``.
"""

from __future__ import annotations

from functools import lru_cache
from importlib.metadata import entry_points

from commrt.backends.base import (
    Attached,
    Availability,
    Backend,
    Capabilities,
    Surroundings,
)
from commrt.backends.gloo.backend import GlooBackend
from commrt.backends.ipc.backend import IpcBackend
from commrt.backends.mpi.backend import MpiBackend
from commrt.backends.nccl.backend import NcclBackend
from commrt.backends.shm import LocalBackend, ShmBackend
from commrt.backends.staged.backend import StagedBackend
from commrt.backends.tcp.backend import TcpBackend
from commrt.errors import BackendError, UsageError, suggest

__all__ = [
    "Attached",
    "Availability",
    "Backend",
    "Capabilities",
    "Surroundings",
    "all_backends",
    "available",
    "get",
]

ENTRY_POINTS = "commrt.backends"


@lru_cache(maxsize=1)
def all_backends() -> dict[str, Backend]:
    """Return every registered backend by name, the built-in ones first."""
    found: dict[str, Backend] = {}
    built_in: tuple[Backend, ...] = (
        ShmBackend(),
        MpiBackend(),
        GlooBackend(),
        TcpBackend(),
        LocalBackend(),
        NcclBackend(),
        IpcBackend(),
        StagedBackend(),
    )
    for backend in built_in:
        found[backend.name] = backend
    for entry in entry_points(group=ENTRY_POINTS):
        try:
            backend = entry.load()()
        except Exception as exc:
            raise BackendError(
                f"backend {entry.name!r} ({entry.value}) cannot be loaded: {exc}"
            ) from exc
        if backend.name in found:
            raise BackendError(
                f"backend {entry.name!r} ({entry.value}) calls itself "
                f"{backend.name!r}, which exists already"
            )
        found[backend.name] = backend
    return found


def get(name: str) -> Backend:
    """Return the backend called ``name``, or raise UsageError with a suggestion."""
    try:
        return all_backends()[name]
    except KeyError:
        raise UsageError(
            f"unknown backend {name!r}{suggest(name, all_backends())}"
        ) from None


def available() -> list[Availability]:
    """Return, for every backend, whether it can be used here and why not."""
    return [backend.availability() for backend in all_backends().values()]
