# SPDX-License-Identifier: Apache-2.0
"""Numbers, lists and arrays without dimensions in the place of arrays."""

from __future__ import annotations

import math
import operator
from functools import reduce
from typing import Any

import numpy as np
import pytest
from started_operations import past_refusals

import commrt
from commrt.errors import BufferError_, MismatchError, ReductionError, UsageError
from commrt.local import run

SIZES = (1, 2, 3, 5)


def everywhere(size: int, main: Any) -> list[Any]:
    """Return what ``main(comm)`` returns on each rank."""
    return run(size, main, timeout_s=300)


def blocking_and_not(call: Any, *args: Any, **more: Any) -> Any:
    """Return the result of a call, after checking that of the nonblocking one."""
    found = call(*args, **more)
    request = call(*args, nonblocking=True, **more)
    assert isinstance(request, commrt.Request)
    later = request.wait()
    assert type(later) is type(found)
    assert later is found or np.array_equal(later, found, equal_nan=later is not None)
    assert request.wait() is later
    assert request.test()
    assert request.done
    assert request.operation in repr(request)
    return found


@pytest.mark.parametrize("size", SIZES)
def test_each_type_of_python_comes_back(size: int) -> None:
    def main(comm: Any) -> list[Any]:
        one = comm.rank + 1
        return [
            blocking_and_not(comm.allreduce, x, op="sum")
            for x in (one, one / 4, one > 0, complex(one, -one))
        ]

    total = size * (size + 1) // 2
    for found in everywhere(size, main):
        assert found == [total, total / 4, True, complex(total, -total)]
        assert [type(each) for each in found] == [int, float, bool, complex]


@pytest.mark.parametrize("size", SIZES)
def test_every_reduction_of_integers(size: int) -> None:
    ops: dict[str, Any] = {
        "sum": operator.add,
        "prod": operator.mul,
        "min": min,
        "max": max,
        "band": operator.and_,
        "bor": operator.or_,
        "bxor": operator.xor,
        "land": lambda a, b: int(bool(a) and bool(b)),
        "lor": lambda a, b: int(bool(a) or bool(b)),
        "lxor": lambda a, b: int(bool(a) != bool(b)),
    }
    numbers = [(7 * rank) % 5 - 2 for rank in range(size)]

    def main(comm: Any) -> dict[str, Any]:
        return {op: comm.allreduce(numbers[comm.rank], op) for op in ops}

    wanted = {op: reduce(ops[op], numbers) for op in ops}
    if size == 1:
        wanted |= {op: int(bool(numbers[0])) for op in ("land", "lor", "lxor")}
    for found in everywhere(size, main):
        assert found == wanted
        assert {type(each) for each in found.values()} == {int}


def test_integers_are_exact_or_refused_on_every_rank() -> None:
    large = 2**63 - 1

    def main(comm: Any) -> Any:
        found = (
            comm.allreduce(large),
            comm.allreduce(-large - 1),
            comm.scan(large, "prod"),
        )
        for bad in (2**63, -(2**63) - 1, 10**400):
            with pytest.raises(UsageError, match="rank 1 does not fit into 64 bits"):
                comm.allreduce(bad if comm.rank == 1 else 1)
        return *found, comm.allreduce(1)

    for rank, found in enumerate(everywhere(3, main)):
        assert found == (3 * large, 3 * (-large - 1), large ** (rank + 1), 3)


def test_an_average_of_integers_is_a_float() -> None:
    def main(comm: Any) -> Any:
        return comm.allreduce(comm.rank, op="avg"), comm.reduce(comm.rank, "mean", 1)

    first, second = everywhere(2, main)
    assert first == (0.5, None)
    assert second == (0.5, 0.5)


