# SPDX-License-Identifier: Apache-2.0
"""A message that one end refuses: its peer hears of it, and the next ones meet."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from fake_mpi import FakeMpi
from relay_ranks import RelayRanks

from commrt.comm import Communicator, core_of
from commrt.errors import (
    BufferError_,
    NotFiniteError,
    RefusedError,
    RevokedError,
    TimeoutError_,
    UsageError,
)
from commrt.group.refusals import telling_peers
from commrt.local import LocalRanks, run

LENGTHS = (0, 1, 3, 2048, 2049, 70_000)
"""Elements of 8 bytes: of messages that leave at once, and of those that wait."""
NODES = ([[0, 1]], [[0], [1]], [[0, 1], [2]], [[0, 2], [1]])
WRONG = np.ones((4, 4))[:, ::2]


@dataclass(frozen=True)
class Step:
    """One message between two ranks, or one each way, and who refuses it."""

    kind: str
    ends: tuple[int, int]
    tag: int
    length: int
    refusing: frozenset[int]


def draw(rng: random.Random, size: int, number: int) -> list[Step]:
    """Return a program of messages between drawn ranks."""
    found = []
    for index in range(number):
        ends = rng.sample(range(size), 2)
        chosen = rng.choice(([], [], [ends[0]], [ends[1]], ends))
        kind = rng.choice(("plain", "plain", "bound", "anyone", "both ways", "list"))
        tag = rng.randrange(3)
        if kind == "anyone":  # a refused receive from anyone takes no message
            chosen = [end for end in chosen if end == ends[0]]
            tag = 10 + index  # nobody else's
        found.append(
            Step(
                kind,
                (ends[0], ends[1]),
                tag,
                rng.choice(LENGTHS),
                frozenset(chosen),
            )
        )
    return found


def outcome(call: Callable[[], Any]) -> str:
    """Return how a call ends, or the error of a refusal."""
    try:
        call()
    except (RefusedError, UsageError, BufferError_) as error:
        return type(error).__name__
    return "right"


class Walk:
    """One rank's way through a program of messages."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm

    def take(self, number: int, step: Step) -> None:
        """Make the rank's part of a step, and check how it ends."""
        me = self._comm.rank
        if me not in step.ends:
            return
        peer = step.ends[1 - step.ends.index(me)]
        is_wrong, others_fault = me in step.refusing, peer in step.refusing
        x = np.full(step.length, 100.0 * number + me)
        out = np.full(step.length, -1.0)
        into = WRONG if is_wrong else out
        sends = me == step.ends[0]
        call = self._call_of(step, peer, WRONG if is_wrong else x, into, sends=sends)
        found = outcome(call)
        where = (number, step, me, found)
        receives = not sends or step.kind in ("both ways", "list")
        if is_wrong:
            assert found == "BufferError_", where
        elif not others_fault:
            assert found == "right", where
            assert not receives or (out == 100.0 * number + peer).all(), where
        elif receives:
            assert found == "RefusedError", where
            assert (out == -1).all(), where
        else:  # a short message was away before
            assert found in ("right", "RefusedError"), where

    def _call_of(
        self, step: Step, peer: int, x: Any, out: Any, *, sends: bool
    ) -> Callable[[], Any]:
        comm, tag = self._comm, step.tag
        if step.kind == "both ways":
            more = {"sendtag": tag, "recvtag": tag}
            return lambda: comm.sendrecv(x, peer, out, peer, **more)
        if step.kind == "list":
            lists: Any = {"sends": [(x, peer, tag)], "recvs": [(out, peer, tag)]}
            return lambda: comm.multi_sendrecv(**lists)
        if step.kind == "bound":
            return self._bound(step, peer, x, out, sends=sends)
        if sends:
            return lambda: comm.send(x, peer, tag)
        source = None if step.kind == "anyone" else peer
        return lambda: comm.recv(out, source, tag)

    def _bound(
        self, step: Step, peer: int, x: Any, out: Any, *, sends: bool
    ) -> Callable[[], Any]:
        """Return a bound call; where it is to be wrong, its array moves before."""
        array = x if sends else out
        plan, is_wrong = self._comm.plan, array is WRONG
        if is_wrong:
            array = np.ones(step.length)
        bind: Any = plan.send if sends else plan.recv
        bound = bind(array, peer, tag=step.tag)
        if not is_wrong:
            return lambda: bound()
        array.resize(step.length + 1000, refcheck=False)

        def wrong() -> None:
            try:
                bound()
            except UsageError as error:
                raise BufferError_(str(error)) from error

        return wrong


