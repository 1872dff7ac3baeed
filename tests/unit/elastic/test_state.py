# SPDX-License-Identifier: Apache-2.0
"""What a step changes is undone; without torch. tests/pytorch has it with torch."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from commrt.elastic import State
from commrt.errors import UsageError


class Momentum:
    """Nested containers, with arrays that are replaced and arrays that are changed."""

    def __init__(self) -> None:
        self.velocity: dict[str, Any] = {"w": [np.zeros(3)], "count": (0, "none")}

    def state_dict(self) -> dict[str, Any]:
        return self.velocity

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.velocity = state


def draws() -> list[float]:
    return [random.random(), float(np.random.rand())]


def test_a_half_step_is_undone() -> None:
    w, optimizer = np.arange(4.0), Momentum()
    state = State(w=w, optimizer=optimizer)
    for step in range(3):  # copies of earlier steps are used again
        state.remember(step)
        before = [w.copy(), optimizer.velocity["w"][0].copy()]
        drawn = draws()
        w += 1
        optimizer.velocity["w"][0] += step
        optimizer.velocity["count"] = (step, "changed")
        state.undo(step)
        assert state.steps(step) == (step,)
        assert np.array_equal(w, before[0])
        assert np.array_equal(optimizer.velocity["w"][0], before[1])
        assert optimizer.velocity["count"] == (
            (0, "none") if step == 0 else (step - 1, "x")
        )
        assert state.has_local(step)
        state.load_local(step)
        assert draws() == drawn
        w += 1
        optimizer.velocity["count"] = (step, "x")


def test_what_is_undone_twice_is_the_same() -> None:
    w = np.zeros(2)
    state = State(w=w)
    state.remember(0)
    for _ in range(2):
        w += 5
        state.undo(0)
        assert w.tolist() == [0.0, 0.0]


def test_a_step_that_is_completed_is_not_undone_but_can_be() -> None:
    w = np.zeros(2)
    state = State(w=w)
    state.remember(3)
    w += 5
    state.undo(4)
    assert (w.tolist(), state.steps(4)) == ([5.0, 5.0], (4, 3))
    kept = state.kept(4)
    assert {step: each["w"].tolist() for step, each in kept.entries.items()} == {
        4: [5.0, 5.0],
        3: [0.0, 0.0],
    }
    state.return_to(3)
    assert w.tolist() == [0.0, 0.0]


def test_a_state_made_later_inherits_a_step() -> None:
    w = np.zeros(2)
    state = State(w=w, local={"sampler": Momentum()})
    state.remember(3)
    w += 5
    later, other = State(w=np.ones(2)), State(w=np.ones(2))
    later.inherit(state.kept(4), 3)
    assert later.entries()["w"].tolist() == [0.0, 0.0]
    assert (later.steps(3), later.has_local(3)) == ((3,), True)
    other.inherit(state.kept(4), 2)  # which it has not
    assert other.steps(2) == ()


def test_local_state_is_kept_for_two_steps() -> None:
    state = State(local={"sampler": Momentum()})
    for step in range(5):
        state.remember(step)
    assert [step for step in range(6) if state.has_local(step)] == [3, 4]


def test_the_state_of_another_rank_is_loaded() -> None:
    here, there = State(w=np.zeros(3), m=Momentum()), State(w=np.ones(3), m=Momentum())
    here.remember(0)
    here.load(there.entries())
    here.undo(0)  # no step has begun since
    assert here.entries()["w"].tolist() == [1.0, 1.0, 1.0]


def test_arrays_are_described() -> None:
    state = State(w=np.zeros((2, 3), np.float32), m=Momentum())
    assert state.descriptions() == [
        "w: float32 (2, 3)",
        "m.w.0: float64 (3,)",
    ]


def test_wrong_arguments_say_what_is_wrong() -> None:
    with pytest.raises(UsageError, match="model=3 has no state_dict"):
        State(model=3)
    with pytest.raises(UsageError, match=r"local\['sampler'\]='x' has no state_dict"):
        State(local={"sampler": "x"})
    with pytest.raises(UsageError, match="undo='both' must be 'copy' or 'optimizer'"):
        State(undo="both")  # type: ignore[arg-type]
