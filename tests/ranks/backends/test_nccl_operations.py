# SPDX-License-Identifier: Apache-2.0
"""Operations on NCCL: native ones, composed ones, groups, and what is refused."""

from __future__ import annotations

import collections

import numpy as np
import pytest
from fake_nccl import FakeNccl
from hypothesis import given, settings
from hypothesis import strategies as st
from nccl_cases import inputs, reference, reference_counted

from commrt.errors import BackendError, UsageError
from commrt.nccl import NcclComm, support
from commrt.nccl.config import GroupShape
from commrt.vocabulary.dtypes import DTYPES, ReduceOp, dtype_by_name
from commrt.vocabulary.operations import OPERATIONS, operation

FLOAT = dtype_by_name("float32")
UINT8 = dtype_by_name("uint8")
SUM = ReduceOp.SUM
EQUAL = [
    spec.name
    for spec in OPERATIONS
    if not spec.count_arguments and spec.nccl != "none" and not spec.is_empty
]
COUNTED = [spec.name for spec in OPERATIONS if spec.count_arguments]
VERSIONS = (21805, 22703, 22800, 22809, 23203)


def _lengths(coll: str, size: int, count: int) -> tuple[int, int]:
    """Return the elements of x and out."""
    many = size * count
    return {
        "allgather": (count, many),
        "gather": (count, many),
        "scatter": (many, count),
        "reduce_scatter": (many, count),
        "alltoall": (many, many),
    }.get(coll, (count, count))


def _run(
    nccl: FakeNccl,
    comms: list[NcclComm],
    coll: str,
    count: int,
    op: ReduceOp | None,
    root: int,
    dtype: str = "float32",
    seed: int = 0,
) -> None:
    """Run one operation on all ranks; compare each output, and what lies behind it."""
    size = len(comms)
    len_x, len_out = _lengths(coll, size, count)
    xs = inputs(np.random.default_rng(seed), [len_x] * size, dtype)
    before = [x.copy() for x in xs]
    outs = [np.full(len_out + 1, 99, dtype) for _ in xs]
    nccl.on_each(
        comms,
        lambda comm: comm.run(
            coll,
            x=xs[comm.rank].ctypes.data,
            out=outs[comm.rank].ctypes.data,
            count=count,
            dtype=dtype_by_name(dtype),
            op=op,
            root=root,
            stream=10 + comm.rank,
        ),
    )
    assert nccl.pending() == []
    for rank, want in enumerate(reference(coll, before, root, op)):
        got = outs[rank]
        np.testing.assert_allclose(
            got[: want.size].astype("float64"), want.astype("float64"), rtol=1e-6
        )
        assert (got[want.size :] == 99).all()
        np.testing.assert_array_equal(xs[rank], before[rank])


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("coll", EQUAL)
def test_equal_blocks(coll: str, version: int) -> None:
    nccl = FakeNccl(version)
    op = SUM if operation(coll).reduces else None
    for size in (1, 2, 5, 8):
        with nccl.ranks(size) as comms:
            for count in (0, 1, 7):
                for root in {0, size - 1}:
                    _run(nccl, comms, coll, count, op, root)
    nccl.check()


@pytest.mark.parametrize(
    "dtype",
    ["int8", "uint8", "int32", "uint32", "int64", "uint64", "float32", "float64"],
)
def test_reductions_of_each_type(dtype: str) -> None:
    nccl = FakeNccl()
    with nccl.ranks(3) as comms:
        for op in (SUM, ReduceOp.PROD, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.AVG):
            for coll in ("allreduce", "reduce", "reduce_scatter"):
                _run(nccl, comms, coll, 6, op, 1, dtype)
    nccl.check()


def test_half_and_complex_sums() -> None:
    nccl = FakeNccl()
    with nccl.ranks(3) as comms:
        _run(nccl, comms, "allreduce", 6, SUM, 0, "float16")
        xs = [np.array([1 + 2j, 3 - 1j], "complex64") * (rank + 1) for rank in range(3)]
        nccl.on_each(
            comms,
            lambda comm: comm.run(
                "allreduce",
                x=xs[comm.rank].ctypes.data,
                out=xs[comm.rank].ctypes.data,
                count=2,
                dtype=dtype_by_name("complex64"),
                op=SUM,
                stream=1,
            ),
        )
        np.testing.assert_array_equal(xs[0], np.array([6 + 12j, 18 - 6j]))
    nccl.check()


