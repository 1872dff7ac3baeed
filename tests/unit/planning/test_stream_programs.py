# SPDX-License-Identifier: Apache-2.0
"""What streams run for schedules: places that do not overlap, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cases import Attempt, Case
from hypothesis import given
from hypothesis import strategies as st
from program_cases import spec_of

from commrt import _native
from commrt.backends.ipc.programs import peer_program
from commrt.errors import BackendError, UsageError
from commrt.planning.scratch import ALIGNMENT_NBYTES, Scratch
from commrt.planning.stream_programs import (
    StreamPlan,
    StreamStep,
    nccl_program,
)
from commrt.vocabulary.dtypes import dtype_by_name

HALF = 1 << 20


def plans(case: Case, half_nbytes: int | None = None) -> list[StreamPlan]:
    """Return the plans of all ranks."""
    nodes = (0,) * case.size
    found = []
    for rank in range(case.size):
        spec = spec_of(case, Attempt(case, rank))
        if half_nbytes is None:
            found.append(nccl_program(spec, rank, case.size, nodes))
        else:
            found.append(peer_program(spec, rank, case.size, nodes, half_nbytes))
    return found


def test_steps_have_the_codes_of_the_native_side() -> None:
    assert [step.name.lower() for step in StreamStep] == _native.stream_steps()


@given(
    st.lists(st.integers(0, 3000), max_size=4),
    st.lists(
        st.tuples(st.integers(0, 5000), st.integers(0, 20), st.integers(0, 6)),
        max_size=40,
    ),
)
def test_what_is_needed_at_once_does_not_overlap(
    kept: list[int], wanted: list[tuple[int, int, int]]
) -> None:
    scratch = Scratch()
    end = 0
    for nbytes in kept:
        offset = scratch.keep(nbytes)
        assert offset >= end
        end = offset + nbytes
    areas = [scratch.take(n, first, first + more) for n, first, more in wanted]
    for number, (one, (nbytes, _, _)) in enumerate(zip(areas, wanted, strict=True)):
        assert one.offset >= end
        assert one.offset % ALIGNMENT_NBYTES == 0
        assert one.nbytes >= nbytes
        assert one.offset + one.nbytes <= scratch.nbytes
        for other in areas[:number]:
            apart = one.last < other.first or other.last < one.first
            below = one.offset + one.nbytes <= other.offset
            assert apart or below or other.offset + other.nbytes <= one.offset


def test_slots_of_a_ring_are_used_again() -> None:
    """A ring of 8 needs no more scratch memory than two of its eight blocks."""
    case = Case("allreduce", 8, "ring", count=8 * 1024)
    for plan in plans(case):
        assert 0 < plan.scratch_nbytes <= 2 * 4096


def test_long_messages_are_cut_where_data_flows_one_way() -> None:
    whole = Case("bcast", 4, "chain", {"chunk": 1 << 20}, count=40_000)
    cut = Case("bcast", 4, "chain", {"chunk": 4096}, count=40_000)
    assert {plan.fragments for plan in plans(whole)} == {1}
    (fragments,) = {plan.fragments for plan in plans(cut)}
    assert fragments > 4
    both = Case("allreduce", 4, "ring", count=4_000_000)
    assert {plan.fragments for plan in plans(both)} == {1}


def test_operations_longer_than_exchange_memory_go_in_parts() -> None:
    case = Case("allreduce", 2, "direct", count=100_000)
    few, many = plans(case, HALF)[0], plans(case, HALF // 64)[0]
    assert few.program.num_parts == few.fragments == 1
    assert many.program.num_parts == many.fragments > 10
    assert 0 < many.published_nbytes <= HALF // 64


def test_what_does_not_fit_into_exchange_memory_is_refused() -> None:
    case = Case("alltoall", 4, "dissemination", count=100_000)
    with pytest.raises(BackendError, match="there is exchange memory for 4096"):
        plans(case, 4096)


def test_an_alltoallv_does_not_run_over_exchange_memory() -> None:
    with pytest.raises(BackendError, match="use the staged backend"):
        plans(Case("alltoallv", 3, "direct"), HALF)


def test_an_unknown_parameter_is_refused() -> None:
    with pytest.raises(UsageError, match="unknown parameter 'chnk'"):
        plans(Case("allreduce", 2, "ring", {"chnk": 4}))


COPY = [0, 1, 0, 0, 0, 4, 0, 0]


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([[11, 0, 0, 0, 0, 0, 0, 0]], "no such step"),
        ([[0, 9, 0, 0, 0, 4, 0, 0]], "no such target"),
        ([[0, 1, 0, 0, -4, 4, 0, 0]], "no such source"),
        ([[0, 1, 0, 0, 0, -4, 0, 0]], "negative length"),
        ([[1, 1, 0, 0, 0, 4, 8, 0]], "not defined for the type"),  # band of floats
        ([[3, 1, 0, 1, 0, 4, 0, 0]], "no quotient"),
        ([[4, 0, 0, 0, 0, 4, 2, 0]], "no such peer"),
        ([[4, 0, 0, 0, 0, 4, 1, 0]], "a group does not end"),
        ([[4, 0, 0, 0, 0, 4, 1, 0], COPY], "work inside a group"),
        ([[8, 0, 0, 0, 0, 0, 1, 2]], "one after the other"),
        ([[9, 0, 0, 0, 0, 0, 1, 2], [9, 0, 0, 0, 0, 0, 1, 2]], "one after the other"),
    ],
)
def test_a_program_that_means_nothing_is_refused(rows: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        _native.make_stream_program(
            np.array(rows, np.int64),
            size=2,
            dtype=dtype_by_name("float32").code,
            itemsize=4,
            real=1.0,
            integer=1,
            divisor=2,
        )
