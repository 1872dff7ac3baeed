# SPDX-License-Identifier: Apache-2.0
"""Tags of messages on commrt's MPI communicator of all ranks.

Tags below ``FIRST`` belong to the bootstrap. Each identity, a communicator's or that of
a private channel, takes four from there on: steps of schedules, messages of its users,
and one for each MPI communicator that may be made for it. MPI_Comm_create_group needs
tags that no message has: Open MPI 5 sends its own messages on the same communicator by
that tag, and a probe for users' messages would take them away. All ranks would wait in
it for ever.
"""

from __future__ import annotations

__all__ = [
    "FIRST",
    "PROBES",
    "for_caller",
    "for_library",
    "is_packet",
    "last",
    "of_steps",
]

FIRST = 16
PROBES = (14, 15)
"""Of short and of long messages that are sent only to be timed."""
_EACH = 4


def of_steps(identity: int) -> int:
    """Return the tag of steps; the next one is that of messages of users."""
    return FIRST + _EACH * identity


def is_packet(tag: int) -> bool:
    """Return whether a tag is that of messages of users, of any communicator."""
    return tag >= FIRST and (tag - FIRST) % _EACH == 1


def for_library(identity: int) -> int:
    """Return the tag by which MPI makes the communicator of its own collectives."""
    return of_steps(identity) + 2


def for_caller(identity: int) -> int:
    """Return the tag by which MPI makes the communicator that the program gets."""
    return of_steps(identity) + 3


def last(identity: int) -> int:
    """Return the largest of them."""
    return for_caller(identity)