@pytest.mark.parametrize("coll", ["allreduce", "reduce_scatterv"])
@pytest.mark.parametrize("in_progress", [0, 2])
@pytest.mark.parametrize(
    ("dtype", "factors"),
    [
        ("float32", [0.5, 2.0, -1.0]),
        ("float64", [0.1, 2.0, 3.0]),
        ("float16", [0.5, -2.0, 1.0]),
        ("int32", [2, -3, 1]),
        ("int64", [2**40, -1, 0]),
        ("uint8", [3, 0, 2]),
    ],
)
def test_premul_sum_has_a_factor_per_rank(
    dtype: str, factors: list[float], in_progress: int, coll: str
) -> None:
    nccl = FakeNccl()
    nccl.set("in_progress", in_progress)
    with nccl.ranks(3) as comms:
        xs = inputs(np.random.default_rng(1), [5] * 3, dtype)
        outs = [np.zeros(5, dtype) for _ in xs]
        counts = [2, 0, 3]

        def call(comm: NcclComm) -> None:
            common = {
                "x": xs[comm.rank].ctypes.data,
                "out": outs[comm.rank].ctypes.data,
                "dtype": dtype_by_name(dtype),
                "op": ReduceOp.PREMUL_SUM,
                "factor": factors[comm.rank],
                "stream": 1,
            }
            if coll == "allreduce":
                comm.run(coll, count=5, **common)
            else:
                comm.run_counted(coll, counts=counts, **common)

        nccl.on_each(comms, call)
        want = sum(
            x.astype("float64") * factor for x, factor in zip(xs, factors, strict=True)
        )
        got = outs[2].astype("float64")
        if coll == "allreduce":
            np.testing.assert_allclose(got, want)
        else:
            np.testing.assert_allclose(got[:3], want[2:])
    nccl.check()
    assert nccl.counter("redops") == 0  # each was destroyed again


def test_a_factor_that_is_missing_or_does_not_fit() -> None:
    nccl = FakeNccl()
    with nccl.ranks(1) as comms:
        x = np.ones(1, np.uint8)
        for factor, words in ((None, "needs factor="), (300, "does not fit")):
            with pytest.raises(UsageError, match=words):
                comms[0].run(
                    "allreduce",
                    x=x.ctypes.data,
                    out=x.ctypes.data,
                    count=1,
                    dtype=UINT8,
                    op=ReduceOp.PREMUL_SUM,
                    factor=factor,
                    stream=1,
                )
    nccl.check()


def test_in_place() -> None:
    """out is x, or one is the own block of the other; never an alltoall."""
    for version in (22703, 22809):
        nccl = FakeNccl(version)
        nccl.set("log", 1)
        with nccl.ranks(3) as comms:
            wholes = [np.full(6, 10 * rank, np.float32) for rank in range(3)]

            def call(comm: NcclComm, coll: str, wholes: list = wholes) -> None:
                whole = wholes[comm.rank].ctypes.data
                own = whole + 8 * comm.rank
                gathers = coll in ("allgather", "gather")
                comm.run(
                    coll,
                    x=own if gathers else whole,
                    out=whole if gathers else own,
                    count=2,
                    dtype=FLOAT,
                    op=SUM,
                    root=1,
                    stream=1,
                )

            nccl.on_each(comms, lambda comm: call(comm, "allgather"))
            assert wholes[0].tolist() == [0, 0, 10, 10, 20, 20]
            nccl.on_each(comms, lambda comm: call(comm, "reduce_scatter"))
            assert wholes[2].tolist() == [0, 0, 10, 10, 60, 60]
            nccl.on_each(comms, lambda comm: call(comm, "gather"))
            assert wholes[1].tolist() == [0, 0, 30, 30, 60, 60]
            nccl.on_each(comms, lambda comm: call(comm, "scatter"))
            assert wholes[2].tolist() == [0, 0, 10, 10, 60, 60]
            with pytest.raises(UsageError, match="in place"):
                comms[0].run("alltoall", x=8, out=8, count=2, dtype=FLOAT, stream=1)
        nccl.check()
        # What is where it belongs is not sent.
        to_itself = "d1 Send count=8 type=1 op=0 peer=1"
        assert not [line for line in nccl.log() if line.startswith(to_itself)]


@st.composite
def _counted_cases(draw: st.DrawFn) -> tuple:
    size = draw(st.integers(1, 8))
    count = st.sampled_from([0, 0, 1, 2, 3, 17])
    coll = draw(st.sampled_from(COUNTED))
    rows = size if coll == "alltoallv" else 1
    counts = [[draw(count) for _ in range(size)] for _ in range(rows)]
    shape = GroupShape(draw(st.integers(1, size)), draw(st.integers(1, 2)))
    root = draw(st.integers(0, size - 1))
    return coll, size, counts * (size if rows == 1 else 1), shape, root


