# SPDX-License-Identifier: Apache-2.0
"""The session that functions of ``commrt.hvd`` use: of the process, or of a thread.

A process is one rank, so all of its threads share a session. Where ranks are threads of
one process (``commrt.local``), each thread has its own.
"""

from __future__ import annotations

import threading
from typing import Any

from commrt.comm import Communicator, core_of
from commrt.errors import UsageError
from commrt.hvd.session import Session

__all__ = ["begin", "current", "end", "session_or_none"]


class _Sessions:
    """The sessions of this process."""

    def __init__(self) -> None:
        self.of_process: Session | None = None
        self.of_thread = threading.local()


_SESSIONS = _Sessions()


def session_or_none() -> Session | None:
    """Return the current session; None: there is none."""
    mine: Session | None = getattr(_SESSIONS.of_thread, "session", None)
    found = _SESSIONS.of_process if mine is None else mine
    return found if found is not None and found.is_open else None


def current() -> Session:
    """Return the current session; UsageError without one."""
    found = session_or_none()
    if found is None:
        raise UsageError("commrt.hvd has no session: call hvd.init() first")
    return found


def begin(comm: Communicator, **options: Any) -> Session:
    """Make the current session over a communicator; collective."""
    session = Session(comm, **options)
    if core_of(comm).in_process:
        _SESSIONS.of_thread.session = session
    else:
        _SESSIONS.of_process = session
    return session


def end() -> None:
    """Close the current session, if there is one."""
    found = session_or_none()
    if found is not None:
        found.close()