@pytest.mark.full(sample=4)
@pytest.mark.parametrize("carrier", ["memory", "mpi", "relay"])
@pytest.mark.parametrize("turn", range(12))
@pytest.mark.timeout(240)
def test_messages_meet_after_refusals(carrier: str, turn: int, seed: int) -> None:
    rng = random.Random(f"{seed} {carrier} {turn}")
    nodes = rng.choice(NODES[1:])
    size = rng.choice((2, 3, 5)) if carrier == "memory" else sum(map(len, nodes))
    steps = draw(rng, size, 60)

    def main(comm: Communicator) -> None:
        walk = Walk(comm)
        for number, step in enumerate(steps):
            walk.take(number, step)
        assert comm.allreduce(comm.rank) == size * (size - 1) // 2

    if carrier == "memory":
        run(size, main, timeout_s=300)
        return
    with FakeMpi().ranks(nodes) if carrier == "mpi" else RelayRanks(nodes) as ranks:
        ranks.each(main)


# -- the errors ------------------------------------------------------------------------


def settle(ranks: LocalRanks) -> None:
    """Step both ranks until nothing moves."""
    idle = 0
    while idle < 100:
        idle = 0 if ranks.step(0) | ranks.step(1) else idle + 1


def test_the_receive_names_rank_call_and_reason() -> None:
    with LocalRanks(2) as ranks:
        sender, receiver = ranks.comms
        request = receiver.recv(np.empty(3), 0, 7, nonblocking=True)
        with pytest.raises(BufferError_):
            sender.send(WRONG, 1, 7)
        settle(ranks)
        said = r"rank 0 has refused its send \(tag 7\), and nothing was delivered: send"
        with pytest.raises(RefusedError, match=said):
            request.wait()


def test_a_send_that_waits_names_rank_call_and_reason() -> None:
    with LocalRanks(2) as ranks:
        sender, receiver = ranks.comms
        request = sender.send(np.ones(10**5), 1, 7, nonblocking=True)
        settle(ranks)
        assert not request.done
        with pytest.raises(BufferError_):
            receiver.recv(WRONG, 0, 7)
        settle(ranks)
        said = r"rank 1 has refused its recv \(tag 7\), and nothing was delivered: recv"
        with pytest.raises(RefusedError, match=said):
            request.wait()
        # Nothing is in flight, so nothing keeps them.
        sender.free()
        receiver.free()


def test_a_refused_receive_keeps_nothing_in_flight() -> None:
    with LocalRanks(2) as ranks:
        first, second = ranks.comms
        with pytest.raises(BufferError_):
            second.recv(WRONG, 0)
        assert not second.stats().in_flight
        with pytest.raises(BufferError_):
            first.send(WRONG, 1)
        settle(ranks)
        assert not first.stats().in_flight
        first.free()
        second.free()


def test_a_probe_raises_for_a_refused_message_once() -> None:
    with LocalRanks(2) as ranks:
        sender, receiver = ranks.comms
        with pytest.raises(BufferError_):
            sender.send(WRONG, 1, 3)
        settle(ranks)
        with pytest.raises(RefusedError, match="rank 0 has refused its send"):
            receiver.probe(0, 3)
        assert receiver.probe(0, 3, nonblocking=True) is None
        sender.send(np.arange(2.0), 1, 3)
        found = receiver.probe(tag=3)
        assert found is not None
        assert (found.source, found.nbytes, found.dtype) == (0, 16, "float64")


