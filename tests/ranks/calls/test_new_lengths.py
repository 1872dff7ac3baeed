# SPDX-License-Identifier: Apache-2.0
"""Calls of lengths that a communicator has not had before: their plans, and no Python.

Planning in Python has the definition of what follows from a length. The engine works it
out by itself, and has to come to the same.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commrt import algorithms
from commrt.calls.collectives import Collectives
from commrt.calls.methods import if_cached
from commrt.comm import core_of
from commrt.errors import TimeoutError_
from commrt.local import LocalRanks, run
from commrt.planning import host_plans, templates, vectors
from commrt.planning.footprint import Footprint, footprint
from commrt.planning.spec import PlanSpec
from commrt.schedule.lower import LOCAL, Lowered
from commrt.select.facts import Candidate
from commrt.vocabulary.dtypes import ReduceOp, dtype_by_name
from commrt.vocabulary.operations import COLLECTIVES, OpSpec, operation

SIZES = (1, 2, 3, 5, 8)
COUNTED = [name for name in COLLECTIVES if operation(name).count_arguments]
PLAIN = [
    name
    for name in COLLECTIVES
    if name not in COUNTED and operation(name).x_count != "none"
]


@pytest.fixture(scope="module")
def groups() -> Iterator[dict[int, list[Any]]]:
    with ExitStack() as stack:
        yield {size: stack.enter_context(LocalRanks(size)).comms for size in SIZES}


def counts_of(draw: st.DataObject, size: int) -> list[int]:
    kinds = st.one_of(
        st.sampled_from([0, 1, 2, 3]), st.integers(0, 5000), st.integers(0, 3_000_000)
    )
    return draw.draw(st.lists(kinds, min_size=size, max_size=size), label="counts")


def spec_of(
    comm: Any, op: OpSpec, candidate: Candidate, dtype: str, root: int, matrix: Any
) -> PlanSpec:
    """Return a call in which rank s sends ``matrix[s][d]`` elements to rank d."""
    size, rank = comm.size, comm.rank
    if op.count_arguments and op.by_pair:
        counts = tuple(matrix[rank]), tuple(row[rank] for row in matrix)
        total, x, out = sum(counts[0]), sum(counts[0]), sum(counts[1])
    else:
        counts = (tuple(matrix[0]),) if op.count_arguments else ()
        total = sum(matrix[0])
        blocked = op.is_blocked and not counts
        total -= total % size if blocked else 0
        own = counts[0][rank] if counts else total // size
        x = own if op.out_count == "times_size" else total
        out = own if op.out_count == "div_size" else total
    has_in = op.input_on == "all" or rank == root
    has_out = op.output_on != "root" or rank == root
    return PlanSpec(
        op=op,
        num_elements=total,
        dtype=dtype_by_name(dtype),
        reduction=ReduceOp.SUM,
        root=root,
        candidate=candidate,
        in_elements=x * has_in,
        out_elements=out * has_out,
        has_output=has_out,
        counts=counts,
    )


def touched_edges(lowered: Lowered, bounds: list[list[int]]) -> list[list[int]]:
    """Return the boundaries where scratch that nothing touches has no length."""
    touched: list[set[int]] = [set() for _ in lowered.spaces]
    for kind, where, lo, hi in (*lowered.inputs.tolist(), *lowered.outputs.tolist()):
        if kind == LOCAL:
            touched[where].update(range(lo, hi))
    found = []
    for number, (space, edges) in enumerate(zip(lowered.spaces, bounds, strict=True)):
        lengths = [hi - lo for lo, hi in pairwise(edges)]
        if space.kind == "tmp":
            lengths = [n * (i in touched[number]) for i, n in enumerate(lengths)]
        found.append([0, *accumulate(lengths)] if lengths else [0, 0])
    return found


def pair_fragments(
    comm: Any, spec: PlanSpec, bound: Footprint, chunk: int, own: Any
) -> list[tuple[int, int, int]]:
    """Return each peer with the fragments to it and from it, of an alltoallv."""

    def fragments(source: int, destination: int, count: int) -> int:
        sent = tuple(count * (d == destination) for d in range(comm.size))
        got = tuple(0 for _ in sent)
        if destination == comm.rank:
            got = tuple(count * (s == source) for s in range(comm.size))
            sent = tuple(0 for _ in sent)
        one = replace(spec, counts=(sent, got))
        return vectors.counted_lengths(
            comm.rank, comm.size, one, own, bound, chunk
        ).fragments

    sent, got = spec.counts
    return [
        (
            peer,
            fragments(comm.rank, peer, sent[peer]),
            fragments(peer, comm.rank, got[peer]),
        )
        for peer in range(comm.size)
        if peer != comm.rank
    ]


@settings(max_examples=150)
@given(draw=st.data())
def test_the_engine_works_out_what_planning_defines(
    groups: dict[int, list[Any]], draw: st.DataObject
) -> None:
    size = draw.draw(st.sampled_from(SIZES), label="size")
    coll = draw.draw(st.sampled_from([*PLAIN, *COUNTED]), label="coll")
    rank = draw.draw(st.integers(0, size - 1), label="rank")
    comm, op = core_of(groups[size][rank]), operation(coll)
    layout = comm.facts.layout
    name = draw.draw(st.sampled_from(algorithms.names(coll, size, layout)))
    params = list(algorithms.offered_params(coll, name, size, layout)) or [{}]
    own = dict(draw.draw(st.sampled_from(params), label="params"))
    transport = draw.draw(
        st.sampled_from([{}, {"chunk": 4096}, {"store": "stream"}, {"reuse": 1}])
    )
    candidate = Candidate("shm", name, {**own, **transport})
    root = draw.draw(st.integers(0, size - 1)) if op.has_root else 0
    dtype = draw.draw(st.sampled_from(["uint8", "float32", "complex128"]))
    rows = size if op.by_pair else 1
    specs = [
        spec_of(
            *(comm, op, candidate, dtype, root),
            [counts_of(draw, size) for _ in range(rows)],
        )
        for _ in range(3)
    ]
    # One template for all of them, made for the lengths of the first.
    template = templates.schedule_template(comm, specs[0])
    for spec in specs:
        plan = templates.plan_of(comm, template, spec)
        where = coll, name, root, tuple(sorted(own.items())), layout
        lowered = host_plans.lowered_programs(*where)[rank]
        bound = footprint(coll, name, size, *where[2:])
        used = host_plans.TransportParams(**transport)
        chunk = bound.chunk_nbytes(used.chunk)
        lengths = (
            vectors.counted_lengths(rank, size, spec, own, bound, chunk)
            if spec.counts
            else vectors.even_lengths(spec, bound, chunk)
        )
        edges = touched_edges(lowered, lengths.bounds(rank, lowered))
        assert plan.bounds == edges
        nbytes = (spec.in_elements + spec.out_elements) * spec.dtype.itemsize
        link = comm.facts.link_class
        assert plan.stores == used.stores(
            lengths.longest_nbytes, nbytes * size, link, op.reduces
        )
        if plan.pair_fragments:  # a rank without peers has nobody to agree with
            assert plan.fragments == lengths.fragments
        if spec.counts and op.by_pair:
            pairs = pair_fragments(comm, spec, bound, chunk, own)
            known = {peer: rest for peer, *rest in pairs}
            for peer, *rest in plan.pair_fragments:
                assert rest == known[peer]
        else:
            for _, to, come in plan.pair_fragments:
                assert to == come == lengths.fragments


def numbers(count: int, rank: int) -> Any:
    return (np.arange(count) % 17 + 100 * rank).astype(np.float32)


def check_plain(comm: Any, coll: str, count: int) -> None:
    """Run an operation with blocks of ``count`` elements, and compare the result."""
    size, rank, op = comm.size, comm.rank, operation(coll)
    total = count * size
    if op.out_count == "times_size":
        x, out = numbers(count, rank), np.zeros(total, np.float32)
    elif op.out_count == "div_size":
        x, out = numbers(total, rank), np.zeros(count, np.float32)
    else:
        x, out = numbers(total, rank), np.zeros(total, np.float32)
    getattr(comm, coll)(x, out=out)
    every = [numbers(x.size, one) for one in range(size)]
    own = slice(rank * count, (rank + 1) * count)
    wanted = {
        "allreduce": lambda: sum(every),
        "reduce": lambda: sum(every) if rank == 0 else None,
        "bcast": lambda: every[0],
        "allgather": lambda: np.concatenate(every),
        "gather": lambda: np.concatenate(every) if rank == 0 else None,
        "scatter": lambda: every[0][own],
        "reduce_scatter": lambda: sum(every)[own],
        "alltoall": lambda: np.concatenate([one[own] for one in every]),
        "scan": lambda: sum(every[: rank + 1]),
        "exscan": lambda: sum(every[:rank]) if rank else None,
    }[coll]()
    if wanted is not None:
        np.testing.assert_array_equal(out, wanted, f"{coll} of {count}")


def check_counted(comm: Any, coll: str, counts: list[int]) -> None:
    size, rank = comm.size, comm.rank
    first = [0, *accumulate(counts)]
    own = slice(first[rank], first[rank + 1])
    if coll == "alltoallv":
        # Rank s sends counts[(s + d) % size] to rank d.
        sent = [counts[(rank + d) % size] for d in range(size)]
        x, out = numbers(sum(sent), rank), np.zeros(sum(sent), np.float32)
        comm.alltoallv(x, out=out, send_counts=tuple(sent), recv_counts=tuple(sent))
        blocks = []
        for source in range(size):
            theirs = [0, *accumulate(counts[(source + d) % size] for d in range(size))]
            lo, hi = theirs[rank], theirs[rank + 1]
            blocks.append(numbers(sum(counts), source)[lo:hi])
        np.testing.assert_array_equal(out, np.concatenate(blocks))
        return
    gathers = operation(coll).out_count == "times_size"
    x = numbers(counts[rank] if gathers else sum(counts), rank)
    out = np.zeros(sum(counts) if gathers else counts[rank], np.float32)
    getattr(comm, coll)(x, out=out, counts=tuple(counts))
    every = [numbers(sum(counts), one) for one in range(size)]
    if gathers:
        wanted = np.concatenate([numbers(n, one) for one, n in enumerate(counts)])
        has_result = rank == 0 or operation(coll).output_on == "all"
    else:
        wanted = (every[0] if operation(coll).has_root else sum(every))[own]
        has_result = True
    if has_result:
        np.testing.assert_array_equal(out, wanted, f"{coll} of {counts}")


@pytest.mark.parametrize("size", [1, 2, 3])
def test_new_lengths_start_without_python(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks of one range of lengths: only the first call of each kind is planned."""
    entered: list[str] = []
    long_way = Collectives.run

    def counted(self: Any, name: str, *rest: Any) -> Any:
        entered.append(name)
        return long_way(self, name, *rest)

    monkeypatch.setattr(Collectives, "run", counted)

    def rank_main(comm: Any) -> list[str]:
        for count in (1000, 1023):
            for coll in PLAIN:
                check_plain(comm, coll, count)
            for coll in COUNTED:
                check_counted(comm, coll, [count] * size)
        comm.barrier()
        entered.clear()
        comm.barrier()
        for count in (1001, 1010, 1022):
            for coll in PLAIN:
                check_plain(comm, coll, count)
            for coll in COUNTED:
                check_counted(comm, coll, [count, *[1000] * (size - 1)])
        comm.barrier()
        return entered

    assert run(size, rank_main) == [[]] * size


