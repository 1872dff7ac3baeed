# SPDX-License-Identifier: Apache-2.0
"""The books of symmetric memory."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
from hypothesis import given

from commrt.job.symmetric import Slots

PAGE = 4096
SEGMENTS = (4 * PAGE, 16 * PAGE, 64 * PAGE)


def filled() -> Slots:
    slots = Slots()
    for nbytes in SEGMENTS:
        slots.add_segment(nbytes)
    return slots


@given(st.lists(st.one_of(st.integers(0, 20 * PAGE), st.just(-1)), max_size=60))
def test_slots_never_overlap_and_come_back(requests: list[int]) -> None:
    slots = filled()
    pages = [np.zeros(nbytes // PAGE, bool) for nbytes in SEGMENTS]
    taken = []
    for nbytes in requests:
        if nbytes < 0:
            if not taken:
                continue
            slot = taken.pop(len(taken) // 2)
            slots.give_back(slot.number)
        else:
            slot = slots.take(nbytes)
            if slot is None:
                continue
            assert slot.nbytes >= nbytes
            taken.append(slot)
        part = pages[slot.segment][
            slot.offset // PAGE : (slot.offset + slot.nbytes) // PAGE
        ]
        assert part.size == slot.nbytes // PAGE
        assert part.all() == (nbytes < 0) == part.any()
        part[:] = nbytes >= 0
    for slot in taken:
        slots.give_back(slot.number)
    # All pieces have joined: the longest request fits again.
    longest = slots.take(SEGMENTS[-1])
    assert longest is not None
    assert (longest.segment, longest.offset) == (2, 0)


def test_the_shortest_piece_that_fits_is_taken() -> None:
    slots = filled()
    first, second = slots.take(3 * PAGE), slots.take(3 * PAGE)
    assert first is not None
    assert second is not None
    assert (first.segment, second.segment) == (0, 1)
    third = slots.take(PAGE)
    assert third is not None
    assert (third.segment, third.offset) == (0, 3 * PAGE)
    assert slots.take(65 * PAGE) is None