def test_a_list_is_refused_message_by_message() -> None:
    with LocalRanks(3) as ranks:
        first, *others = ranks.comms
        outs = [np.empty(2) for _ in others]
        recvs = [
            comm.recv(out, 0, nonblocking=True)
            for comm, out in zip(others, outs, strict=True)
        ]
        with pytest.raises(UsageError, match=r"sends\[2\]"):
            first.multi_sendrecv(
                sends=[(np.ones(2), 1), (np.ones(2), 2), (np.ones(2), 9)], recvs=[]
            )
        for _ in range(100):
            for rank in range(3):
                ranks.step(rank)
        for request in recvs:
            with pytest.raises(RefusedError):
                request.wait()


@pytest.mark.parametrize("how", ["send", "sendrecv", "multi_sendrecv", "bound list"])
def test_values_that_are_refused_have_places_too(how: str) -> None:
    def main(comm: Communicator) -> None:
        comm.nan_check = True
        x, out = np.full(3, np.nan), np.empty(3)
        calls: dict[str, Callable[[], Any]] = {
            "send": lambda: comm.send(x, 1),
            "sendrecv": lambda: comm.sendrecv(x, 1, out, 1),
            "multi_sendrecv": lambda: comm.multi_sendrecv(sends=[(x, 1)]),
        }
        if comm.rank == 0:
            bound = comm.plan.multi_sendrecv(sends=[(x, 1)])
            with pytest.raises(NotFiniteError):
                calls.get(how, bound)()
            comm.send(np.ones(3), 1)
        else:
            if how == "sendrecv":
                comm.send(out, 0)
            with pytest.raises(RefusedError, match="x has NaN at element 0"):
                comm.recv(out, 0)
            assert comm.recv(out, 0).tolist() == [1, 1, 1]

    run(2, main)


@pytest.mark.parametrize(
    ("call", "what"),
    [
        (lambda comm: comm.send(np.ones(2), 5), "dest"),
        (lambda comm: comm.send(np.ones(2), 1, -1), "tag"),
        (lambda comm: comm.recv(np.ones(2), "0"), "source"),
    ],
)
def test_a_message_without_peer_or_tag_has_no_place(
    call: Callable[[Communicator], Any], what: str
) -> None:
    def main(comm: Communicator) -> None:
        out = np.empty(2)
        if comm.rank == 0:
            with pytest.raises(UsageError, match=what):
                call(comm)
            comm.send(np.ones(2), 1)
        else:
            assert comm.recv(out, 0).tolist() == [1, 1]

    run(2, main)


def test_a_refused_receive_from_anyone_takes_no_message() -> None:
    def main(comm: Communicator) -> None:
        if comm.rank == 0:
            comm.send(np.ones(2), 1)
        else:
            with pytest.raises(BufferError_):
                comm.recv(WRONG)
            assert comm.recv(np.empty(2)).tolist() == [1, 1]

    run(2, main)


@pytest.mark.parametrize("how", ["wrong stream", "read-only since"])
def test_a_receive_from_anyone_that_is_refused_late_takes_no_message(how: str) -> None:
    def main(comm: Communicator) -> None:
        if comm.rank == 0:
            for turn in range(3):
                comm.send(np.full(2, float(turn)), 1)
            return
        out = np.empty(2)
        comm.probe(0)
        if how == "wrong stream":
            for _ in range(2):
                with pytest.raises(UsageError):
                    comm.recv(out, stream=object())
            comm.recv(out)
        else:
            request = comm.recv(out, None, 1, nonblocking=True)
            assert not request.done
            out.flags.writeable = False
            with pytest.raises(TimeoutError_):
                request.wait(timeout_s=0.01)
            out.flags.writeable = True
            comm.recv(out)
        assert out.tolist() == [0, 0]
        for turn in (1, 2):
            assert comm.recv(out).tolist() == [turn, turn]

    run(2, main)


def test_an_array_that_becomes_read_only_loses_no_message() -> None:
    with LocalRanks(2) as ranks:
        sender, receiver = ranks.comms
        out = np.empty(2)
        request = receiver.recv(out, nonblocking=True)
        out.flags.writeable = False
        for turn in range(3):
            sender.send(np.full(2, float(turn)), 1)
        for _ in range(2):
            with pytest.raises(BufferError_):
                request.test()
        out.flags.writeable = True
        request.wait()
        assert out.tolist() == [0, 0]
        assert receiver.recv(out).tolist() == [1, 1]