def test_types_may_differ_between_ranks() -> None:
    """One rank has no data, and 0 instead of a mean."""

    def main(comm: Any) -> Any:
        x: Any = [0, 0.5, np.float64(0.25), np.float32(1), True][comm.rank]
        return comm.allreduce(x), comm.allgather(x)

    for total, each in everywhere(5, main):
        assert total == 2.75
        assert type(total) is np.float64
        assert each.dtype == np.float64
        assert each.tolist() == [0, 0.5, 0.25, 1, 1]


@pytest.mark.parametrize("kind", ["int8", "uint16", "float16", "float32", "complex64"])
def test_scalars_of_numpy_keep_their_type(kind: str) -> None:
    x = np.dtype(kind).type(3)

    def main(comm: Any) -> Any:
        calls = comm.allreduce, comm.scan, comm.bcast
        return [blocking_and_not(call, x) for call in calls], comm.allgather(x)

    for rank, (found, each) in enumerate(everywhere(3, main)):
        assert found == [9, 3 * (rank + 1), 3]
        assert {type(one) for one in found} == {type(x)}
        assert each.dtype == x.dtype


def test_integers_of_numpy_wrap_as_arrays_do() -> None:
    def main(comm: Any) -> Any:
        return comm.allreduce(np.int8(100)), comm.allreduce(np.int8(-7), op="avg")

    array = run(3, lambda comm: comm.allreduce(np.full(1, 100, np.int8)))[0][0]
    assert everywhere(3, main) == [(array, -7)] * 3


def test_nan_is_propagated_wherever_it_is() -> None:
    def main(comm: Any) -> Any:
        found = []
        for at in range(comm.size):
            x = math.nan if comm.rank == at else 1.0
            found += [comm.allreduce(x, op) for op in ("min", "max", "sum")]
        return all(map(math.isnan, found))

    assert everywhere(3, main) == [True] * 3


@pytest.mark.parametrize("size", SIZES)
def test_operations_besides_allreduce(size: int) -> None:
    last = size - 1

    def main(comm: Any) -> Any:
        mine = comm.rank + 1
        return [
            blocking_and_not(comm.reduce, mine, "max", last),
            blocking_and_not(comm.bcast, mine * 1.5, last),
            blocking_and_not(comm.gather, mine, last),
            blocking_and_not(comm.allgather, mine),
            blocking_and_not(comm.scan, mine),
            blocking_and_not(comm.exscan, mine),
        ]

    for rank, found in enumerate(everywhere(size, main)):
        top, copy, gathered, every, upto, below = found
        assert top == (size if rank == last else None)
        assert copy == size * 1.5
        counts = list(range(1, size + 1))
        assert (gathered is None) == (rank != last)
        assert gathered is None or gathered.tolist() == counts
        assert every.tolist() == counts
        assert upto == sum(counts[: rank + 1])
        assert below == (sum(counts[:rank]) if rank else None)


@pytest.mark.parametrize("size", SIZES)
def test_lists_become_arrays(size: int) -> None:
    def main(comm: Any) -> Any:
        given = [1, 2, 3]
        found = [
            blocking_and_not(comm.allreduce, given),
            blocking_and_not(comm.allreduce, (0.5, 1.5), op=np.maximum),
            blocking_and_not(comm.bcast, [[comm.rank, 1]], size - 1),
            blocking_and_not(comm.allgather, [True, False]),
            blocking_and_not(comm.alltoall, [comm.rank] * size),
            blocking_and_not(comm.reduce_scatter, [1.0] * size),
            blocking_and_not(comm.scatter, list(range(size)), 0),
            comm.allgatherv([comm.rank], counts=[1] * size),
            comm.allreduce([]),
            comm.allreduce([1, 2], out=np.empty(2, int)),
        ]
        assert given == [1, 2, 3]
        return found

    for rank, found in enumerate(everywhere(size, main)):
        assert all(isinstance(each, np.ndarray) for each in found)
        ranks = list(range(size))
        assert [each.tolist() for each in found] == [
            [size, 2 * size, 3 * size],
            [0.5, 1.5],
            [[size - 1, 1]],
            [[True, False]] * size,
            ranks,
            [float(size)],
            [rank],
            ranks,
            [],
            [size, 2 * size],
        ]