@settings(max_examples=25)
@given(draw=st.data())
def test_results_of_any_lengths_one_after_the_other(draw: st.DataObject) -> None:
    size = draw.draw(st.sampled_from([2, 3]), label="size")
    lengths = draw.draw(
        st.lists(st.one_of(st.integers(0, 40), st.integers(0, 40000)), max_size=6)
    )
    splits = [counts_of(draw, size) for _ in range(2)]

    def rank_main(comm: Any) -> None:
        for count in lengths:
            for coll in PLAIN:
                check_plain(comm, coll, count)
        for counts in splits:
            few = [count % 50000 for count in counts]
            for coll in COUNTED:
                check_counted(comm, coll, few)

    run(size, rank_main)


def test_plans_take_no_more_than_their_share_of_memory() -> None:
    def rank_main(comm: Any) -> None:
        core = core_of(comm)
        core.plans_limit_nbytes = limit = 64 << 10
        x, out = np.zeros(4000, np.float32), np.zeros(4000, np.float32)
        kept = np.zeros(17, np.float32)
        for count in range(100, 3100):
            comm.alltoallv(
                x[:count], out=out[:count], send_counts=(count,), recv_counts=(count,)
            )
            comm.allreduce(x[:count])
            comm.allreduce(kept)
            assert core.plans_nbytes <= limit
        lengths = [plan.in_elems for plan in core.kept_plans()]
        # The last used first; and of the others the latest.
        assert lengths[:3] == [17, 3099, 3099]
        assert 10 < len(lengths) < 1000
        assert min(lengths[1:]) > 2500

    run(1, rank_main)  # other ranks change nothing here, and would be waited for