@settings(max_examples=60)
@given(case=_counted_cases(), version=st.sampled_from(VERSIONS))
def test_counted_blocks_in_groups_of_any_shape(case: tuple, version: int) -> None:
    coll, size, counts, shape, root = case
    nccl = FakeNccl(version)
    nccl.set("group_limit", max(shape.most_calls, 2))
    sums = [sum(row) for row in counts]
    lengths = {
        "alltoallv": sums,
        "allgatherv": counts[0],
        "gatherv": counts[0],
    }.get(coll, [sums[0]] * size)
    xs = inputs(np.random.default_rng(size), lengths)
    want = reference_counted(coll, [x.copy() for x in xs], counts, root, SUM)
    outs = [np.full(one.size + 1, 99, np.float32) for one in want]
    received = [[counts[peer][rank] for peer in range(size)] for rank in range(size)]

    def call(comm: NcclComm) -> None:
        comm.shape_groups(shape, most_reductions=2)
        comm.run_counted(
            coll,
            x=xs[comm.rank].ctypes.data,
            out=outs[comm.rank].ctypes.data,
            counts=counts[comm.rank],
            recv_counts=received[comm.rank],
            dtype=FLOAT,
            op=SUM,
            root=root,
            stream=1 + comm.rank,
        )

    with nccl.ranks(size) as comms:
        nccl.on_each(comms, call)
        nccl.check()
    for out, one in zip(outs, want, strict=True):
        np.testing.assert_array_equal(out[:-1], one)
        assert out[-1] == 99


@settings(max_examples=40)
@given(
    data=st.data(),
    size=st.integers(1, 6),
    messages=st.lists(
        st.tuples(st.integers(0, 5), st.integers(0, 5), st.integers(0, 3)), max_size=30
    ),
)
def test_messages_in_any_order(
    data: st.DataObject, size: int, messages: list[tuple[int, int, int]]
) -> None:
    """As multi_sendrecv, neighbour and halo exchange call them.

    Each rank lists its own in an order of its own; between two ranks the order is kept.
    """
    nccl = FakeNccl()
    shape = GroupShape(data.draw(st.integers(1, size)), data.draw(st.integers(1, 3)))
    nccl.set("group_limit", shape.most_calls)
    pairs = [(a % size, b % size, n) for a, b, n in messages]
    source = np.arange(3 * len(pairs) + 1, dtype=np.float32)
    result = np.full_like(source, -1)
    sends: dict[int, list] = collections.defaultdict(list)
    recvs: dict[int, list] = collections.defaultdict(list)
    for i, (a, b, n) in enumerate(pairs):
        sends[a].append((source.ctypes.data + 12 * i, n, b))
        recvs[b].append((result.ctypes.data + 12 * i, n, a))

    def shuffled(mine: list, seed: int) -> list:
        """Peers in another order; messages with one peer stay in theirs."""
        order = np.random.default_rng(seed).permutation(size)
        return sorted(mine, key=lambda one: order[one[2]])

    def call(comm: NcclComm) -> None:
        comm.shape_groups(shape)
        comm.exchange(
            shuffled(sends[comm.rank], comm.rank),
            shuffled(recvs[comm.rank], 7 + comm.rank),
            dtype=FLOAT,
            stream=1 + comm.rank,
        )

    with nccl.ranks(size) as comms:
        nccl.on_each(comms, call)
        nccl.check()
    for i, (_, _, n) in enumerate(pairs):
        np.testing.assert_array_equal(
            result[3 * i : 3 * i + n], source[3 * i : 3 * i + n]
        )


def test_the_stub_finds_rounds_that_differ() -> None:
    """That a wrong cut of groups would be seen: nothing can go on."""
    nccl = FakeNccl()
    with nccl.ranks(2) as comms:
        x = np.zeros(4, np.uint8)
        at = x.ctypes.data
        for comm in comms:  # each receives in its first group, and sends in its second
            peer = 1 - comm.rank
            comm.recv(at, count=1, dtype=UINT8, source=peer, stream=1)
            comm.send(at + 2, count=1, dtype=UINT8, dest=peer, stream=1)
        assert nccl.pending() == [
            "rank 0: Recv(1)",
            "rank 0: Send(1)",
            "rank 1: Recv(0)",
            "rank 1: Send(0)",
        ]
        for comm in comms:
            comm.abort()
    assert nccl.violations() == []


def test_the_stub_finds_counts_that_differ() -> None:
    nccl = FakeNccl()
    with nccl.ranks(2) as comms:
        x = np.zeros(4, np.uint8)
        comms[0].send(x.ctypes.data, count=2, dtype=UINT8, dest=1, stream=1)
        comms[1].recv(x.ctypes.data, count=1, dtype=UINT8, source=0, stream=1)
    assert nccl.violations() == [
        "message of 2 bytes from rank 0 to 1 meets a receive of 1"
    ]