@pytest.mark.parametrize("size", SIZES)
def test_arrays_without_dimensions_stay_so(size: int) -> None:
    def main(comm: Any) -> Any:
        x = np.array(comm.rank + 1.0)
        kept = comm.allreduce(x)
        assert kept is x
        found = [
            blocking_and_not(comm.allreduce, np.array(2.0), out=np.empty(())),
            blocking_and_not(comm.scan, np.array(1), out=np.empty((), int)),
            blocking_and_not(comm.bcast, np.array(comm.rank), size - 1),
        ]
        assert [each.shape for each in found] == [()] * 3
        every = blocking_and_not(comm.allgather, np.array(3))
        assert every.shape == (size,)
        return [each.item() for each in (x, *found)]

    total = size * (size + 1) / 2
    for rank, found in enumerate(everywhere(size, main)):
        assert found == [total, 2.0 * size, rank + 1, size - 1]


def test_messages_of_numbers_and_lists() -> None:
    def main(comm: Any) -> Any:
        if comm.rank == 0:
            comm.send(5, 1)
            comm.send([1.5, 2.5], 1, 7)
            comm.send([3, 4], 1, nonblocking=True).wait()
            comm.multi_sendrecv(sends=[([5, 6], 1)])
            return None
        number, pair = np.empty((), int), np.empty(2)
        more, last = np.empty(2, int), np.empty(2, int)
        comm.recv(number, 0)
        comm.recv(pair, 0, 7)
        comm.recv(more, 0)
        comm.recv(last, 0)
        return [each.tolist() for each in (number, pair, more, last)]

    assert everywhere(2, main)[1] == [5, [1.5, 2.5], [3, 4], [5, 6]]


def test_calls_among_neighbours_and_sparse_sums_take_lists() -> None:
    def main(comm: Any) -> Any:
        size, rank = comm.size, comm.rank
        graph = comm.graph([(rank - 1) % size], [(rank + 1) % size])
        found = [
            graph.neighbor_allgather([rank, 1]),
            graph.neighbor_allgather(rank),
            graph.neighbor_alltoall((rank,)),
            graph.neighbor_allgatherv([rank], recv_counts=[1]),
            comm.topk_allreduce([1.0, 3.0], 1).to_dense(),
        ]
        graph.free()
        return [each.ravel().tolist() for each in found]

    for rank, found in enumerate(everywhere(3, main)):
        left = (rank - 1) % 3
        assert found == [[left, 1], [left], [left], [left], [0.0, 9.0]]


def test_integers_of_a_list_that_numpy_would_round_are_refused() -> None:
    def main(comm: Any) -> None:
        for wrong in ([2**63, -1], [[2**64 - 1], [-5]]):
            with pytest.raises(BufferError_, match="other things than numbers"):
                comm.allreduce(wrong)
        assert comm.allreduce([2**64 - 1]).dtype == np.uint64
        assert comm.allreduce([2**60, 0.5]).dtype == np.float64

    everywhere(1, main)


