# SPDX-License-Identifier: Apache-2.0
"""A call that some ranks refuse: every rank learns of it, and all stay in step."""

from __future__ import annotations

import random
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from refused_programs import Outcomes, check, draw

from commrt.comm import Communicator, core_of
from commrt.errors import CommError, RefusedError, UsageError
from commrt.local import LocalRanks, run

_HEAP_ELEMENTS = 1 << 16


@pytest.mark.full(sample=8)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("turn", range(40))
@pytest.mark.timeout(240)
def test_calls_in_flight_stay_in_step(size: int, turn: int, seed: int) -> None:
    """All ranks in one thread, stepped in a drawn order, with many calls in flight."""
    rng = random.Random(f"{seed} {size} {turn}")
    steps = draw(rng, size, 30, heap=True)
    with LocalRanks(size) as ranks:
        heaps = ranks.each(
            lambda comm: [comm.empty(_HEAP_ELEMENTS, "float64") for _ in range(2)]
        )
        outcomes = [Outcomes(rank, size) for rank in range(size)]
        open_calls: list[list[tuple[Any, Any, Any]]] = [[] for _ in range(size)]
        next_step = [0] * size
        most = rng.choice((1, 2, 4))

        def start(rank: int) -> None:
            step = steps[next_step[rank]]
            used = [id(memory) for _, _, memory in open_calls[rank]]
            free = [memory for memory in heaps[rank] if id(memory) not in used]
            heap = free[0] if free else None
            next_step[rank] += 1
            comm = ranks.comms[rank]
            try:
                request = step.call(comm, heap, nonblocking=True)
            except (UsageError, RefusedError) as error:

                def fail(error: Exception = error) -> None:
                    raise error

                outcomes[rank].note(step, fail)
            else:
                open_calls[rank].append((step, request, heap))

        turns = 0
        while any(next_step[r] < len(steps) or open_calls[r] for r in range(size)):
            turns += 1
            assert turns < 300_000, (next_step, open_calls)
            rank = rng.randrange(size)
            if (
                next_step[rank] < len(steps)
                and len(open_calls[rank]) < most
                and rng.random() < 0.3
            ):
                start(rank)
            ranks.step(rank)
            for entry in [e for e in open_calls[rank] if e[1].done]:
                open_calls[rank].remove(entry)
                outcomes[rank].note(entry[0], entry[1].wait)
        check(steps, outcomes)


@pytest.mark.full(sample=8)
@pytest.mark.parametrize("size", [2, 3, 4, 5])
@pytest.mark.parametrize("turn", range(20))
@pytest.mark.timeout(240)
def test_blocking_calls_stay_in_step(size: int, turn: int, seed: int) -> None:
    rng = random.Random(f"{seed} {size} {turn} blocking")
    steps = draw(rng, size, 60, heap=turn % 2 == 0)

    def main(comm: Communicator) -> Outcomes:
        mine = Outcomes(comm.rank, comm.size)
        heap = comm.empty(_HEAP_ELEMENTS, "float64")
        for step in steps:
            mine.note(step, lambda step=step: step.call(comm, heap))
        return mine

    check(steps, run(size, main, timeout_s=300))


def test_a_rank_may_be_many_refused_calls_ahead() -> None:
    def main(comm: Communicator) -> tuple[int, float]:
        refused = 0
        for _ in range(100):
            try:
                comm.allreduce(np.ones(2), out=np.ones(3 if comm.rank == 0 else 2))
            except (RefusedError, UsageError):
                refused += 1
        return refused, float(comm.allreduce(np.ones(1))[0])

    assert run(3, main) == [(100, 3.0)] * 3


def test_the_error_names_rank_and_reason() -> None:
    def main(comm: Communicator) -> str:
        try:
            comm.allreduce(np.ones(4), out=np.empty(5 if comm.rank == 2 else 4))
        except RefusedError as error:
            return f"{comm.rank}: {error}"
        except UsageError as error:
            return f"own: {error}"
        raise AssertionError

    reason = (
        "allreduce: out has 5 elements (shape (5,)), expected 4 for x of 4 elements"
    )
    said = "rank 2 has refused its call, and nothing was delivered"
    assert run(3, main) == [
        f"0: allreduce #0 on local, rank 0: {said}: {reason}",
        f"1: allreduce #0 on local, rank 1: {said}: {reason}",
        f"own: {reason}",
    ]


def test_a_root_that_had_returned_stays_in_step() -> None:
    def main(comm: Communicator) -> list[float]:
        seen = []
        for turn in range(40):
            x = np.full(3, float(turn))
            try:
                if comm.rank == 1 and turn % 3 == 0:
                    comm.bcast(x, root="zero")
                else:
                    seen.append(float(comm.bcast(x, root=0)[0]))
            except (RefusedError, UsageError):
                pass
        seen.append(float(comm.allreduce(np.ones(1))[0]))
        return seen

    for own in run(3, main):
        assert own[-1] == 3.0
        assert own[:-1] == sorted(set(own[:-1]))
        assert own[-2] >= 38


