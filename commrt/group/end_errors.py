# SPDX-License-Identifier: Apache-2.0
"""Errors of calls on a group that has failed."""

from __future__ import annotations

from typing import Protocol

from commrt.errors import (
    CommError,
    IntegrityError,
    MismatchError,
    PeerFailedError,
    RevokedError,
)

__all__ = ["Failed", "error_of_end"]


class Failed(Protocol):
    """A group that cannot be used any more."""

    @property
    def name(self) -> str:
        """Its name in messages."""

    @property
    def failure(self) -> str:
        """Why it failed, in words."""

    @property
    def remedy(self) -> str:
        """The way to a new group, in words."""

    @property
    def calls_differ(self) -> bool:
        """True if it failed as ranks made different calls."""

    @property
    def is_damaged(self) -> bool:
        """True if it failed as a message was damaged."""

    @property
    def failed_by_death(self) -> bool:
        """True if it failed as a rank's process ended."""


def error_of_end(group: Failed) -> CommError:
    """Return what a call on a failed group raises."""
    if group.calls_differ:
        return MismatchError(group.failure)
    if group.is_damaged:
        return IntegrityError(f"{group.failure}: {group.remedy} on all ranks")
    if group.failed_by_death:
        return PeerFailedError(
            f"{group.name} cannot be used any more, because {group.failure}: "
            f"{group.remedy} to go on with the ranks that remain"
        )
    return RevokedError(
        f"{group.name} failed in an earlier operation ({group.failure}): its ranks no "
        f"longer agree; {group.remedy} on all of them to go on with a new communicator"
    )
