# SPDX-License-Identifier: Apache-2.0
"""Tells other ranks of calls that this rank has refused for their arguments."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from commrt.errors import (
    ChangedInFlightError,
    ClosedError,
    IntegrityError,
    MismatchError,
    PeerFailedError,
    ReductionError,
    RevokedError,
    TimeoutError_,
    TruncationError,
)
from commrt.group.group import Group
from commrt.vocabulary.checks import LARGEST_TAG, as_integer

__all__ = [
    "Place",
    "is_refusal",
    "is_untold",
    "refuse_messages",
    "said_refused",
    "take_places",
    "telling_peers",
]

Place = tuple[Any, Any]
"""Peer and tag of a message, as the program passed them."""

_OF_OPERATIONS = (
    ChangedInFlightError,
    ClosedError,
    IntegrityError,
    MismatchError,
    PeerFailedError,
    ReductionError,
    RevokedError,
    TimeoutError_,
    TruncationError,
)
"""Errors of calls whose operation has begun, or whose group has ended."""


def said_refused(rank: int, why: str) -> str:
    """Return what an error says of a call that ``rank`` has refused (as the engine)."""
    return f"rank {rank} has refused its call, and nothing was delivered: {why}"


def is_refusal(error: Exception) -> bool:
    """Return whether an error refuses a call: its operation has not begun."""
    return not isinstance(error, _OF_OPERATIONS)


def is_untold(error: Exception) -> bool:
    """Return whether other ranks have to hear of an error; once, for they do now."""
    is_told = getattr(error, "is_told", False) or getattr(error, "on_all_ranks", False)
    if is_told or not is_refusal(error):
        return False
    with suppress(AttributeError):  # some exceptions take no attributes
        error.is_told = True  # type: ignore[attr-defined]
    return True


def refuse_messages(
    group: Group,
    error: Exception,
    sends: Sequence[Place] = (),
    recvs: Sequence[Place] = (),
) -> None:
    """Take the places of messages that were refused here for ``error``.

    The receive of such a send raises RefusedError. A receive drops its message, and
    the send of that one raises where it has not ended. So the next messages meet.
    A message has no place where its peer or its tag is what is wrong.
    """
    if is_untold(error):
        take_places(group, error, sends, recvs)


def take_places(
    group: Group,
    error: Exception,
    sends: Sequence[Place] = (),
    recvs: Sequence[Place] = (),
) -> None:
    """Do the same, also where other ranks have heard of the error in another group."""
    if group.closed is not None or group.failure or os.getpid() != group.pid:
        return
    why = str(error).encode(errors="backslashreplace").decode()
    for is_send, places in ((True, sends), (False, recvs)):
        for peer, tag in places:
            rank, number = as_integer(peer), as_integer(tag)
            if rank is None or not 0 <= rank < group.size:
                continue
            if number is not None and 0 <= number <= LARGEST_TAG:
                group.refuse_message(rank, number, why, is_send)


@contextmanager
def telling_peers(
    group: Group, sends: Sequence[Place] = (), recvs: Sequence[Place] = ()
) -> Iterator[None]:
    """Let the peers of messages hear of an error in here, which refuses them."""
    try:
        yield
    except Exception as error:
        refuse_messages(group, error, sends, recvs)
        raise
