# SPDX-License-Identifier: Apache-2.0
"""Plans of new lengths are made in the memory of plans that go."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commrt.calls import arguments
from commrt.calls.methods import if_cached
from commrt.comm import core_of
from commrt.local import run
from commrt.vocabulary.operations import operation

_SAID = (
    *("bounds", "fragments", "slots", "slot_nbytes", "tmp_nbytes", "stores"),
    *("landings", "pair_fragments", "in_elems", "out_elems", "label", "instructions"),
)


def facts(plan: Any) -> dict[str, Any]:
    """Return what a plan says of itself."""
    return {name: getattr(plan, name) for name in _SAID}


@settings(max_examples=20)
@given(draw=st.data())
def test_a_plan_in_used_memory_is_a_plan_in_new_memory(
    draw: st.DataObject,
) -> None:
    size = draw.draw(st.sampled_from([1, 2, 3]), label="size")
    counted = draw.draw(st.booleans(), label="counted")
    lengths = draw.draw(
        st.lists(st.integers(1, 400) | st.integers(1, 300_000), min_size=4, max_size=12)
    )

    def call(comm: Any, length: int) -> None:
        if counted:
            split = (length, *[7] * (size - 1))
            split = split[-comm.rank :] + split[: -comm.rank]
            came = tuple(length if one == comm.rank else 7 for one in range(size))
            x = np.ones(sum(split), np.float32)
            out = np.zeros(sum(came), np.float32)
            comm.alltoallv(x, out=out, send_counts=split, recv_counts=came)
            assert (out == 1).all()
        else:
            x = np.full(length, comm.rank + 1, np.float32)
            comm.allreduce(x)
            assert (x == size * (size + 1) / 2).all()

    def rank_main(comm: Any) -> None:
        fresh = comm.dup()
        core_of(fresh).plans_limit_nbytes = 1 << 30
        core_of(comm).plans_limit_nbytes = 24 << 10
        new_lengths = {lengths[i % len(lengths)] + 1000 * i: None for i in range(40)}
        for length in new_lengths:
            call(comm, length)
            call(fresh, length)
            used, new = (core_of(each).kept_plans()[0] for each in (comm, fresh))
            assert facts(used) == facts(new)
        assert comm.stats().plans < len(new_lengths)
        fresh.free()

    run(size, rank_main)


def test_memory_of_a_plan_that_is_in_use_is_left_alone() -> None:
    """Of a bound call, of an operation in flight, and of what Python holds."""
    size = 2

    def rank_main(comm: Any) -> None:
        core = core_of(comm)
        core.plans_limit_nbytes = 16 << 10
        x, out = np.ones(5000, np.float32), np.zeros(5000, np.float32)
        for length in (1000, 1023):
            comm.allreduce(x[:length], out=out[:length])
        kept = np.ones(1001, np.float32)
        bound = comm.plan.allreduce(kept, out=np.zeros(1001, np.float32))
        comm.allreduce(x[:1002], out=out[:1002])
        held = core.kept_plans()[0]
        said = facts(held)
        late = np.full(1003, comm.rank + 1.0, np.float32)
        if comm.rank == 0:
            request = comm.allreduce(late, nonblocking=True)  # rank 1 comes later
        for length in range(1, 400):
            core.host.plan(*_call_of(core, x[:length]))
        if comm.rank == 1:
            request = comm.allreduce(late, nonblocking=True)
        request.wait()
        assert (late == 3).all()
        assert (bound() == 2).all()
        assert facts(held) == said
        assert core.plans_nbytes <= core.plans_limit_nbytes

    run(size, rank_main)


def _call_of(core: Any, x: Any) -> tuple[Any, Any]:
    """Return an allreduce of ``x``, as the host's route has it."""
    call = arguments.parse(operation("allreduce"), (x,), {})
    return call, arguments.bind(call, core.rank, core.size)


@pytest.mark.parametrize("lengths", [(10,), (10, 20)])
@pytest.mark.parametrize("counted", [False, True])
def test_a_family_whose_plans_are_found_is_used(
    counted: bool, lengths: tuple[int, ...]
) -> None:
    """Families that nobody asks go before one whose known calls the engine finds."""
    known = if_cached("alltoallv" if counted else "allreduce")
    splits = {length: ((length,), (length,)) for length in range(100)}

    def call(core: Any, length: int) -> bool:
        x = np.ones(length)
        if not counted:
            return known(core, x) is not NotImplemented
        sent, received = splits[length]
        more = {"out": np.zeros(length), "send_counts": sent, "recv_counts": received}
        return known(core, x, **more) is not NotImplemented

    def rank_main(comm: Any) -> None:
        core = core_of(comm)
        for length in lengths:
            x = np.ones(length)
            if counted:
                sent, received = splits[length]
                comm.alltoallv(x, send_counts=sent, recv_counts=received)
            else:
                comm.allreduce(x)
        core.plans_limit_nbytes = 6 * core.plans_nbytes
        others = [
            (name, op)
            for name in ("uint8", "int8", "int16", "int32", "int64", "float32")
            for op in ("sum", "min", "max", "prod")
        ]
        for turn, (name, op) in enumerate(others):
            comm.allreduce(np.ones(3, name), op=op)
            assert call(core, lengths[turn % len(lengths)])
        assert len(core.families) < len(others)
        assert call(core, 11)  # its template is there, too

    run(1, rank_main)


@pytest.mark.parametrize("counted", [False, True])
def test_lengths_that_come_back_stay_while_new_ones_go(counted: bool) -> None:
    """A length that came once makes way for the next, and not for one in use."""
    again = range(1, 61)

    def call(comm: Any, length: int) -> None:
        if counted:
            comm.allgatherv(np.ones(length), counts=[length])
        else:
            comm.allreduce(np.ones(length))

    def lengths_kept(comm: Any) -> set[int]:
        return {plan.in_elems for plan in core_of(comm).kept_plans()}

    def rank_main(comm: Any) -> None:
        new = iter(range(1000, 9000))
        for turn in range(4):
            for length in again:
                call(comm, length)
            for _ in range(60):
                call(comm, next(new))
            if turn == 0:
                by_python = {2**k for k in range(6)}  # which plans for longer ranges
                assert {*again} & lengths_kept(comm) <= by_python
        # Some pass for new ones once more: they share their place with others.
        kept = lengths_kept(comm) & {*again}
        assert len(kept) > 50
        for _ in range(1500):
            call(comm, next(new))
        last = next(new)
        assert kept <= lengths_kept(comm)
        others = {n for n in lengths_kept(comm) if 1024 < n < last - 100}
        assert len(others - {2048, 4096}) < 10
        assert core_of(comm).plans_nbytes < core_of(comm).plans_limit_nbytes / 2

    run(1, rank_main)


def test_a_call_of_several_in_turn_takes_memory_of_its_kind() -> None:
    """New lengths of some operations in turn need no more than those of one."""

    def rank_main(comm: Any) -> None:
        core = core_of(comm)
        for length in range(1, 800):
            x = np.ones(length)
            comm.allreduce(x)
            assert (comm.allgather(x) == 1).all()
            comm.bcast(x, root=0)
        assert core.plans_nbytes < core.plans_limit_nbytes / 4

    run(1, rank_main)
