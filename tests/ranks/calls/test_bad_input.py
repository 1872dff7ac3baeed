# SPDX-License-Identifier: Apache-2.0
"""Wrong calls: a typed error that names what, where, what was expected and the cure.

Nothing is sent and no sequence number is used up, so the corrected call of the same
rank meets the other ranks' first one.
"""

from __future__ import annotations

import array
import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from started_operations import num_started, past_refusals
from wrong_calls import ARGUMENTS, BUFFERS

import commrt
from commrt.errors import ClosedError, RefusedError, UsageError
from commrt.local import LocalRanks, run

F = np.float32


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [wrong[1:] for wrong in BUFFERS + ARGUMENTS],
    ids=[wrong[0] for wrong in BUFFERS + ARGUMENTS],
)
def test_refused_before_anything_is_sent(
    call: Callable[[Any], Any], error: type[Exception], message: str
) -> None:
    def rank_main(comm: Any) -> float:
        # A plan for these arguments is in the cache: neither way may let them pass.
        comm.bcast(np.zeros(4, F))
        comm.allreduce(np.zeros(4, F))
        before = num_started(comm)
        if comm.rank == 1:
            with pytest.raises(error, match=message):
                call(comm)
            with pytest.raises(error, match=message):
                call(comm)
        assert num_started(comm) == before
        total = past_refusals(lambda: comm.allreduce(np.ones(4, F)))
        assert comm.rank == 0 or num_started(comm) == before + 1
        return float(total.sum())

    assert run(2, rank_main, timeout_s=300) == [8.0] * 2


def test_integers_of_any_library_are_ranks_and_tags() -> None:
    class Index:
        def __index__(self) -> int:
            return 1

    def rank_main(comm: Any) -> list[float]:
        got = []
        for one in (np.int64(1), np.uint8(1), np.array(1), Index()):
            x = np.full(3, float(comm.rank))
            comm.bcast(x, root=one)
            comm.reduce(x, root=one)
            if comm.rank == 0:
                comm.send(x, dest=one, tag=one)
                comm.sendrecv(x, dest=one, out=x.copy(), source=one, recvtag=one)
            else:
                zero = np.int16(0)
                comm.recv(x, source=zero, tag=one)
                out = x.copy()
                comm.sendrecv(x, dest=zero, sendtag=one, out=out, source=zero)
            comm.allreduce(x, params={"chunk": np.int64(4096)})
            with comm.split(np.int64(3), key=np.int8(-comm.rank)) as turned:
                assert turned.rank == 1 - comm.rank
            with comm.create_group(np.array([1, 0])) as turned:
                assert turned.rank == 1 - comm.rank
            got.append(float(x[0]))
        return got

    assert run(2, rank_main, timeout_s=300) == [[2.0] * 4] * 2


@pytest.mark.parametrize("wrong", [True, np.True_, 1.0, np.float64(0), "0", (0,)])
def test_what_is_no_integer_is_no_rank_and_no_tag(wrong: Any) -> None:
    def rank_main(comm: Any) -> None:
        x = np.zeros(3)
        for call, message in (
            (lambda: comm.send(x, dest=wrong), "send: dest=.* is not a rank"),
            (lambda: comm.recv(x, source=wrong), "recv: source=.* is not a rank"),
            (lambda: comm.send(x, dest=0, tag=wrong), "send: tag=.* must be an integ"),
            (lambda: comm.create_group([wrong]), "create_group: ranks=.* is not a ra"),
            (lambda: comm.split(0, wrong), "split: key=.* must be an integer"),
        ):
            with pytest.raises(UsageError, match=message):
                call()

    run(1, rank_main)


def test_usage_errors_are_python_errors_too() -> None:
    def rank_main(comm: Any) -> None:
        with pytest.raises(ValueError, match="not a rank"):
            comm.bcast(np.zeros(1), root=5)
        with pytest.raises(TypeError, match="list of other things than numbers"):
            comm.bcast(["a"])

    run(1, rank_main)


def test_a_freed_communicator_says_so_everywhere() -> None:
    def rank_main(comm: Any) -> None:
        comm.allreduce(np.zeros(4, F))
        comm.free()
        comm.free()
        assert "freed" in repr(comm)
        for call in (
            lambda: comm.allreduce(np.zeros(4, F)),
            lambda: comm.barrier(),
            lambda: comm.send(np.zeros(4, F), dest=0),
            lambda: comm.recv(np.zeros(4, F), source=0),
            lambda: comm.sendrecv(np.zeros(1), dest=0, out=np.zeros(1), source=0),
            lambda: comm.split(0),
            lambda: comm.dup(),
            lambda: comm.create_group([0]),
        ):
            with pytest.raises(ClosedError, match="was freed: make a new communicator"):
                call()

    run(2, rank_main)


def test_leaving_a_with_block_frees() -> None:
    def rank_main(comm: Any) -> None:
        with comm.dup() as copy:
            copy.barrier()
        with pytest.raises(ClosedError):
            copy.barrier()
        comm.barrier()

    run(2, rank_main)


