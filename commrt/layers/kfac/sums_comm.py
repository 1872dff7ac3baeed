# SPDX-License-Identifier: Apache-2.0
"""A communicator for sums alone, which ranks give up where they are out of step."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

from commrt.comm import Communicator
from commrt.errors import CommError
from commrt.request import Request

__all__ = ["SumsComm"]


class SumsComm:
    """A copy of a communicator, which can be replaced by another one.

    Args:
        parent: the ranks; it stays the caller's.
        name: of the copy.

    Collective.
    """

    def __init__(self, parent: Communicator, name: str) -> None:
        self._parent, self._name = parent, name
        self._comm = parent.dup(name=name)

    @property
    def comm(self) -> Communicator:
        """The copy of now; keep it no longer than for the sums of a step."""
        return self._comm

    def renew(self, under_way: Iterable[Request]) -> None:
        """End all that is under way, on all ranks, and get a new copy; collective.

        Args:
            under_way: all requests of this rank.
        """
        with suppress(CommError):  # another rank may have been faster
            self._comm.revoke("the ranks of KFAC are out of step")
        for each in under_way:
            with suppress(CommError):
                each.wait()
        self._comm.free()
        self._comm = self._parent.dup(name=self._name)

    def free(self) -> None:
        """Release the copy; local, idempotent."""
        self._comm.free()
