# SPDX-License-Identifier: Apache-2.0
"""Compares what ranks of a job of torch wrote with what they must.

Each process of the job has a number and a diary. Worlds are told apart by their names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kill_loop import Kill

__all__ = [
    "Member",
    "World",
    "check_bits",
    "check_errors",
    "check_held",
    "recovery_s",
    "worlds_of",
]

Lines = Sequence[Mapping[str, Any]]
_MORE = {"threads": 1, "descriptors": 24, "segments": 8}
"""So much more than in its first world may a process hold: not as much as changes."""
_CHAIN = 2000
"""Steps of a world that are taken again at most, to compare the next world's begin."""


@dataclass
class Member:
    """One rank of a world."""

    number: int
    """Of its process."""
    begin: Mapping[str, Any]
    """Its line as it entered."""
    steps: list[Mapping[str, Any]] = field(default_factory=list)
    """Its lines of the first steps."""


@dataclass
class World:
    """The ranks that had one communicator together."""

    name: str
    size: int
    members: dict[int, Member] = field(default_factory=dict)
    """By rank."""

    @property
    def is_whole(self) -> bool:
        """True if all of its ranks took steps in it."""
        return len(self.members) == self.size

    @property
    def first(self) -> int:
        """The number of the step that it began with."""
        begins = {each.begin["begin"] for each in self.members.values()}
        assert len(begins) == 1, f"{self.name} begins with the steps {begins}"
        return int(begins.pop())

    def numbers(self) -> set[int]:
        """Return the processes that are in it."""
        return {each.number for each in self.members.values()}

    def order(self, until: int) -> dict[str, Any]:
        """Return what is to be taken again, at least to the begin of step ``until``."""
        taken = max(len(each.steps) for each in self.members.values())
        end = self.first + taken
        if end < until <= self.first + _CHAIN:
            end = until
        states = [self.members[rank].begin["state"] for rank in range(self.size)]
        return {"states": states, "begin": self.first, "end": end}


def worlds_of(said: Mapping[int, Lines]) -> list[World]:
    """Return the worlds of a job in the order in which its ranks entered them."""
    found: dict[str, World] = {}
    for number, lines in said.items():
        for line in lines:
            if "state" in line:
                world = found.setdefault(line["world"], World(line["world"], 0))
                world.size = world.size or line["size"]
                assert world.size == line["size"], world
                assert line["rank"] not in world.members, (line, world)
                world.members[line["rank"]] = Member(number, line)
            elif "step" in line:
                world = found[line["world"]]
                mine = [m for m in world.members.values() if m.number == number]
                mine[0].steps.append(line)
    return sorted(
        found.values(),
        key=lambda world: min(each.begin["at"] for each in world.members.values()),
    )


def next_of(world: World, worlds: Sequence[World]) -> World | None:
    """Return the first whole world after this one."""
    later = worlds[worlds.index(world) + 1 :]
    return next((each for each in later if each.is_whole), None)


def check_bits(
    worlds: Sequence[World],
    again: Mapping[str, Sequence[Sequence[str]]],
    *,
    chained: bool,
) -> None:
    """Compare each world with the same steps of a fresh one; see that it followed.

    Args:
        worlds: all worlds of a job.
        again: by world, for each rank the bits at the begin and after each step.
        chained: whether survivors come to the next world with the bits that a fresh
            world has after as many steps.
    """
    for world in worlds:
        if not world.is_whole:
            taken = [each.number for each in world.members.values() if each.steps]
            assert not taken, f"{world.name}: {taken} took steps without others"
            continue
        following = next_of(world, worlds)
        for rank, member in world.members.items():
            mine = again[world.name][rank]
            where = f"process {member.number} in {world.name}"
            assert member.begin["bits"] == mine[0], f"{where} dumped another state"
            steps = [line["step"] for line in member.steps]
            wanted = [*range(world.first, world.first + len(steps))]
            assert steps == wanted, f"{where} took the steps {steps}"
            for place, line in enumerate(member.steps):
                number = line["step"]
                assert line["bits"] == mine[place + 1], f"{where}, step {number}: bits"
            if following is None or not chained:
                continue
            for other in following.members.values():
                done = following.first - world.first
                if other.number == member.number and 0 <= done < len(mine):
                    same = other.begin["bits"] == mine[done]
                    assert same, f"{where}: another state after {done} steps"
        if following is not None and world.numbers() & following.numbers():
            assert following.first >= world.first, following


def check_errors(
    kill: Kill, worlds: Sequence[World], said: Mapping[int, Lines], *, grows: bool
) -> None:
    """See that the survivors of a kill have named the process that died.

    One that another survivor told to shrink names that instead. ``grows``: newcomers
    were on their way; then ranks may meet anew without one that dies before the end.
    """
    before = _world_of(kill, worlds)
    if before is None:
        return
    named = f"process {kill.pid} "
    allowed = re.compile(rf"{named}|call shrink|shrink\(\)")
    texts = []
    for member in before.members.values():
        if member.number == kill.rank:
            continue
        errors = [line for line in said[member.number] if "error" in line]
        mine = [line["error"] for line in errors if line["at"] >= kill.at]
        if mine and (found := [text for text in mine if allowed.search(text)]):
            texts += found
        else:
            lines = said[member.number]
            killed_too = "end" not in lines[-1] and "left" not in lines[-1]
            assert grows or killed_too, (
                f"process {member.number} did not name {kill}: {mine}"
            )
    assert grows or any(named in text for text in texts), (kill, texts)


def recovery_s(kill: Kill, worlds: Sequence[World]) -> float | None:
    """Return the time from a kill to the first step of all survivors that go on.

    None where who died was in no world yet.
    """
    before = _world_of(kill, worlds)
    if before is None:
        return None
    after = [
        world
        for world in worlds
        if world.is_whole
        and kill.rank not in world.numbers()
        and all(each.begin["at"] > kill.at for each in world.members.values())
        and all(each.steps for each in world.members.values())
    ]
    assert after, f"nobody went on after {kill}"
    own = before.numbers()
    firsts = [
        each.steps[0]["at"] for each in after[0].members.values() if each.number in own
    ]
    return float(max(firsts) - kill.at)


def check_held(said: Mapping[int, Lines]) -> list[str]:
    """Return where a process holds much more than in its first world.

    A process keeps descriptors of the processes that it met when ranks joined last, so
    that what it holds depends on how the ranks have changed. Rank 0 hosts torch's
    store, and is compared with itself. With the number of ranks the segments of their
    groups change: from four to nine. What a change leaves behind adds up: a job has
    some twenty.
    """
    found = []
    for number, lines in said.items():
        first: dict[bool, Mapping[str, int]] = {}
        is_host = False
        for line in lines:
            if "state" in line:
                is_host = line["rank"] == 0
            elif "held" in line:
                before = first.setdefault(is_host, line["held"])
                for name, count in line["held"].items():
                    if count > before[name] + _MORE[name]:
                        where = f"process {number} in {line['world']}"
                        found.append(f"{where}: {name} {count}, {before[name]} before")
    return found


def _world_of(kill: Kill, worlds: Sequence[World]) -> World | None:
    """Return the last world of a process that was killed."""
    mine = [each for each in worlds if kill.rank in each.numbers()]
    return mine[-1] if mine else None