@pytest.mark.parametrize("ranks", [[0], [0, 0, 1], [0, 1, 2], [1, -1], ["1"]])
def test_groups_of_wrong_ranks(ranks: list[Any]) -> None:
    def rank_main(comm: Any) -> None:
        if comm.rank == 1:
            with pytest.raises(UsageError, match="create_group: ranks"):
                comm.create_group(ranks)
        elif ranks != [0]:  # that is a call of rank 0 alone
            with pytest.raises(RefusedError, match="create_group: ranks"):
                comm.create_group([1, 0])
        with comm.create_group([1, 0]) as group:
            assert group.rank == 1 - comm.rank

    run(2, rank_main, timeout_s=300)


def test_splits_by_something_else_than_integers() -> None:
    def rank_main(comm: Any) -> None:
        with pytest.raises(
            UsageError, match="split: color='a' must be an integer of 64 bits or None"
        ):
            comm.split("a")
        with pytest.raises(
            UsageError, match=r"split: key=0\.5 must be an integer of 64 bits$"
        ):
            comm.split(0, 0.5)
        with comm.split(0) as same:
            assert same.size == 2

    run(2, rank_main, timeout_s=300)


def test_questions_about_what_does_not_exist() -> None:
    def rank_main(comm: Any) -> None:
        with pytest.raises(UsageError, match="did you mean 'allreduce'"):
            comm.explain("all_reduce", 8)
        with pytest.raises(UsageError, match="did you mean 'float32'"):
            comm.candidates("allreduce", 8, dtype="float23")
        with pytest.raises(UsageError, match="did you mean 'sum'"):
            comm.explain("allreduce", 8, op="sun")
        for call, message in (
            (lambda: comm.explain(None, 8), "unknown operation None: expected a name"),
            (lambda: comm.explain("bcast", "8"), "explain: nbytes='8' must be a num"),
            (lambda: comm.explain("bcast", 1.5), "explain: nbytes=1.5 must be a num"),
            (lambda: comm.candidates("bcast", -8), "candidates: nbytes=-8 must be a"),
            (lambda: comm.explain("bcast", 8, root=1), "bcast: root=1 is not a rank"),
            (
                lambda: comm.explain("bcast", 8, dtype=np.float32),
                r"unknown dtype <class 'numpy.float32'>: expected a name\. Known: bfl",
            ),
            (
                lambda: comm.explain("allreduce", 8, op="bxor"),
                "op='bxor' is not defined for float32",
            ),
        ):
            with pytest.raises(UsageError, match=message):
                call()
        assert comm.explain("bcast", np.int64(8), root=np.int8(0)).query.nbytes == 8

    run(1, rank_main)


@pytest.mark.parametrize("wrong", [-1, 0, "5", (5,), True])
def test_a_default_deadline_is_a_time(wrong: Any) -> None:
    def rank_main(comm: Any) -> None:
        comm.timeout_s = 700
        with pytest.raises(UsageError, match=r"local: timeout_s=.* must be a number"):
            comm.timeout_s = wrong
        assert comm.timeout_s == 700.0

    run(1, rank_main)


@pytest.mark.parametrize("wait", [commrt.wait_all, commrt.wait_any])
def test_what_is_no_list_of_requests(wait: Any) -> None:
    def rank_main(comm: Any) -> None:
        request = comm.barrier(nonblocking=True)
        with pytest.raises(UsageError, match="expected a list of requests, found <"):
            wait(request)
        with pytest.raises(UsageError, match="expected a list of requests, found None"):
            wait(None)
        with pytest.raises(UsageError, match="found 1 in it; calls with nonblocking"):
            wait([request, 1])
        wait(each for each in [request])

    run(1, rank_main)


@pytest.mark.parametrize("ranks", [0, None])
def test_groups_of_no_sequence(ranks: Any) -> None:
    def rank_main(comm: Any) -> None:
        with pytest.raises(UsageError, match=r"create_group: ranks=.* such as"):
            comm.create_group(ranks)

    run(1, rank_main)


@pytest.mark.parametrize("given", [3, "world", [0, 1]])
def test_init_over_what_is_no_mpi_communicator(given: Any) -> None:
    with pytest.raises(UsageError, match="is not a communicator of mpi4py"):
        commrt.init(given)


def test_buffers_of_other_libraries_and_subclasses_work() -> None:
    class Tagged(np.ndarray):  # type: ignore[type-arg]
        pass

    def rank_main(comm: Any) -> list[float]:
        plain = array.array("d", [1.0, 2.0])
        raw = (ctypes.c_float * 2)(1.0, 2.0)
        tagged = np.array([1.0, 2.0]).view(Tagged)
        assert comm.allreduce(plain) is plain
        assert comm.allreduce(raw) is raw
        assert comm.allreduce(tagged) is tagged
        gathered = comm.allgather(memoryview(b"ab"))
        assert gathered.tolist() == [list(b"ab")] * 2
        return [plain[1], raw[1], tagged[1]]

    assert run(2, rank_main) == [[4.0, 4.0, 4.0]] * 2


def test_memory_of_a_buffer_cannot_move_while_in_flight() -> None:
    with LocalRanks(2) as ranks:
        x = array.array("d", [1.0] * 100)
        first = ranks.comms[0].allreduce(x, nonblocking=True)
        with pytest.raises(BufferError):
            x.extend([0.0] * 10_000)
        second = ranks.comms[1].allreduce(np.ones(100), nonblocking=True)
        while not (first.test() and second.test()):
            pass
        assert x[99] == 2.0
