# SPDX-License-Identifier: Apache-2.0
"""Schedules compute what numpy says, for any length, in place and out of place."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_cases import EVERY, assert_equal, expected, inputs

from commrt import algorithms
from commrt.errors import ScheduleError
from commrt.schedule.interpret import run, run_lowered
from commrt.schedule.ir import RankProgram, Schedule
from commrt.schedule.lower import lower
from commrt.vocabulary.operations import operation

Array = npt.NDArray[Any]


@pytest.mark.parametrize(("coll", "name"), EVERY)
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_schedule_and_lowered_form_agree_with_numpy(
    coll: str, name: str, data: st.DataObject
) -> None:
    sizes = [size for size in range(1, 10) if name in algorithms.names(coll, size)]
    size = data.draw(st.sampled_from(sizes), label="size")
    count = data.draw(st.sampled_from([0, 1, 2, 3, 7, 16, 33]), label="count")
    has_root = operation(coll).has_root
    root = data.draw(st.integers(0, size - 1), label="root") if has_root else 0
    choices = algorithms.param_choices(coll, name, size)
    params = {
        key: data.draw(st.sampled_from(v), label=key) for key, v in choices.items()
    }
    in_place = data.draw(st.booleans(), label="in place")
    fragments = data.draw(st.integers(1, 4), label="fragments")
    node = data.draw(st.sampled_from([1, 2, 16]), label="ranks per node")
    schedule = algorithms.schedule(coll, name, size, root, params)
    xs = inputs(coll, size, count)
    wanted = expected(coll, root, xs)
    assert_equal(run(schedule, xs, in_place=in_place), wanted)
    lowered = [
        lower(schedule, rank, lambda peer, rank=rank: peer // node == rank // node)
        for rank in range(size)
    ]
    found = run_lowered(
        schedule, lowered, xs, in_place=in_place, fragments=fragments, align=3
    )
    assert_equal(found, wanted)


@pytest.mark.parametrize("size", [2, 3, 4, 5, 8])
def test_direct_adds_in_rank_order_so_all_ranks_get_the_same_bits(size: int) -> None:
    rng = np.random.default_rng(7)
    xs = [rng.standard_normal(50).astype(np.float32) for _ in range(size)]
    in_order = xs[0]
    for x in xs[1:]:
        in_order = in_order + x
    for shots in (1, 2):
        schedule = algorithms.schedule("allreduce", "direct", size, 0, {"shots": shots})
        lowered = [lower(schedule, rank) for rank in range(size)]
        for out in run_lowered(schedule, lowered, xs):
            assert out is not None
            assert out.tobytes() == in_order.tobytes()


@pytest.mark.parametrize("name", algorithms.names("allreduce", 8))
def test_every_allreduce_gives_all_ranks_the_same_bits(name: str) -> None:
    rng = np.random.default_rng(11)
    for size in (2, 3, 6, 8):
        if name not in algorithms.names("allreduce", size):
            continue
        xs = [rng.standard_normal(40).astype(np.float32) for _ in range(size)]
        schedule = algorithms.schedule("allreduce", name, size)
        lowered = [lower(schedule, rank) for rank in range(size)]
        outs = run_lowered(schedule, lowered, xs)
        assert len({out.tobytes() for out in outs if out is not None}) == 1


def test_a_wrong_number_of_elements_is_refused() -> None:
    schedule = algorithms.schedule("allreduce", "ring", 2)
    with pytest.raises(ScheduleError, match="rank 1 has 3 elements, expected 4"):
        run(schedule, [np.zeros(4), np.zeros(3)])
    with pytest.raises(ScheduleError, match="1 inputs for 2 ranks"):
        run(schedule, [np.zeros(4)])
    with pytest.raises(ScheduleError, match="rank 1 has no input"):
        run(schedule, [np.zeros(4), None])


def test_non_roots_need_no_input() -> None:
    outs = run(algorithms.schedule("bcast", "ring", 3, 1), [None, np.arange(4), None])
    assert_equal(outs, [np.arange(4)] * 3)


def test_a_schedule_from_json_runs() -> None:
    copy = Schedule.from_json(algorithms.schedule("allreduce", "direct", 3).to_json())
    assert isinstance(copy.program(0), RankProgram)
    outs = run(copy, [np.arange(5)] * 3)
    assert_equal(outs, [3 * np.arange(5)] * 3)


@pytest.mark.parametrize("coll", ["scan", "exscan"])
@pytest.mark.parametrize("in_place", [False, True])
def test_every_scan_combines_in_rank_order(coll: str, in_place: bool) -> None:
    """Shown by strings: joining them is associative, but not commutative."""
    for size in (*range(1, 14), 16, 17, 33):
        letters = [chr(ord("!") + rank) for rank in range(size)]
        xs = [np.full(5, letter, f"U{size}") for letter in letters]
        shift = 1 if coll == "scan" else 0
        wanted = ["".join(letters[: rank + shift]) for rank in range(size)]
        for name in algorithms.names(coll, size):
            for shots in algorithms.param_choices(coll, name, size).get("shots", (0,)):
                params = {"shots": shots} if shots else {}
                schedule = algorithms.schedule(coll, name, size, 0, params)
                lowered = [lower(schedule, rank) for rank in range(size)]
                for outs in (
                    run(schedule, xs, np.char.add, in_place=in_place),
                    run_lowered(schedule, lowered, xs, np.char.add, in_place=in_place),
                ):
                    for rank, out in enumerate(outs):
                        found = "" if out is None else "/".join({*out.tolist()})
                        assert found == wanted[rank], (name, size, rank)
