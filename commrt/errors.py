# SPDX-License-Identifier: Apache-2.0
"""Every exception commrt raises.

CommError
├── UsageError (ValueError)        a wrong argument or call; nothing was sent
│   ├── BufferError_ (TypeError)   an array commrt cannot communicate from or into
│   └── ClosedError                the communicator or request is gone
├── MismatchError                  ranks called different things (check mode)
├── TimeoutError_ (TimeoutError)   an operation did not finish in time
├── PeerFailedError                a peer died
├── RevokedError                   the communicator failed earlier
├── TruncationError                a message was longer than its receive buffer
├── BackendError (RuntimeError)    a backend or library is missing or failed
├── TableError (ValueError)        a selection table is malformed or foreign
└── ScheduleError (ValueError)     a schedule is wrong; raised by the verifier
"""

from __future__ import annotations

import builtins
import difflib
from collections.abc import Iterable

__all__ = [
    "BackendError",
    "BufferError_",
    "ClosedError",
    "CommError",
    "MismatchError",
    "PeerFailedError",
    "RevokedError",
    "ScheduleError",
    "TableError",
    "TimeoutError_",
    "TruncationError",
    "UsageError",
    "suggest",
]


class CommError(Exception):
    """Base of every error raised by commrt."""


class UsageError(CommError, ValueError):
    """An argument or a call is wrong. Nothing was sent; the call may be retried."""


class BufferError_(UsageError, TypeError):
    """The array is of a kind, layout or type that cannot be communicated."""


class ClosedError(UsageError):
    """The communicator was freed, or the process forked after it was created."""


class MismatchError(CommError):
    """Ranks called different operations; every rank raises the same text."""


class TimeoutError_(CommError, builtins.TimeoutError):
    """An operation did not finish within ``timeout_s``."""


class PeerFailedError(CommError):
    """A peer process died."""


class RevokedError(CommError):
    """The communicator failed in an earlier operation and must be replaced."""


class TruncationError(CommError):
    """A message was longer than the buffer that was to receive it."""


class BackendError(CommError, RuntimeError):
    """A backend, or a library that it needs, is missing or failed."""


class TableError(CommError, ValueError):
    """A selection table is malformed, hostile, or made for another machine."""


class ScheduleError(CommError, ValueError):
    """A schedule is not well-formed, can deadlock, races, or computes wrongly."""


def suggest(word: str, known: Iterable[str]) -> str:
    """Return the tail of a message about an unknown name: guesses, then all names."""
    names = sorted(known)
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.6)
    if not names:
        return ""
    hint = f"; did you mean {close[0]!r}?" if close else "."
    return f"{hint} Known: {', '.join(names)}."
