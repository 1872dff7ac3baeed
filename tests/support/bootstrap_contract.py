# SPDX-License-Identifier: Apache-2.0
"""What every bootstrap promises, for ranks as threads.

A test file imports these tests and gives a fixture ``make``: the size of a world to a
function from rank to bootstrap.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from commrt.bootstrap import Bootstrap
from commrt.errors import RevokedError, TimeoutError_, UsageError

__all__ = [
    "Maker",
    "test_a_key_may_be_used_again",
    "test_blobs_come_in_members_order_and_from_members_only",
    "test_different_keys_may_be_exchanged_at_the_same_time",
    "test_everybody_gets_everybodys_blob",
    "test_one_thread_of_a_rank_waits_for_another",
    "test_ranks_that_ended_are_left_out",
    "test_the_others_go_on_without_a_rank_that_comes_too_late",
    "test_timeout_names_exactly_the_members_that_did_not_arrive",
    "test_what_interrupts_a_wait_withdraws_the_blob",
    "test_what_was_forgotten_begins_anew",
    "test_who_ends_after_the_decision_is_left_out_of_the_next",
    "test_who_gives_up_is_met_when_it_comes_again",
    "test_who_neither_came_nor_ended_is_named_and_met_later",
    "test_who_never_came_need_not_make_up_for_it",
    "test_who_waits_longer_meets_those_that_come_again",
    "test_words_reach_whoever_asks_until_they_are_replaced",
    "test_wrong_members_are_an_error_before_anything_is_sent",
]

Maker = Callable[[int], Callable[[int], Bootstrap]]


@pytest.mark.parametrize("size", [1, 2, 5])
def test_everybody_gets_everybodys_blob(make: Maker, size: int, run_threads) -> None:
    join = make(size)

    def rank_main(rank: int) -> list[bytes]:
        peers = join(rank)
        return peers.exchange(range(size), "hello", b"x" * rank, 10)

    expected = [b"x" * rank for rank in range(size)]
    assert run_threads(size, rank_main) == [expected] * size


def test_blobs_come_in_members_order_and_from_members_only(
    make: Maker, run_threads
) -> None:
    join = make(4)

    def rank_main(rank: int) -> list[bytes] | None:
        if rank == 1:
            return None
        return join(rank).exchange([3, 0, 2], "some", bytes([rank]), 10)

    expected = [bytes([3]), bytes([0]), bytes([2])]
    assert run_threads(4, rank_main) == [expected, None, expected, expected]


def test_a_key_may_be_used_again(make: Maker, run_threads) -> None:
    join = make(3)

    def rank_main(rank: int) -> list[list[bytes]]:
        peers = join(rank)
        return [
            peers.exchange(range(3), "same", bytes([rank, turn]), 10)
            for turn in range(20)
        ]

    expected = [[bytes([r, turn]) for r in range(3)] for turn in range(20)]
    assert run_threads(3, rank_main) == [expected] * 3


def test_different_keys_may_be_exchanged_at_the_same_time(
    make: Maker, run_threads
) -> None:
    """Two threads of each rank, which start their exchanges in opposite orders."""
    join = make(2)
    ranks = [join(0), join(1)]

    def body(thread: int) -> list[bytes]:
        rank, which = divmod(thread, 2)
        return ranks[rank].exchange([0, 1], f"key {which}", bytes([thread]), 10)

    first, second = [bytes([0]), bytes([2])], [bytes([1]), bytes([3])]
    assert run_threads(4, body) == [first, second, first, second]


def test_timeout_names_exactly_the_members_that_did_not_arrive(
    make: Maker, run_threads
) -> None:
    """The limit is long enough for those that come: who has given up is missed, too."""
    join = make(5)
    together = threading.Barrier(3)

    def rank_main(rank: int) -> str:
        if rank in (1, 3):
            return ""
        peers = join(rank)
        together.wait()
        with pytest.raises(TimeoutError_) as caught:
            peers.exchange(range(5), "arena", b"", 1.0)
        assert isinstance(caught.value, TimeoutError)
        return str(caught.value)

    messages = run_threads(5, rank_main)
    for rank in (0, 2, 4):
        assert f"rank {rank}: ranks 1, 3 did not arrive" in messages[rank]
        assert "'arena'" in messages[rank]


def test_who_gives_up_is_met_when_it_comes_again(make: Maker, run_threads) -> None:
    """Rank 1 comes late: it must not take what rank 0 has withdrawn."""
    join = make(2)
    gave_up = threading.Event()

    def rank_main(rank: int) -> list[bytes]:
        peers = join(rank)
        if rank == 1:
            gave_up.wait(300)
            return peers.exchange([0, 1], "k", b"late", 60)
        with pytest.raises(TimeoutError_):
            peers.exchange([0, 1], "k", b"old", 0.05)
        gave_up.set()
        return peers.exchange([0, 1], "k", b"new", 60)

    assert run_threads(2, rank_main) == [[b"new", b"late"]] * 2


def test_who_never_came_need_not_make_up_for_it(make: Maker, run_threads) -> None:
    """As after an error on rank 1, which the others wait for in vain, twice."""
    join = make(3)
    turns = threading.Barrier(3, timeout=300)

    def rank_main(rank: int) -> list[list[bytes]]:
        peers = join(rank)
        for _ in range(2):
            if rank != 1:
                with pytest.raises(TimeoutError_, match=r"rank 1 did not arrive"):
                    peers.exchange(range(3), "k", b"in vain", 0.05)
            turns.wait()
        return [peers.exchange(range(3), "k", bytes([rank, i]), 60) for i in range(3)]

    right = [[bytes([rank, i]) for rank in range(3)] for i in range(3)]
    assert run_threads(3, rank_main) == [right] * 3


def test_who_waits_longer_meets_those_that_come_again(make: Maker, run_threads) -> None:
    join = make(3)
    gave_up = threading.Event()

    def rank_main(rank: int) -> list[bytes]:
        peers = join(rank)
        if rank == 2:
            gave_up.wait(300)
        elif rank == 0:
            with pytest.raises(TimeoutError_):
                peers.exchange(range(3), "k", b"old", 0.05)
            gave_up.set()
        return peers.exchange(range(3), "k", bytes([rank]), 60)

    assert run_threads(3, rank_main) == [[b"\0", b"\1", b"\2"]] * 3


def test_what_interrupts_a_wait_withdraws_the_blob(make: Maker, run_threads) -> None:
    join = make(2)
    interrupted = threading.Event()

    def rank_main(rank: int) -> list[bytes]:
        peers = join(rank)
        if rank == 1:
            interrupted.wait(300)
        else:
            peers.idle = _interrupt
            with pytest.raises(KeyboardInterrupt):
                peers.exchange([0, 1], "k", b"old", 60)
            peers.idle = None
            interrupted.set()
        return peers.exchange([0, 1], "k", bytes([rank]), 60)

    assert run_threads(2, rank_main) == [[b"\0", b"\1"]] * 2


def _interrupt() -> None:
    raise KeyboardInterrupt


def test_one_thread_of_a_rank_waits_for_another(make: Maker, run_threads) -> None:
    join = make(2)
    ranks = [join(0), join(1)]

    def body(thread: int) -> list[bytes]:
        rank = thread % 2
        return ranks[rank].exchange([0, 1], "k", bytes([rank]), 60)

    assert run_threads(4, body) == [[b"\0", b"\1"]] * 4


@pytest.mark.parametrize("members", [[1, 2], [0, 0], [0, 3], [-1, 0], []])
def test_wrong_members_are_an_error_before_anything_is_sent(
    make: Maker, members: list[int]
) -> None:
    peers = make(3)(0)
    with pytest.raises(UsageError, match="members"):
        peers.exchange(members, "k", b"", 10)


def test_what_was_forgotten_begins_anew(make: Maker, run_threads) -> None:
    join = make(2)

    def rank_main(rank: int) -> list[list[bytes]]:
        peers = join(rank)
        said = []
        for number in range(3):
            key = f"group{number}/part"
            said.append(peers.exchange([0, 1], key, bytes([rank, number]), 10))
            peers.exchange([0, 1], "all have read", b"", 10)
            peers.forget(key if number else "group0")
            peers.forget("never used/at all")
        said.append(peers.exchange([1, 0], "group1/part", bytes([rank]), 10))
        return said

    rounds = [[bytes([0, number]), bytes([1, number])] for number in range(3)]
    assert run_threads(2, rank_main) == [[*rounds, [bytes([1]), bytes([0])]]] * 2


@pytest.mark.parametrize("dead", [[], [1], [0], [4], [0, 2, 3]])
def test_ranks_that_ended_are_left_out(
    make: Maker, run_threads, dead: list[int]
) -> None:
    """Rank 4, or 3, alone can see which ranks have ended."""
    join = make(5)
    left = [rank for rank in range(5) if rank not in dead]

    def rank_main(rank: int) -> object:
        if rank in dead:
            return None
        peers = join(rank)
        if rank == left[-1]:
            peers.gone = lambda which: "it was shot" if which in dead else ""
        made, said = peers.regroup(range(5), "k", bytes([rank]), 60)
        assert (made.rank, made.size) == (left.index(rank), len(left))
        blob = bytes([made.rank])
        return said, made.exchange(range(made.size), "k", blob, 60)

    expected = (
        {rank: bytes([rank]) for rank in left},
        [bytes([number]) for number in range(len(left))],
    )
    found = run_threads(5, rank_main)
    assert [found[rank] for rank in left] == [expected] * len(left)
    assert list(found[left[0]][0]) == left


def test_who_ends_after_the_decision_is_left_out_of_the_next(
    make: Maker, run_threads
) -> None:
    """The new ranks agree in turn; one of them has ended by then."""
    join = make(4)

    def rank_main(rank: int) -> list[int]:
        peers, dead = join(rank), {1}
        peers.gone = lambda which: "it was shot" if which in dead else ""
        if rank == 1:
            return []
        made, said = peers.regroup([3, 2, 1, 0], "k", b"", 60)
        assert list(said) == [3, 2, 0]
        dead.add(2)
        if rank == 2:
            return []
        last, said = made.regroup(range(3), "k", bytes([rank]), 60)
        assert said == {0: bytes([3]), 2: bytes([0])}
        return [last.rank, last.size]

    assert run_threads(4, rank_main) == [[1, 2], [], [], [0, 2]]


def test_who_neither_came_nor_ended_is_named_and_met_later(
    make: Maker, run_threads
) -> None:
    join = make(3)
    gave_up = threading.Barrier(3, timeout=300)

    def rank_main(rank: int) -> dict[int, bytes]:
        peers = join(rank)
        if rank != 1:
            words = r"rank 1 neither came nor ended"
            with pytest.raises(TimeoutError_, match=words):
                peers.regroup(range(3), "k", bytes([rank]), 0.05)
        gave_up.wait()
        return peers.regroup(range(3), "k", bytes([rank]), 60)[1]

    everybody = {rank: bytes([rank]) for rank in range(3)}
    assert run_threads(3, rank_main) == [everybody] * 3


def test_the_others_go_on_without_a_rank_that_comes_too_late(
    make: Maker, run_threads
) -> None:
    """They have found, wrongly, that it has ended."""
    join = make(3)
    done = threading.Barrier(3, timeout=300)

    def rank_main(rank: int) -> list[int]:
        peers = join(rank)
        if rank == 1:
            done.wait()
            with pytest.raises(RevokedError, match=r"without rank 1: .* it was shot"):
                peers.regroup(range(3), "k", b"", 60)
            return []
        peers.gone = lambda which: "it was shot" if which == 1 else ""
        made, said = peers.regroup(range(3), "k", b"", 60)
        done.wait()
        return [made.rank, *said]

    assert run_threads(3, rank_main) == [[0, 0, 2], [], [1, 0, 2]]


def test_words_reach_whoever_asks_until_they_are_replaced(
    make: Maker, run_threads
) -> None:
    join = make(3)

    def rank_main(rank: int) -> list[dict[int, bytes]]:
        peers = join(rank)
        found = [peers.words("k", range(3))]
        for word in (b"first", b"second"):
            peers.exchange(range(3), "looked", b"", 10)
            if rank:
                peers.leave_word("k", word + bytes([rank]))
            peers.exchange(range(3), "said", b"", 10)
            found += [peers.words("k", [0, 2]), peers.words("other", range(3))]
        return found

    expected = [{}, {2: b"first\x02"}, {}, {2: b"second\x02"}, {}]
    assert run_threads(3, rank_main) == [expected] * 3
