# SPDX-License-Identifier: Apache-2.0
"""A group with collectives: what services and commrt's own exchanges are given."""

from __future__ import annotations

from typing import TYPE_CHECKING

from commrt.calls.methods import method_of
from commrt.group.group import Group
from commrt.vocabulary.operations import OPERATIONS

if TYPE_CHECKING:
    from commrt.vocabulary.signatures import Operations
else:
    Operations = object

__all__ = ["Channel"]


class Channel(Group, Operations):
    """A group of ranks that runs collectives; ``Communicator`` is what users get.

    The engine runs the calls that it knows (``native/calls/operation.cpp``), and asks
    the object's ``_call`` for all others.
    """

    if TYPE_CHECKING:  # Communicator has them, with what its services hold

        def free(self) -> None:
            """Release it; local, idempotent. Wait for its requests first."""

        def give_up(self, why: str) -> None:
            """Make it unusable, here and for ranks of this node that wait."""


for _spec in OPERATIONS:
    setattr(Channel, _spec.name, method_of(_spec))
