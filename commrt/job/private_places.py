# SPDX-License-Identifier: Apache-2.0
"""Identities and memory that a communicator keeps for channels of its own.

    places = Places(identity, arena)      # as the ranks make the communicator
    place = places.of("sparse")           # later, on one rank
    place.identity, place.memory()

Services of a communicator, such as sparse sums, talk on channels that nobody else uses.
A rank makes such a channel at its first call of the service, without the other ranks:
the identity follows from the communicator's, and the memory lies behind the
communicator's own. So first calls of two communicators may come in any order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from commrt.errors import BackendError
from commrt.job.arena import Arena

__all__ = ["IDENTITIES", "Place", "Places"]

_PURPOSES = (
    "check",
    "objects",
    "sparse",
    "compress.shares",
    "compress.sums",
    "host",
    "host.sparse",
    "host.compress.shares",
    "host.compress.sums",
)
_ROOMS = ("sparse", "host.sparse")
"""Purposes that have more memory than a channel's, in which ranks read entries."""
_ROOM_NBYTES = 64 << 20
"""Bytes of such memory for each rank; only pages that are written take any."""
IDENTITIES = 1 + len(_PURPOSES)
"""Identities that each communicator takes: its own, and those of its channels."""


@dataclass(frozen=True)
class Place:
    """Identity and memory of one channel."""

    identity: int
    memory: Callable[[], Arena]
    """Maps the channel's memory; BackendError where it cannot be had."""
    room: Callable[[], Arena]
    """Maps the memory for entries; as ``memory``."""


class Places:
    """The places of one communicator, each for one channel."""

    def __init__(
        self, identity: int, arena: Arena | None, within: str | None = None
    ) -> None:
        """``within``: the purpose of the channel whose private ones these are."""
        self._identity, self._arena = identity, arena
        self._prefix = "" if within is None else f"{within}."

    def within(self, purpose: str) -> Places:
        """Return the places of private channels of a private channel."""
        return Places(self._identity, self._arena, purpose)

    @staticmethod
    def parts(region_nbytes: int) -> tuple[int, ...]:
        """Return the bytes for each rank of all that lies behind a communicator's
        memory, whose ranks have ``region_nbytes`` each there."""
        channels = [region_nbytes] * len(_PURPOSES)
        return *channels, *[_ROOM_NBYTES] * len(_ROOMS)

    def of(self, purpose: str) -> Place:
        """Return the place of a channel."""
        name = f"{self._prefix}{purpose}"
        number = _PURPOSES.index(name)
        room = len(_PURPOSES) + _ROOMS.index(name) if name in _ROOMS else None
        identity = self._identity + 1 + number
        return Place(identity, partial(self._map, number), partial(self._map, room))

    def _map(self, number: int | None) -> Arena:
        if self._arena is None or number is None:
            raise BackendError("there is no such memory that the ranks share")
        return self._arena.part(number)
