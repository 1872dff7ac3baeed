# SPDX-License-Identifier: Apache-2.0
"""Exchanges between real ranks, started by mpiexec."""

from __future__ import annotations

import time
from typing import Any

import pytest

from commrt.errors import TimeoutError_, UsageError
from commrt.launch.detect import LaunchInfo, detect


def _connect() -> Any:
    from commrt.bootstrap import connect

    return connect(detect())


def meet() -> list[Any]:
    peers = _connect()
    everyone = range(peers.size)
    blobs = [
        peers.exchange(everyone, "same key", bytes([peers.rank, turn]), 20)
        for turn in range(10)
    ]
    peers.close()
    return [peers.rank, peers.size, [[list(blob) for blob in row] for row in blobs]]


@pytest.mark.parametrize("size", [2, 5])
def test_everybody_gets_everybodys_blob(mpirun: Any, size: int) -> None:
    blobs = [[[rank, turn] for rank in range(size)] for turn in range(10)]
    assert mpirun(size, meet) == [[rank, size, blobs] for rank in range(size)]


def meet_with_large_blobs() -> list[int]:
    peers = _connect()
    blob = bytes([peers.rank]) * 3_000_000  # far above any eager limit
    return [sum(got) for got in peers.exchange(range(peers.size), "big", blob, 20)]


def test_large_blobs_arrive(mpirun: Any) -> None:
    assert mpirun(3, meet_with_large_blobs) == [[0, 3_000_000, 6_000_000]] * 3


def meet_in_two_groups() -> list[list[int]]:
    peers = _connect()
    mine = [3, 1] if peers.rank % 2 else [0, 2]
    got = peers.exchange(mine, "halves", bytes([peers.rank]), 20)
    got += peers.exchange([2, 3], "top", b"\x07", 20) if peers.rank >= 2 else []
    return [list(blob) for blob in got]


def test_groups_meet_without_the_others(mpirun: Any) -> None:
    top = [[7], [7]]
    expected = [[[0], [2]], [[3], [1]], [[0], [2], *top], [[3], [1], *top]]
    assert mpirun(4, meet_in_two_groups) == expected


def wait_for_a_rank_that_never_comes() -> str:
    peers = _connect()
    message = ""
    if peers.rank != 1:
        with pytest.raises(TimeoutError_) as caught:
            peers.exchange(range(peers.size), "arena", b"", 0.2)
        message = str(caught.value)
    peers.exchange(range(peers.size), "after", b"", 20)
    return message


def test_timeout_names_the_missing_rank_and_leaves_the_others_usable(
    mpirun: Any,
) -> None:
    messages = mpirun(3, wait_for_a_rank_that_never_comes)
    for rank in (0, 2):
        assert f"rank {rank}: rank 1 did not arrive" in messages[rank]


def leave_words() -> list[Any]:
    """All but rank 0 leave word, and replace it; who asks waits for the last one."""
    peers = _connect()
    everybody, others = range(peers.size), range(1, peers.size)
    found = [peers.words("k", everybody)]
    for word in (b"first", b"second" * 1000):
        peers.exchange(everybody, "looked", b"", 20)
        if peers.rank:
            peers.leave_word("k", word)
        want = dict.fromkeys([r for r in others if r != peers.rank], word)
        deadline = time.monotonic() + 20
        while peers.words("k", [*want]) != want:
            assert time.monotonic() < deadline
        found.append(peers.words("other", everybody))
    peers.exchange(everybody, "over", b"", 20)
    peers.forget("k")
    return [*found, peers.words("k", everybody)]


def test_words_reach_whoever_asks(mpirun: Any) -> None:
    assert mpirun(3, leave_words) == [[{}] * 4] * 3