def test_the_last_plan_stays_however_long_it_is() -> None:
    def rank_main(comm: Any) -> None:
        core_of(comm).plans_limit_nbytes = 1
        for count in (10, 20, 10):
            check_plain(comm, "allreduce", count)
            assert comm.stats().plans == 1

    run(2, rank_main)


def test_wrong_lengths_are_refused_at_first_sight_too() -> None:
    """The engine makes no plan for what Python refuses."""

    def rank_main(comm: Any) -> None:
        for count in (1000, 1023):
            check_plain(comm, "allgather", count)
            check_plain(comm, "reduce_scatter", count)
            check_counted(comm, "alltoallv", [count, count])
        x, out = np.zeros(1005, np.float32), np.zeros(1005, np.float32)
        with pytest.raises(Exception, match="out has 1005 elements"):
            comm.allgather(x, out=out)
        with pytest.raises(Exception, match="not a multiple of the 2 ranks"):
            comm.reduce_scatter(x, out=out[:502])
        with pytest.raises(Exception, match="what a rank sends to itself"):
            comm.alltoallv(
                x,
                out=out,
                send_counts=(500, 505),
                recv_counts=(505, 500),
            )
        with pytest.raises(Exception, match="add up to 1004"):
            comm.alltoallv(
                x,
                out=out[:1004],
                send_counts=(500, 504),
                recv_counts=(500, 504),
            )
        with pytest.raises(Exception, match="out has 5 elements"):
            comm.allgather(x[:0], out=out[:5])
        check_plain(comm, "allgather", 1005)

    run(2, rank_main)