def test_numbers_within_a_fused_context_and_in_check_mode(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def main(comm: Any) -> Any:
        with comm.fused():
            requests = [
                comm.allreduce(x, nonblocking=True)
                for x in (3, np.ones(2), [1, 2], 0.5)
            ]
        number, array, several, half = commrt.wait_all(requests)
        return number, array.tolist(), several.tolist(), half

    wanted = [(6, [2.0, 2.0], [2, 4], 1.0)] * 2
    assert everywhere(2, main) == wanted
    monkeypatch.setenv("COMMRT_DEBUG", "check")
    assert everywhere(2, main) == wanted
    everywhere(2, _refused_in_check_mode)


def _refused_in_check_mode(comm: Any) -> None:
    """A fault of one rank is raised on all of them."""
    with pytest.raises(UsageError, match="algorithm= is for arrays"):
        comm.allreduce(1, **({"algorithm": "ring"} if comm.rank else {}))
    with pytest.raises(UsageError, match="a list of other things"):
        comm.allreduce(["a"] if comm.rank else [1])
    assert comm.allreduce(1) == 2


def test_a_reduction_of_the_users_own() -> None:
    @commrt.reduction
    def digits(a: Any, b: Any) -> Any:
        return 10 * a + b

    @commrt.reduction
    def broken(a: Any, b: Any) -> Any:
        raise LookupError("no")

    def main(comm: Any) -> Any:
        with pytest.raises(ReductionError, match="broken raised LookupError: no"):
            comm.allreduce(1, op=broken)
        return comm.allreduce(comm.rank + 1, op=digits), comm.scan(1.0, digits)

    assert everywhere(3, main) == [(123, 1.0), (123, 11.0), (123, 111.0)]


def test_a_factor_multiplies_a_number_too() -> None:
    def main(comm: Any) -> Any:
        return comm.allreduce(3, op="premul_sum", factor=0.5 * (comm.rank + 1))

    assert everywhere(2, main) == [4.5, 4.5]


def test_ranks_that_make_other_calls_hear_of_it() -> None:
    def main(comm: Any) -> None:
        with pytest.raises(MismatchError, match=r"rank 0: allreduce op=SUM\n.*op=MAX"):
            comm.allreduce(1, op="max" if comm.rank else "sum")
        with pytest.raises(MismatchError, match=r"rank 0: allreduce.*\n.*1: allgather"):
            (comm.allgather if comm.rank else comm.allreduce)(1)
        with pytest.raises(UsageError, match="'band' is not defined for float64"):
            comm.allreduce(1.5 if comm.rank else 1, op="band")
        assert comm.allreduce(1) == 2

    everywhere(2, main)


def test_a_number_here_and_an_array_there_is_a_mismatch() -> None:
    def main(comm: Any) -> None:
        with pytest.raises((MismatchError, commrt.errors.RevokedError)):
            comm.allreduce(np.ones(1) if comm.rank else 1.0)
        with pytest.raises(commrt.errors.CommError):
            comm.allreduce(np.ones(1))

    everywhere(2, main)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda c: c.allreduce(1, algorithm="ring"), "algorithm= is for arrays"),
        (lambda c: c.allreduce(1, out=np.empty(1)), "out= is for arrays"),
        (lambda c: c.allreduce(1, compress="int8"), "compress= is for arrays"),
        (lambda c: c.reduce(1, root=9), "root=9 is not a rank"),
        (lambda c: c.allreduce(np.longdouble(1)), "cannot be communicated"),
        (lambda c: c.allreduce(np.datetime64("2020")), "cannot be communicated"),
        (lambda c: c.allreduce([[1], [1, 2]]), "a list that numpy makes no array of"),
        (lambda c: c.allreduce([{}]), "a list of other things than numbers"),
        (lambda c: c.allreduce(["a"]), "a list of other things than numbers"),
        (lambda c: c.allreduce([2**70]), "a list of other things than numbers"),
        (lambda c: c.bcast(None, 0), r"x is None: .* bcast_object\(x, root\)"),
        (lambda c: c.allgather({"a": 1}), "x is a dict: .* send_object"),
        (lambda c: c.alltoall(1), "not a multiple of the 2 ranks"),
        (lambda c: c.recv(0, source=0), "recv: out is a int"),
        (lambda c: c.send("text", 0), "send: x is a str"),
    ],
)
def test_what_makes_no_sense_is_said_before_anything_is_sent(
    call: Any, message: str
) -> None:
    def main(comm: Any) -> None:
        if comm.rank == 1:
            with pytest.raises((UsageError, BufferError_), match=message):
                call(comm)
        assert past_refusals(lambda: comm.allreduce(1)) == 2

    everywhere(2, main)