def come_again() -> list[list[int]]:
    """Rank 1 does not come twice; then it is late; then all come."""
    peers = _connect()
    everybody = range(peers.size)
    for turn in range(2):
        if peers.rank != 1:
            with pytest.raises(TimeoutError_, match="rank 1 did not arrive"):
                peers.exchange(everybody, "k", b"in vain", 0.1)
        peers.exchange(everybody, f"turn {turn}", b"", 20)
    if peers.rank == 0:
        with pytest.raises(TimeoutError_):
            peers.exchange(everybody, "k", b"early", 0.1)
    if peers.rank != 2:
        peers.exchange([0, 1], "rank 0 gave up", b"", 20)
    found = [peers.exchange(everybody, "k", bytes([peers.rank, i]), 20) for i in (7, 8)]
    return [list(blob) for row in found for blob in row]


def test_who_gives_up_is_met_when_it_comes_again(mpirun: Any) -> None:
    right = [[rank, i] for i in (7, 8) for rank in range(3)]
    assert mpirun(3, come_again) == [right] * 3


def give_up_and_be_heard_late() -> list[int]:
    """Rank 0's withdrawal leaves only when rank 1 has met what it takes back."""
    from commrt.bootstrap import mpi_mail

    peers = _connect()
    send, held = peers.mail.start_to_send, []

    def hold_withdrawals(message: bytes, peer: int) -> Any:
        if message[0] != mpi_mail.Says.WITHDRAWN:
            return send(message, peer)
        held.append((message, peer))
        return send(b"\x02" + b"\xff" * 8 + b"\0" * 4, peer)  # of no attempt

    if peers.rank == 0:
        peers.mail.start_to_send = hold_withdrawals
        with pytest.raises(TimeoutError_):
            peers.exchange([0, 1], "k", b"in vain", 0.1)
        peers.mail.start_to_send = send
    peers.comm.Barrier()
    if peers.rank == 0:
        deadline = time.monotonic() + 20
        while not peers.comm.Iprobe(source=1, tag=mpi_mail.TAG):
            assert time.monotonic() < deadline
        for message, peer in held:
            send(message, peer)
    found = [peers.exchange([0, 1], "k", bytes([peers.rank, i]), 20) for i in (7, 8)]
    return [list(blob) for row in found for blob in row]


def test_a_late_withdrawal_undoes_what_it_takes_back(mpirun: Any) -> None:
    right = [[rank, i] for i in (7, 8) for rank in range(2)]
    assert mpirun(2, give_up_and_be_heard_late) == [right] * 2


def interrupt_a_wait() -> float:
    """Rank 0 waits for rank 1, which never comes, and interrupts itself."""
    import signal
    import threading

    peers = _connect()
    took_s = 0.0
    if peers.rank == 0:
        main = threading.main_thread().ident
        assert main is not None
        interrupt = threading.Timer(0.2, signal.pthread_kill, (main, signal.SIGINT))
        interrupt.start()
        start = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            peers.exchange([0, 1], "never", b"", 30)
        took_s = time.monotonic() - start
    peers.exchange([0, 1], "end", b"", 20)
    return took_s


def test_ctrl_c_interrupts_a_wait_at_once(mpirun: Any) -> None:
    assert mpirun(2, interrupt_a_wait)[0] < 30  # the exchange's own deadline


def start_under_another_launcher() -> str:
    from commrt.bootstrap import connect

    launch = LaunchInfo("mpi", 0, 7, "Another MPI's launcher (PMI_SIZE)")
    with pytest.raises(UsageError) as caught:
        connect(launch)
    return str(caught.value)


def test_a_launcher_of_another_mpi_is_an_error_with_the_cure(mpirun: Any) -> None:
    for message in mpirun(2, start_under_another_launcher):
        assert "says 7 ranks" in message
        assert "was started with 2" in message
        assert "mpiexec" in message


def adopt_a_communicator() -> list[int]:
    from mpi4py import MPI

    from commrt.bootstrap import connect

    half = MPI.COMM_WORLD.Split(MPI.COMM_WORLD.rank % 2)
    peers = connect(detect(), half)
    blobs = peers.exchange([0, 1], "k", bytes([MPI.COMM_WORLD.rank]), 20)
    peers.close()
    half.Free()
    return [blob[0] for blob in blobs]


def test_a_given_communicator_is_used_instead_of_the_world(mpirun: Any) -> None:
    assert mpirun(4, adopt_a_communicator) == [[0, 2], [1, 3], [0, 2], [1, 3]]