LIMITED = ("allreduce", "bcast", "allgather", "barrier", "alltoallv")


def limited(comm: Any, name: str, count: int, limit_s: float | None) -> Any:
    """Return a call with a limit of its own."""
    size, x = comm.size, np.ones(count)
    more: dict[str, Any] = {"timeout_s": limit_s}
    if name == "allgather":
        more["out"] = np.zeros(size * count)
    if name == "alltoallv":
        x, more["out"] = np.ones(size * count), np.zeros(size * count)
        more["send_counts"] = more["recv_counts"] = (count,) * size
    return partial(if_cached(name), comm, *() if name == "barrier" else (x,), **more)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_known_calls_with_a_limit_enter_no_python(size: int) -> None:
    def main(comm: Any) -> None:
        core = core_of(comm)
        for name in LIMITED:
            for count in (1000, 1023):
                call = limited(core, name, count, 300.0)
                if call() is NotImplemented:
                    getattr(comm, name)(*call.args[1:], **call.keywords)
            for count, limit_s in ((1000, 300.0), (1010, 300), (1011, None)):
                assert limited(core, name, count, limit_s)() is not NotImplemented
            for wrong in (0.0, -1.0, "1", np.float64(3), float("nan"), 10**400):
                assert limited(core, name, 1000, wrong)() is NotImplemented

    run(size, main, timeout_s=300)


def test_the_limit_of_a_known_call_holds() -> None:
    """Rank 1 comes when rank 0 has given up waiting; the operation goes on."""
    late = threading.Event()

    def main(comm: Any) -> list[float]:
        x, y = np.ones(8), np.ones(8)
        comm.allreduce(x, timeout_s=300)
        if comm.rank == 0:
            known = if_cached("allreduce")
            with pytest.raises(TimeoutError_, match=r"0\.2 s"):
                known(core_of(comm), x, timeout_s=0.2)
            late.set()
        else:
            assert late.wait(300)
            comm.allreduce(x, timeout_s=300)
        comm.allreduce(y, timeout_s=300)
        comm.barrier()
        return [float(x[0]), float(y[0])]

    assert run(2, main, timeout_s=300) == [[4.0, 2.0]] * 2