def test_many_messages_between_two_ranks_stay_within_the_limit() -> None:
    nccl = FakeNccl()
    with nccl.ranks(2) as comms:
        assert GroupShape.of(2) == GroupShape(2, 6)
        nccl.set("group_limit", GroupShape.of(2).most_calls)
        n = 500
        xs = [np.arange(n, dtype=np.uint8) + rank for rank in range(2)]
        outs = [np.zeros(n, np.uint8) for _ in xs]

        def call(comm: NcclComm) -> None:
            peer = 1 - comm.rank
            comm.exchange(
                [(xs[comm.rank].ctypes.data + i, 1, peer) for i in range(n)],
                [(outs[comm.rank].ctypes.data + i, 1, peer) for i in range(n)],
                dtype=UINT8,
                stream=1,
            )

        nccl.on_each(comms, call)
        np.testing.assert_array_equal(outs[0], xs[1])
    nccl.check()


@pytest.mark.parametrize("size", [1, 2, 8, 9, 17, 48, 49, 72, 1000])
def test_a_group_fits_into_one_kernel(size: int) -> None:
    """At most 6 batches per channel, as docs/internals/nccl.md says, and few calls."""
    shape = GroupShape.of(size)
    batches = -(-shape.distances // 8) * shape.messages
    assert batches * 32 + 32 <= 252
    assert shape.most_calls <= 256


def test_counts_above_two_to_the_31() -> None:
    """Only counted, not moved."""
    nccl = FakeNccl()
    nccl.set("no_data", 1)
    nccl.set("log", 1)
    big = 2**31 + 5
    with nccl.ranks(2) as comms:

        def call(comm: NcclComm) -> None:
            comm.run(
                "allreduce", x=64, out=64, count=big, dtype=FLOAT, op=SUM, stream=1
            )
            comm.run_counted(
                "allgatherv",
                x=64,
                out=128,
                counts=[big, 3 * big],
                dtype=FLOAT,
                stream=1,
            )

        nccl.on_each(comms, call)
    nccl.check()
    log = nccl.log()
    assert sum(f"AllReduce count={big} " in line for line in log) == 2
    assert f"d0 Recv count={12 * big} type=1 op=0 peer=1 stream=1" in log


def test_what_waits_for_nothing_is_not_called() -> None:
    """A message of no bytes would make two ranks wait for each other."""
    nccl = FakeNccl()
    nccl.set("log", 1)
    with nccl.ranks(3) as comms:
        x = np.zeros(4, np.float32)
        nccl.on_each(
            comms,
            lambda comm: comm.run_counted(
                "alltoallv",
                x=x.ctypes.data,
                out=x.ctypes.data,
                counts=[0, 0, 0],
                recv_counts=[0, 0, 0],
                dtype=FLOAT,
                stream=1,
            ),
        )
        assert not [line for line in nccl.log() if "Group" in line]
    nccl.check()


def test_barrier() -> None:
    nccl = FakeNccl()
    with nccl.ranks(2) as comms:
        bytes_ = np.zeros(2, np.uint8)
        comms[0].barrier(scratch=bytes_.ctypes.data, stream=1)
        assert nccl.pending() == ["rank 0: AllReduce(0)"]
        comms[1].barrier(scratch=bytes_.ctypes.data + 1, stream=1)
    nccl.check()


@pytest.mark.parametrize("version", VERSIONS)
def test_the_table_says_what_runs(version: int) -> None:
    """Each row is tried: what it refuses raises its reason, the rest runs."""
    nccl = FakeNccl(version)
    nccl.set("no_data", 1)
    with nccl.ranks(1) as comms:
        comm = comms[0]
        for spec in OPERATIONS:
            for dtype in DTYPES if spec.reduces else (FLOAT,):
                for op in ReduceOp if spec.reduces else (None,):
                    found = support(spec.name, dtype, op, version)
                    assert (found.how == "native") == (found.reason == "")
                    if spec.name == "barrier":
                        assert found.how == "composed"
                        continue
                    common = dict(x=64, out=128, dtype=dtype, op=op, factor=1, stream=1)

                    def call(spec=spec, common=common) -> None:
                        if spec.count_arguments:
                            comm.run_counted(spec.name, counts=[1], **common)
                        else:
                            comm.run(spec.name, count=1, **common)

                    if found.runs:
                        call()
                    else:
                        with pytest.raises(BackendError, match="NCCL"):
                            call()
    nccl.check()
