# SPDX-License-Identifier: Apache-2.0
"""The hosts that ``--hosts`` names, and the ranks of each."""

from __future__ import annotations

import re
from dataclasses import dataclass

from commrt.errors import UsageError

__all__ = ["Host", "parse_hosts"]

_HOST = re.compile(
    r"(?P<name>(?:[\w.+-]+@)?(?:\[[0-9A-Fa-f:.%\w]+\]|[\w.-]+))(?::(?P<slots>\d{1,4}))?"
)
_MOST_RANKS = 4096
_EXPECTED = "expected names as h1,h2 or h1:2,user@h2:4, where :2 says how many ranks"


@dataclass(frozen=True)
class Host:
    """A host, and which ranks it has."""

    number: int
    name: str
    """The words for the remote shell: a name or an address, perhaps behind a user's."""
    ranks: range

    @property
    def address(self) -> str:
        """The name or address alone."""
        return self.name.rpartition("@")[2].strip("[]")


def parse_hosts(text: str, num_ranks: int | None) -> list[Host]:
    """Return the hosts that ``text`` names, each with at least one rank.

    Args:
        text: names by commas, each with the number of its ranks if that is not one.
        num_ranks: ranks in all. They fill the hosts in order; hosts without one are
            left out. None: as many as there is room for.

    Raises UsageError where a name is wrong or twice there, or where there is no room.
    """
    slots: dict[str, int] = {}
    for word in text.split(","):
        found = _HOST.fullmatch(word.strip())
        if found is None or word.strip().startswith("-"):
            raise UsageError(f"--hosts {text!r}: {word!r} is no host; {_EXPECTED}")
        name, count = found["name"], int(found["slots"] or 1)
        if not 1 <= count <= _MOST_RANKS:
            raise UsageError(
                f"--hosts {text!r}: {name} has {count} ranks; expected 1 to "
                f"{_MOST_RANKS}"
            )
        twice = [one for one in slots if _same(one, name)]
        if twice:
            raise UsageError(
                f"--hosts {text!r}: {twice[0]} is asked for twice; name it once, with "
                f"the number of its ranks, as {twice[0]}:{slots[twice[0]] + count}"
            )
        slots[name] = count
    room = sum(slots.values())
    size = room if num_ranks is None else num_ranks
    if size > room:
        raise UsageError(
            f"-n {size}: the hosts of --hosts {text!r} have room for {room} ranks; say "
            f"how many each one has, as h1:{-(-size // len(slots))}"
        )
    if room > _MOST_RANKS:
        raise UsageError(f"--hosts {text!r}: {room} ranks; at most {_MOST_RANKS}")
    hosts: list[Host] = []
    begin = 0
    for name, count in slots.items():
        end = min(begin + count, size)
        if begin < end:
            hosts.append(Host(len(hosts), name, range(begin, end)))
        begin = end
    return hosts


def _same(one: str, other: str) -> bool:
    """Return whether two names are of one host, whoever logs in."""
    names = (each.rpartition("@")[2].strip("[]").lower() for each in (one, other))
    return len({*names}) == 1