def test_what_is_not_an_error_of_commrt_is_told_too() -> None:
    class Broken:
        def __array__(self, *_: Any, **__: Any) -> Any:
            raise RuntimeError("no array today")

        @property
        def __array_interface__(self) -> Any:
            raise RuntimeError("no interface today")

    def main(comm: Communicator) -> tuple[str, float]:
        try:
            comm.allreduce(Broken() if comm.rank == 1 else np.ones(2))
        except Exception as error:  # noqa: BLE001  whatever it is
            kind = type(error).__name__
        return kind, float(comm.allreduce(np.ones(1))[0])

    (first, total), (second, _), (third, _) = run(3, main)
    assert first == third == "RefusedError" != second
    assert total == 3.0


def test_a_group_of_one_goes_on() -> None:
    def main(comm: Communicator) -> int:
        for _ in range(40):
            with pytest.raises(UsageError):
                comm.allreduce(np.ones(2), out=np.ones(3))
        comm.allreduce(np.ones(2))
        return int(core_of(comm).next_seq)

    assert run(1, main) == [41]


def test_a_refused_call_between_buckets_is_heard_of() -> None:
    def main(comm: Communicator) -> tuple[str, list[float]]:
        with comm.fused():
            first = comm.allreduce(np.ones(3), nonblocking=True)
            with pytest.raises((UsageError, RefusedError)) as raised:
                comm.bcast(np.ones(3), root=9 if comm.rank == 0 else 0)
            second = comm.allreduce(np.ones(4), nonblocking=True)
        totals = [first.wait(), second.wait(), comm.allreduce(np.ones(1))]
        return type(raised.value).__name__, [float(each[0]) for each in totals]

    right = [3.0, 3.0, 3.0]
    assert run(3, main) == [
        ("UsageError", right),
        ("RefusedError", right),
        ("RefusedError", right),
    ]


