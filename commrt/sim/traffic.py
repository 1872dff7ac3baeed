# SPDX-License-Identifier: Apache-2.0
"""Messages of any lengths as a schedule, for algorithms whose lengths follow from data.

    shift = [Message(rank, (rank + 1) % 4, 1000) for rank in range(4)]
    ring = [shift] * 3
    simulate(schedule_of_rounds("ring", 4, ring), network, 0, itemsize=1)

Such a schedule can be simulated and drawn, but neither proved nor run: it says nothing
of what the messages hold.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

from commrt.errors import UsageError
from commrt.schedule.ir import Op, RankProgram, Schedule, Slice, Space, Step

__all__ = ["Message", "Round", "schedule_of_rounds"]


class Message(NamedTuple):
    """One message."""

    source: int
    """The rank that sends."""
    target: int
    """The rank that receives."""
    nbytes: int
    reduces: bool = False
    """True if the receiver merges it with what it has, which ``Costs`` may charge."""


Round: TypeAlias = Sequence[Message]
"""Messages that wait for no other one of the same round."""


def schedule_of_rounds(name: str, size: int, rounds: Iterable[Round]) -> Schedule:
    """Return a schedule in which a rank's messages wait for those of earlier rounds.

    A rank waits for its own messages only, those that it sends and those that come. The
    lengths are bytes: simulate it with ``nbytes=0`` and ``itemsize=1``. Raises
    UsageError for a message that has no such ranks, or fewer than 0 bytes.
    """
    lengths: list[list[int]] = [[] for _ in range(size)]
    steps: list[list[Step]] = [[] for _ in range(size)]
    before: list[tuple[int, ...]] = [()] * size
    for messages in rounds:
        begun: dict[int, list[int]] = {}
        for source, target, nbytes, reduces in messages:
            if not (0 <= source < size and 0 <= target < size) or source == target:
                raise UsageError(
                    f"{name}: a message from rank {source} to rank {target}; expected "
                    f"two of {size} ranks"
                )
            if nbytes < 0:
                raise UsageError(f"{name}: a message of {nbytes} bytes; expected 0 up")
            arrival = Op.RRED if reduces else Op.RECV
            for rank, op, peer in (
                (source, Op.SEND, target),
                (target, arrival, source),
            ):
                place = Slice(0, len(lengths[rank]), len(lengths[rank]) + 1)
                ends = (
                    None if op is Op.RECV else place,
                    None if op is Op.SEND else place,
                )
                begun.setdefault(rank, []).append(len(steps[rank]))
                steps[rank].append(Step(op, *ends, peer, before[rank]))
                lengths[rank].append(nbytes)
        for rank, own in begun.items():
            before[rank] = tuple(own)

    def program(rank: int) -> RankProgram:
        counts = tuple(lengths[rank])
        space = Space("out", "out", len(counts), split="counts", counts=counts)
        made = RankProgram(rank, (space,))
        for step in steps[rank]:
            made.steps.append(step)
        return made

    return Schedule("allreduce", name, size, 0, program)
