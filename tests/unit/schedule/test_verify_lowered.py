# SPDX-License-Identifier: Apache-2.0
"""The lowered check catches what only the engine's form can get wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from commrt import algorithms
from commrt.errors import ScheduleError
from commrt.schedule import verify_lowered as module
from commrt.schedule.engine_model import EngineModel
from commrt.schedule.ir import Schedule
from commrt.schedule.lower import Lowered, lower
from commrt.schedule.verify_lowered import verify_lowered

Change = Callable[[Lowered], Lowered]


def lowering_with(monkeypatch: pytest.MonkeyPatch, change: Change) -> None:
    """Let verify_lowered see the lowered program of rank 0 changed."""

    def changed(schedule: Schedule, rank: int, can_fuse: object) -> Lowered:
        lowered = lower(schedule, rank)
        return change(lowered) if rank == 0 else lowered

    monkeypatch.setattr(module, "lower", changed)


def no_deps(one: Lowered) -> Lowered:
    return replace(one, deps=one.deps[:0], dep_ptr=one.dep_ptr * 0)


def swapped_inputs(one: Lowered) -> Lowered:
    """Take message 1 where 0 is due and the other way round."""
    inputs = one.inputs.copy()
    messages = inputs[:, 0] == 1
    inputs[messages, 2] = inputs[messages, 2][::-1]
    return replace(one, inputs=inputs)


def repeated_message(one: Lowered) -> Lowered:
    inputs = one.inputs.copy()
    inputs[inputs[:, 0] == 1, 2] = 0
    return replace(one, inputs=inputs)


def fewer_messages(one: Lowered) -> Lowered:
    return replace(one, messages_out={peer: 1 for peer in one.messages_out})


def own_input_twice(one: Lowered) -> Lowered:
    inputs = np.concatenate([one.inputs, [[0, 0, 0, 1]]]).astype(np.int32)
    pointers = one.input_ptr.copy()
    pointers[-1] += 1
    return replace(one, inputs=inputs, input_ptr=pointers)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("ring", no_deps, "race: rank 0 instruction"),
        ("ring", swapped_inputs, "reduces part|ends with|deadlocks"),
        ("ring", repeated_message, "rank 0 uses messages"),
        ("ring", fewer_messages, "rank 0 sends 1 messages to rank 1"),
        ("direct", own_input_twice, "second time"),
    ],
)
def test_mistakes_are_caught(
    monkeypatch: pytest.MonkeyPatch, name: str, change: Change, message: str
) -> None:
    schedule = algorithms.schedule("allreduce", name, 3)
    verify_lowered(schedule)
    lowering_with(monkeypatch, change)
    with pytest.raises(ScheduleError, match=rf"on 3 ranks, lowered: .*({message})"):
        verify_lowered(schedule)


def test_too_few_lines_deadlock() -> None:
    # Receiving, adding and passing on is one instruction: with one line, each rank
    # holds the message that the rank before it waits to have acknowledged.
    ring = algorithms.schedule("allreduce", "ring", 4)
    verify_lowered(ring, lines=8)
    with pytest.raises(
        ScheduleError, match=r"waits for rank \d to acknowledge message"
    ):
        verify_lowered(ring, lines=1)


def crossed(rank: int) -> Lowered:
    """Both ranks send two messages and take the second first."""
    table = np.array
    peer = 1 - rank
    one = lower(algorithms.schedule("barrier", "direct", 2), rank)
    return replace(
        one,
        inputs=table([[0, 0, 0, 1], [0, 0, 0, 1], [1, peer, 1, 0], [1, peer, 0, 0]]),
        input_ptr=table([0, 1, 2, 3, 4]),
        outputs=table([[1, peer, 0, 0], [1, peer, 1, 0]]),
        output_ptr=table([0, 1, 2, 2, 2]),
        deps=table([2]),
        dep_ptr=table([0, 0, 0, 0, 1]),
        messages_in={peer: 2},
        messages_out={peer: 2},
        num_publishes=2,
    )


def test_a_deadlock_names_who_waits_for_what() -> None:
    both = [crossed(0), crossed(1)]
    assert len(list(EngineModel(both, fragments=3))) == 24
    with pytest.raises(
        ScheduleError, match="rank 0 fragment 0 instruction 1 waits for"
    ):
        list(EngineModel(both, fragments=3, lines=1))


def test_the_window_bounds_how_far_ranks_run_ahead() -> None:
    # Rank 0 only sends: it may be as far ahead as slots and the window let it.
    lowered = [
        lower(algorithms.schedule("gather", "direct", 2, 1), r) for r in range(2)
    ]
    order = [(rank, fragment) for rank, fragment, _ in EngineModel(lowered, 5)]
    for position, (rank, fragment) in enumerate(order):
        if rank == 0 and fragment >= 1:
            assert (1, fragment - 1) in order[:position]