@pytest.mark.parametrize("limit_s", [None, 1.0])
@pytest.mark.parametrize("place", [0, 1, 4])
def test_a_bucket_with_a_refused_call_is_refused(
    place: int, limit_s: float | None
) -> None:
    """Two calls fill a bucket: it fails on all ranks, and the others do not."""
    how = {} if limit_s is None else {"time_limit_s": limit_s}

    def main(comm: Communicator) -> tuple[list[str], float]:
        said: list[str] = []
        requests: list[Any] = []
        with comm.fused(nbytes=64, **how):
            for k in range(6):
                is_wrong = comm.rank == 1 and k == place
                x, out = np.full(4, float(k)), np.ones(5) if is_wrong else None
                try:
                    requests.append(comm.allreduce(x, out=out, nonblocking=True))
                except UsageError:
                    requests.append(None)
        for k, request in enumerate(requests):
            try:
                right = request is not None and (request.wait() == 3 * k).all()
                said.append("done" if right else "UsageError")
            except CommError as error:
                said.append(type(error).__name__)
        return said, float(comm.allreduce(np.ones(1))[0])

    if limit_s is not None:  # the ranks agree on cuts: a call's neighbours vary
        for rank, (said, total) in enumerate(run(3, main)):
            assert said[place] == ("UsageError" if rank == 1 else "RefusedError")
            assert {*said} <= {"done", "RefusedError", "UsageError"}
            assert total == 3
        return
    bucket = [k for k in range(6) if k // 2 == place // 2]
    expected = ["RefusedError" if k in bucket else "done" for k in range(6)]
    mistaken = [*expected]
    mistaken[place] = "UsageError"
    assert run(3, main) == [(expected, 3.0), (mistaken, 3.0), (expected, 3.0)]


def test_the_calls_beside_a_refused_one_name_rank_and_reason() -> None:
    def main(comm: Communicator) -> str:
        out = np.ones(5 if comm.rank == 0 else 4)
        with comm.fused():
            requests = [comm.allreduce(np.ones(3), nonblocking=True)]
            with suppress(UsageError):
                request = comm.allreduce(np.ones(4), out=out, nonblocking=True)
                requests.append(request)
        for each in requests:
            with pytest.raises(RefusedError) as raised:
                each.wait()
        return str(raised.value)

    mistaken, other = run(2, main)
    assert "this rank has refused a call of the same bucket of fused()" in mistaken
    assert "rank 0 has refused its call" in other
    assert all("out has 5 elements" in each for each in (mistaken, other))


@pytest.mark.parametrize("kind", ["reduction", "type"])
def test_a_bucket_that_nobody_can_name_is_no_wrong_sum(kind: str) -> None:
    """What is wrong says which bucket the call belongs to."""

    def main(comm: Communicator) -> list[str]:
        said = []
        x = [np.full(4, float(k)) for k in range(3 if comm.rank == 0 else 2)]
        requests = []
        with suppress(CommError), comm.fused(nbytes=64):
            if kind == "reduction":
                op = "summ" if comm.rank == 0 else "sum"
                given: dict[str, Any] = {"x": np.ones(4), "op": op}
            else:
                dtype = "f4" if comm.rank == 0 else "f8"
                given = {"x": np.ones(4, dtype), "out": np.ones(4)}
            with suppress(CommError):
                requests.append(comm.allreduce(nonblocking=True, **given))
            for each in x:
                requests.append(comm.allreduce(each, nonblocking=True))
        for request in requests:
            try:
                request.wait()
                said.append("done")
            except CommError as error:
                said.append(type(error).__name__)
        return said

    mistaken, other = run(2, main)
    assert other[0] in ("MismatchError", "RevokedError", "RefusedError")
    assert mistaken[0] != "done"


@pytest.mark.parametrize("limit_s", [None, 1.0])
def test_buckets_of_equal_length_with_other_calls_are_no_wrong_sum(
    limit_s: float | None,
) -> None:
    """The calls of two ranks have their lengths in another order."""
    how = {} if limit_s is None else {"time_limit_s": limit_s}

    def main(comm: Communicator) -> list[str]:
        lengths = (3, 5) if comm.rank == 0 else (5, 3)
        requests, said = [], []
        with suppress(CommError), comm.fused(**how):
            for length in lengths:
                x = np.full(length, float(length))
                requests.append(comm.allreduce(x, nonblocking=True))
        for each in requests:
            with pytest.raises(CommError) as raised:
                each.wait()
            said.append(type(raised.value).__name__)
        return said

    for said in run(2, main):
        assert {*said} <= {"MismatchError", "RevokedError"}


def test_a_call_that_all_refuse_ends_its_bucket_alone() -> None:
    def main(comm: Communicator) -> list[Any]:
        requests, said = [], []
        with comm.fused(nbytes=64):
            for k in range(6):
                with suppress(UsageError):
                    out = np.ones(5) if k == 1 else None
                    x = np.full(4, float(k))
                    requests.append(comm.allreduce(x, out=out, nonblocking=True))
        for each in requests:
            try:
                said.append(float(each.wait()[0]))
            except RefusedError:
                said.append("refused")
        return said

    assert run(3, main) == [["refused", 6.0, 9.0, 12.0, 15.0]] * 3


@pytest.mark.parametrize("kind", ["long", "algorithm", "bound", "compressed"])
def test_calls_in_no_bucket_are_refused_in_their_place(kind: str) -> None:
    """The others' bucket comes before, and theirs runs by itself."""

    def main(comm: Communicator) -> list[Any]:
        count = 4096 if kind == "long" else 100
        a, x = np.full(100, 1.0), np.full(count, 10.0, "f4")
        more = {
            "algorithm": {"algorithm": "ring"},
            "compressed": {"compress": "bfloat16"},
        }
        how = more.get(kind, {})
        comm.nan_check = kind == "bound"
        bound = comm.plan.allreduce(x)
        said: list[Any] = []
        with comm.fused(nbytes=16384):
            first = comm.allreduce(a, nonblocking=True)
            try:
                if kind == "bound":
                    x[3] = np.nan if comm.rank == 1 else 1.0
                    bound()
                else:
                    out = np.zeros(7, "f4") if comm.rank == 1 else None
                    comm.allreduce(x, out=out, nonblocking=True, **how).wait()
            except (UsageError, RefusedError) as error:
                said.append(type(error).__name__)
        return [*said, float(first.wait()[0]), float(comm.allreduce(np.ones(1))[0])]

    first, second, third = run(3, main)
    assert first == third == ["RefusedError", 3.0, 3.0]
    assert second[0] in ("UsageError", "NotFiniteError")
    assert second[1:] == [3.0, 3.0]


def test_a_fused_call_that_cannot_be_read_is_no_wrong_sum() -> None:
    """Nobody knows whether the others have it in a bucket: here they have not."""

    def main(comm: Communicator) -> list[str]:
        comm.timeout_s = 300
        said = []
        with suppress(CommError), comm.fused(nbytes=64):
            x = object() if comm.rank == 1 else np.ones(100)
            for each in (x, np.ones(100)):
                try:
                    found = comm.allreduce(each, nonblocking=True).wait()
                    said.append("done" if (found == 2).all() else "wrong")
                except CommError as error:
                    said.append(type(error).__name__)
        return said

    first, second = run(2, main)
    assert first[0] == "RefusedError"
    assert second[0] == "BufferError_"
    assert first[1] == second[1] == "RefusedError"
