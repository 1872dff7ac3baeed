# SPDX-License-Identifier: Apache-2.0
"""What is proved of the order of operands is what happens, and no more."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest

from commrt import algorithms
from commrt.errors import ScheduleError
from commrt.schedule.interpret import run_lowered
from commrt.schedule.ir import Schedule
from commrt.schedule.lower import Lowered, lower
from commrt.schedule.order import ORDERS, Order, check_order, fulfils
from commrt.vocabulary.operations import COLLECTIVES, operation

REDUCING = [name for name in COLLECTIVES if operation(name).reduces]


def lowered_of(schedule: Schedule, *, fuse: bool) -> list[Lowered]:
    return [lower(schedule, rank, lambda _: fuse) for rank in range(schedule.size)]


def proved(schedule: Schedule, lowered: list[Lowered]) -> Order:
    best: Order = "any"
    for order in ORDERS:
        try:
            check_order(schedule, lowered, order)
        except ScheduleError:
            continue
        best = order
    return best


def group(a: Any, b: Any) -> Any:
    """Write down how operands meet."""
    return np.array([f"({x}{y})" for x, y in zip(a, b, strict=True)], dtype="U200")


def left(ranks: range) -> str:
    text = str(ranks[0])
    for rank in ranks[1:]:
        text = f"({text}{rank})"
    return text


def seen(schedule: Schedule, lowered: list[Lowered]) -> Order:
    """Return what the results of a run say about the order."""
    coll, size = schedule.coll, schedule.size
    num = size if coll == "reduce_scatter" else 3
    inputs = [np.full(num, str(rank), dtype="U200") for rank in range(size)]
    best: Order = "left"
    for rank, out in enumerate(run_lowered(schedule, lowered, inputs, group)):
        contributors = operation(coll).contributors(rank, size)
        if out is None or not contributors:
            continue
        for text in out.tolist():
            if text.replace("(", "").replace(")", "") != "".join(
                map(str, contributors)
            ):
                return "any"
            if text != left(contributors):
                best = "rank"
    return best


@pytest.mark.parametrize("fuse", [True, False], ids=["one node", "apart"])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 8])
@pytest.mark.parametrize("coll", REDUCING)
def test_results_are_grouped_as_it_was_proved(coll: str, size: int, fuse: bool) -> None:
    root = size - 1 if operation(coll).has_root else 0
    for name in algorithms.names(coll, size):
        choices = algorithms.param_choices(coll, name, size)
        for values in product(*choices.values()):
            params = dict(zip(choices, values, strict=True))
            schedule = algorithms.schedule(coll, name, size, root, params)
            lowered = lowered_of(schedule, fuse=fuse)
            have = proved(schedule, lowered)
            found = seen(schedule, lowered)
            if have == "once":
                assert found == "left", (name, params)
            else:
                assert fulfils(found, have), (name, params, have, found)
            # All that is in order is proved to be: nothing is refused in vain.
            assert fulfils(have, "rank") == fulfils(found, "rank"), (name, params)


@pytest.mark.parametrize("coll", REDUCING)
def test_every_operation_has_a_way_for_each_order(coll: str) -> None:
    for size in (*range(1, 13), 16):
        for order in ORDERS:
            found = []
            for name in algorithms.names(coll, size):
                schedule = algorithms.schedule(coll, name, size)
                try:
                    check_order(schedule, lowered_of(schedule, fuse=True), order)
                    found.append(name)
                except ScheduleError:
                    continue
            assert found, (size, order)


def test_a_ring_is_told_apart_by_the_place_where_it_departs() -> None:
    schedule = algorithms.schedule("allreduce", "ring", 4)
    with pytest.raises(
        ScheduleError,
        match=r"rank \d instruction \d combines rank 0 and "
        r"then rank 3, which is not rank order",
    ):
        check_order(schedule, lowered_of(schedule, fuse=True), "rank")


def test_doubling_keeps_rank_order_but_groups_in_pairs() -> None:
    schedule = algorithms.schedule("allreduce", "recursive_doubling", 4)
    lowered = lowered_of(schedule, fuse=True)
    check_order(schedule, lowered, "rank")
    with pytest.raises(
        ScheduleError, match="ranks 0 to 1 with ranks 2 to 3 taken toget"
    ):
        check_order(schedule, lowered, "left")


def test_a_chain_adds_from_the_left_but_rounds_at_every_rank() -> None:
    schedule = algorithms.schedule("scan", "chain", 4)
    lowered = lowered_of(schedule, fuse=True)
    check_order(schedule, lowered, "left")
    with pytest.raises(ScheduleError, match="rounded before: ranks 0 to 2"):
        check_order(schedule, lowered, "once")


def test_orders_imply_those_before_them() -> None:
    assert [[fulfils(a, b) for b in ORDERS] for a in ORDERS] == [
        [True, False, False, False],
        [True, True, False, False],
        [True, True, True, False],
        [True, True, True, True],
    ]