def test_sends_that_a_revoke_takes_back_keep_no_memory() -> None:
    """A communicator that has ended counted as busy, and free() kept its memory."""
    with LocalRanks(2) as ranks:
        sender, _ = ranks.comms
        requests = [sender.send(np.ones(2), 1, nonblocking=True) for _ in range(17)]
        with pytest.raises(BufferError_):
            sender.send(WRONG, 1)
        ranks.step(0)
        sender.revoke()
        for request in requests:
            with suppress(RevokedError):
                request.wait()
        core = core_of(sender)
        sender.free()
        assert core.idle


def test_a_refused_send_without_room_keeps_nobody_waiting() -> None:
    with LocalRanks(2) as ranks:
        sender, receiver = ranks.comms
        for _ in range(16):
            sender.send(np.ones(2), 1)
        with pytest.raises(BufferError_):
            sender.send(WRONG, 1)
        assert not sender.stats().in_flight
        for _ in range(16):
            assert receiver.recv(np.empty(2), 0).tolist() == [1, 1]
        waits = receiver.recv(np.empty(2), 0, nonblocking=True)
        settle(ranks)
        sender.send(np.ones(2), 1, 1)
        settle(ranks)
        with pytest.raises(RefusedError):
            waits.wait()
        sender.free()


def test_a_group_that_has_ended_tells_nobody() -> None:
    with LocalRanks(2) as ranks:
        sender, receiver = ranks.comms
        core = core_of(sender)
        sender.free()
        with pytest.raises(ValueError, match="mistake"), telling_peers(core, [(1, 0)]):
            raise ValueError("a mistake")
        assert core.idle
        assert receiver.probe(0, nonblocking=True) is None


def test_a_mistake_does_not_become_an_older_message() -> None:
    """The receiver goes on to its next step, and gets what belongs to that one."""

    def main(comm: Communicator) -> None:
        out = np.empty(2)
        for turn in range(4):
            if comm.rank == 0:
                comm.send(np.full(2, float(turn)), 1)
            elif turn == 1:
                with pytest.raises(BufferError_):
                    comm.recv(WRONG, 0)
            else:
                assert comm.recv(out, 0).tolist() == [turn, turn]

    run(2, main)


def test_messages_to_oneself_are_refused_alike() -> None:
    with LocalRanks(1) as ranks:
        (comm,) = ranks.comms
        out = np.empty(2)
        waits = comm.recv(out, 0, nonblocking=True)
        with pytest.raises(BufferError_):
            comm.send(WRONG, 0)
        with pytest.raises(RefusedError):
            waits.wait()
        with pytest.raises(BufferError_):
            comm.recv(WRONG, 0)
        comm.send(np.zeros(2), 0)
        comm.send(np.ones(2), 0)
        assert comm.recv(out, 0).tolist() == [1, 1]


def test_a_sender_that_gave_up_hears_of_no_refusal() -> None:
    with LocalRanks(2) as ranks:
        sender, receiver = ranks.comms
        request = sender.send(np.ones(10**5), 1, nonblocking=True)
        settle(ranks)
        with pytest.raises(TimeoutError_):
            request.wait(timeout_s=1e-3)
        sender.revoke()
        with pytest.raises(BufferError_):
            receiver.recv(WRONG, 0)
        settle(ranks)
        assert request.done


def test_refusals_pass_where_the_receiver_holds_many_messages() -> None:
    """It takes no more short messages, and those that follow are announced."""
    with LocalRanks(2) as ranks:
        sender, receiver = ranks.comms
        flood = [sender.send(np.ones(2048), 1, 1, nonblocking=True) for _ in range(400)]
        settle(ranks)
        assert not flood[-1].done
        with pytest.raises(BufferError_):
            sender.send(WRONG, 1, 2)
        request = receiver.recv(np.empty(2), 0, 2, nonblocking=True)
        settle(ranks)
        with pytest.raises(RefusedError):
            request.wait()
        outs = [receiver.recv(np.empty(2048), 0, 1, nonblocking=True) for _ in flood]
        settle(ranks)
        assert all(each.done for each in (*outs, *flood))
