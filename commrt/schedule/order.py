# SPDX-License-Identifier: Apache-2.0
"""Order in which a lowered schedule combines contributions: proved, not declared.

Some reductions need more than that every contribution counts once:

- ``any``: nothing more; the reduction is commutative and associative;
- ``rank``: operands meet in rank order, however they are grouped: ``(0 1) (2 3)``;
- ``left``: one after the other from the lowest rank on: ``((0 1) 2) 3``. Then each
element is the same to the last bit whatever ran, where every operation rounds;
- ``once``: as ``left``, and by one instruction of the engine, which rounds once: what
floats need that are combined in a wider type.

Each one implies those before it. The proof is about the programs that the engine runs:
the lowered ones of all ranks, with the messages that they exchange.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from commrt.errors import ScheduleError
from commrt.schedule.engine_model import EngineModel
from commrt.schedule.goals import Goal
from commrt.schedule.ir import Schedule, Slice
from commrt.schedule.lower import LOCAL, Lowered
from commrt.vocabulary.operations import operation

__all__ = ["ORDERS", "Order", "check_order", "fulfils"]

Order = Literal["any", "rank", "left", "once"]
ORDERS: tuple[Order, ...] = ("any", "rank", "left", "once")


def fulfils(proved: Order, wanted: Order) -> bool:
    """Return whether what is ``proved`` implies what is ``wanted``."""
    return ORDERS.index(proved) >= ORDERS.index(wanted)


class _Value(NamedTuple):
    """Contributions of ranks ``[lo, hi)``; ``final`` if no more may be added."""

    lo: int
    hi: int
    final: bool = False


def check_order(schedule: Schedule, lowered: Sequence[Lowered], wanted: Order) -> None:
    """Raise ScheduleError unless ``lowered``, of all ranks, combines as ``wanted``.

    The schedule must have been verified: here only the order is looked at.
    """
    if wanted == "any" or not operation(schedule.coll).reduces:
        return
    modes = (False, True) if operation(schedule.coll).in_place else (False,)
    for in_place in modes:
        run = _Run(schedule, lowered, wanted, in_place)
        for rank, _, index in EngineModel(lowered, 1):
            run.step(rank, index)


class _Run:
    """The contents of all ranks' memory and messages."""

    def __init__(
        self,
        schedule: Schedule,
        lowered: Sequence[Lowered],
        wanted: Order,
        in_place: bool,
    ) -> None:
        self.lowered = lowered
        self.wanted = wanted
        self.messages: dict[tuple[int, int, int], list[_Value]] = {}
        goal = Goal(schedule.coll, schedule.size, schedule.root)
        self.memory: list[list[list[_Value | None]]] = []
        for one in lowered:
            held: list[list[_Value | None]] = []
            for number, space in enumerate(one.spaces):
                shared = in_place and space.alias and space.nblk == one.spaces[0].nblk
                if number == 0:
                    own = len(goal.initial(one.rank, space.nblk))
                    held.append([_Value(one.rank, one.rank + 1)] * own)
                else:
                    held.append(held[0] if shared else [None] * space.nblk)
            self.memory.append(held)

    def step(self, rank: int, index: int) -> None:
        """Carry out one instruction."""
        one = self.lowered[rank]
        operands = []
        for kind, a, b, c in one.inputs_of(index):
            if kind == LOCAL:
                operands.append(self._read(rank, Slice(a, b, c)))
            else:
                operands.append(self.messages.pop((a, rank, b)))
        value = operands[0]
        if len(operands) > 1:
            where = f"rank {rank} instruction {index}"
            value = [self._combined(where, row) for row in zip(*operands, strict=True)]
        for kind, a, b, c in one.outputs_of(index):
            if kind == LOCAL:
                self.memory[rank][a][b:c] = value
            else:
                self.messages[rank, a, b] = value

    def _read(self, rank: int, where: Slice) -> list[_Value]:
        found = self.memory[rank][where.space][where.lo : where.hi]
        return [each if each is not None else _Value(-1, -1) for each in found]

    def _combined(self, where: str, operands: Sequence[_Value]) -> _Value:
        total = operands[0]
        for operand in operands[1:]:
            if total.hi != operand.lo:
                raise ScheduleError(
                    f"{where} combines {_ranks(total)} and then {_ranks(operand)}, "
                    f"which is not rank order"
                )
            if self.wanted != "rank" and operand.hi - operand.lo > 1:
                raise ScheduleError(
                    f"{where} combines {_ranks(total)} with {_ranks(operand)} taken "
                    f"together before"
                )
            total = _Value(total.lo, operand.hi)
        if self.wanted == "once" and any(each.final for each in operands):
            raise ScheduleError(
                f"{where} goes on with a sum that was rounded before: {_ranks(total)}"
            )
        return _Value(total.lo, total.hi, final=True)


def _ranks(value: _Value) -> str:
    if value.hi - value.lo == 1:
        return f"rank {value.lo}"
    return f"ranks {value.lo} to {value.hi - 1}"
