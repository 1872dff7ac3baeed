# SPDX-License-Identifier: Apache-2.0
"""Messages between nodes through the relay: order, limits, ends, and who is missing."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import numpy as np
import pytest
from cases import run_cases, sample
from relay_by_hand import RanksByHand
from relay_by_tcp import CARRIERS
from relay_ranks import RelayRanks

from commrt.bootstrap.base import poll_until
from commrt.comm import core_of
from commrt.errors import MismatchError, PeerFailedError, TimeoutError_

LAYOUTS = ([[0], [1]], [[0, 1], [2]], [[0, 1], [2, 3]], [[0, 2], [1]])
COLLECTIVES = (
    "allreduce",
    "reduce",
    "bcast",
    "allgather",
    "reduce_scatter",
    "alltoall",
)
EAGER_NBYTES, WINDOW_NBYTES = (256 << 10) + 4096, 16 << 20


@pytest.mark.parametrize("relayed", CARRIERS)
@pytest.mark.parametrize("nodes", LAYOUTS, ids=str)
def test_collectives_cross_nodes(
    relayed: type[RelayRanks], nodes: list[list[int]], seed: int
) -> None:
    with relayed(nodes) as ranks:
        size = len(ranks.comms)

        def run(comm: Any) -> list[Any]:
            assert core_of(comm).is_relayed
            wrong = []
            for coll in (*COLLECTIVES, "gather", "scatter", "scan"):
                wrong += run_cases(comm, sample(coll, size, seed, 3))
            return wrong

        assert ranks.each(run) == [[]] * size


@pytest.mark.parametrize("relayed", CARRIERS)
@pytest.mark.parametrize("number", [1, 2000, 400_000])
def test_a_message_of_another_call_is_a_mismatch(
    relayed: type[RelayRanks], number: int
) -> None:
    with relayed([[0], [1]]) as ranks:

        def run(comm: Any) -> str:
            op = "sum" if comm.rank == 0 else "max"
            with pytest.raises(MismatchError) as raised:
                comm.allreduce(np.ones(number), op=op, algorithm="direct")
            return str(raised.value)

        told = ranks.each(run)
        # Whoever finds it first tells the other one, unless that has found it, too.
        found = {
            "rank 0": "rank 1 made another call: allreduce of float64, op='max'",
            "rank 1": "rank 0 made another call: allreduce of float64, op='sum'",
        }
        for rank, text in enumerate(told):
            finder = text.partition(": ")[0][-6:]
            assert found[finder] in text, (rank, text)


@pytest.mark.parametrize("relayed", CARRIERS)
def test_who_is_done_with_boxes_made_the_call_that_others_wait_in(
    relayed: type[RelayRanks],
) -> None:
    """A rank that waits asks all other ones, and its call names the type of arrays."""
    sources: list[list[int]] = [[], [], [1]]
    destinations: list[list[int]] = [[], [2], []]
    with relayed([[0], [1], [2]]) as ranks:

        def run(comm: Any) -> Any:
            graph = comm.graph(sources[comm.rank], destinations[comm.rank])
            x = np.full((len(destinations[comm.rank]), 3), 2.0)
            out = np.zeros((len(sources[comm.rank]), 3))
            looks = itertools.count()
            if comm.rank == 1:  # late: rank 2 asks meanwhile, and rank 0 is done
                poll_until(lambda: next(looks) > 300, 300.0)
            graph.neighbor_alltoall(x, out=out)
            graph.barrier()
            return out.tolist()

        assert ranks.each(run) == [[], [], [[2.0] * 3]]


@pytest.mark.parametrize("relayed", CARRIERS)
@pytest.mark.parametrize("coll", COLLECTIVES)
def test_two_levels_and_long_vectors(relayed: type[RelayRanks], coll: str) -> None:
    count = 400_004
    with relayed([[0, 1], [2, 3]]) as ranks:

        def run(comm: Any) -> Any:
            x = np.arange(count) % 13.0 + comm.rank
            results = [
                getattr(comm, coll)(x.copy(), algorithm=name)
                for name in ("two_level", "direct")
            ]
            return [None if one is None else one.tolist() for one in results]

        for two_level, direct in ranks.each(run):
            assert two_level == direct


@pytest.mark.parametrize("relayed", CARRIERS)
def test_messages_of_all_lengths_keep_their_order(relayed: type[RelayRanks]) -> None:
    """Short ones overtake no long one, though these wait for their receives."""
    lengths = [0, 1, EAGER_NBYTES - 32, EAGER_NBYTES, EAGER_NBYTES + 1, 3_000_001, 5]
    with relayed([[0], [1]]) as ranks:

        def run(comm: Any) -> list[bool]:
            peer = 1 - comm.rank
            xs = [
                np.full(n, i + 10 * comm.rank, np.uint8) for i, n in enumerate(lengths)
            ]
            outs = [np.zeros(n, np.uint8) for n in lengths]
            requests = [comm.send(x, dest=peer, nonblocking=True) for x in xs]
            requests += [comm.recv(o, source=peer, nonblocking=True) for o in outs]
            for request in requests:
                request.wait()
            return [bool((o == i + 10 * peer).all()) for i, o in enumerate(outs)]

        assert ranks.each(run) == [[True] * len(lengths)] * 2


@pytest.mark.parametrize("relayed", CARRIERS)
def test_what_nobody_receives_waits_at_its_sender(relayed: type[RelayRanks]) -> None:
    """A root that is far ahead fills no memory of who is behind."""
    count, turns = EAGER_NBYTES // 8, 3 * WINDOW_NBYTES // EAGER_NBYTES
    ahead = threading.Event()
    with relayed([[0], [1]]) as ranks:

        def run(comm: Any) -> int:
            if comm.rank == 1:
                assert ahead.wait(300)
                outs = [comm.bcast(np.zeros(count), root=0) for _ in range(turns)]
                return sum(bool((out == turn).all()) for turn, out in enumerate(outs))
            xs = [np.full(count, float(turn)) for turn in range(turns)]
            sent = [comm.bcast(x, root=0, nonblocking=True) for x in xs]
            ended = sum(request.test() for request in sent)
            ahead.set()
            for request in sent:
                request.wait()
            return ended

        ended, right = ranks.each(run)
        assert ended <= WINDOW_NBYTES // EAGER_NBYTES
        assert right == turns


@pytest.mark.parametrize("relayed", CARRIERS)
def test_a_longer_message_than_its_receive_is_an_error(
    relayed: type[RelayRanks],
) -> None:
    for count in (1000, 1_000_000):
        with relayed([[0], [1]]) as ranks:

            def run(comm: Any, count: int = count) -> str:
                x = np.zeros(count + comm.rank * 10)
                with pytest.raises(MismatchError) as raised:
                    comm.allreduce(x, algorithm="direct", params={"shots": 1})
                return str(raised.value)

            said = ranks.each(run)
            assert any("another length" in text for text in said)


@pytest.mark.parametrize("relayed", CARRIERS)
def test_who_is_missing_is_asked_on_other_nodes(relayed: type[RelayRanks]) -> None:
    with relayed([[0, 1], [2], [3]], timeout_s=0.3) as ranks:
        xs = [np.ones(5) for _ in range(4)]
        wanted = "rank 1 on this node has not started it; ranks 2, 3 elsewhere have not"
        with pytest.raises(TimeoutError_, match=wanted) as raised:
            ranks.comms[0].allreduce(xs[0])
        requests = [raised.value.request]  # type: ignore[attr-defined]
        for rank in (1, 3):
            requests.append(ranks.comms[rank].allreduce(xs[rank], nonblocking=True))
        missing = core_of(ranks.comms[0]).who_is_missing(0)
        assert missing == "rank 2 on another node has not started it"
        requests.append(ranks.comms[2].allreduce(xs[2], nonblocking=True))
        started = "all ranks have started it and one does not make progress"
        assert core_of(ranks.comms[0]).who_is_missing(0) == started
        while not all([request.test() for request in requests]):
            pass
        assert all(x.tolist() == [4.0] * 5 for x in xs)


@pytest.mark.parametrize("relayed", CARRIERS)
def test_the_table_has_what_ranks_of_other_nodes_do(relayed: type[RelayRanks]) -> None:
    with relayed([[0], [1], [2, 3]], timeout_s=300) as ranks:
        ranks.each(lambda comm: comm.barrier())
        first, second, third, _ = ranks.comms
        begun = [third.allreduce(np.ones(5), nonblocking=True)]

        def wait(comm: Any) -> None:
            if comm is second:
                comm.recv(np.empty(1), source=0, timeout_s=240)
            elif comm is first:
                # A rank says that it waits once it has waited for a moment.
                core = core_of(first)
                assert poll_until(lambda: bool(core.asked_elsewhere()[1].waits_s), 240)
                with pytest.raises(TimeoutError_) as raised:
                    comm.allreduce(np.ones(5), timeout_s=1)
                begun.append(raised.value.request)  # type: ignore[attr-defined]
                told.append((raised.value.ranks, str(raised.value)))
                comm.send(np.ones(1), 1)

        told: list[Any] = []
        ranks.each(wait)
        states, text = told[0]
        assert [one.state for one in states] == [
            *("waiting", "waiting", "computing", "computing")
        ]
        waits = states[1]
        assert (waits.waits_in, waits.waits_for, waits.waits_on) == ("recv", 0, "local")
        assert waits.waits_s > 0
        assert [(one.last, one.last_seq) for one in states[1:]] == [
            *(("barrier", 0), ("allreduce", 1), ("barrier", 0))
        ]
        assert all(one.age_s > 0 for one in states[1:])
        assert "rank 1: waiting for " in text
        assert "rank 3: computing; its last collective here was barrier #0" in text
        begun += [
            comm.allreduce(np.ones(5), nonblocking=True)
            for comm in (second, ranks.comms[3])
        ]
        while not all([request.test() for request in begun]):
            pass


@pytest.mark.parametrize("relayed", CARRIERS)
def test_a_lost_peer_ends_what_needs_it_and_nothing_else(
    relayed: type[RelayRanks],
) -> None:
    with relayed([[0], [1], [2]]) as ranks:
        pairs = ranks.each(lambda comm: comm.split(comm.rank % 2))
        first, _, third = ranks.comms
        out = np.zeros(3)
        waiting = first.recv(out, source=1, nonblocking=True)
        ranks.relays[0].native.lost(1, "gloo: Connection closed by peer")
        died = "rank 1 has died: process 101 on node1 has ended"
        with pytest.raises(PeerFailedError, match=died):
            waiting.wait()
        with pytest.raises(PeerFailedError, match=died):
            first.send(out, dest=1)
        missing = core_of(first).who_is_missing(0)
        assert "rank 1 elsewhere has ended, or cannot be reached" in missing
        x, y = np.ones(4), np.ones(4)
        other = pairs[2].allreduce(y, nonblocking=True)
        pairs[0].allreduce(x)
        other.wait()
        assert x.tolist() == y.tolist() == [2.0] * 4
        core_of(third).give_up("the test ends")


@pytest.mark.parametrize("relayed", CARRIERS)
def test_who_has_left_takes_no_more_messages(relayed: type[RelayRanks]) -> None:
    with relayed([[0], [1]]) as ranks:
        first, second = ranks.comms
        x = np.arange(3.0)
        sent = first.send(x, dest=1, nonblocking=True)
        ranks.relays[0].native.leave()
        while not core_of(second).who_died(0):
            pass
        out = np.zeros(3)
        second.recv(out, source=0)
        sent.wait()
        assert out.tolist() == [0, 1, 2]
        with pytest.raises(PeerFailedError, match="rank 0 has left"):
            second.send(out, dest=0, nonblocking=True).wait()


# -- long messages from memory to memory, and who sends what is left -----------------

LONG = EAGER_NBYTES + 7


def announced(ranks: RanksByHand, count: int) -> list[Any]:
    """Return requests of a long message whose receive is known to its sender soon."""
    first, second = ranks.comms
    x, out = np.full(count, 7, np.uint8), np.zeros(count, np.uint8)
    sent = first.send(x, dest=1, nonblocking=True)
    ranks.bring()
    received = second.recv(out, source=0, nonblocking=True)
    return [sent, received, out]


@pytest.mark.parametrize("end", ["wait", "test"])
def test_who_ends_a_wait_leaves_nothing_behind(
    end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that then waits elsewhere for who waits for these frames would hang."""
    monkeypatch.setenv("COMMRT_PROGRESS", "off")
    with RanksByHand([[0], [1]]) as ranks:
        first, second = ranks.comms
        sent, received, out = announced(ranks, LONG)
        answer = np.zeros(1)
        answered = first.recv(answer, source=1, tag=1, nonblocking=True)
        second.send(np.ones(1), dest=0, tag=1)
        ranks.bring()  # in one pass rank 0 gets the answer, and may send the long one
        assert not out.any()
        assert getattr(answered, end)() is not False
        assert (out == 7).all()
        ranks.bring()
        received.wait()
        sent.wait()


def test_long_messages_land_by_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are received in another order than they were sent, too."""
    monkeypatch.setenv("COMMRT_PROGRESS", "off")
    with RanksByHand([[0], [1]]) as ranks:
        first, second = ranks.comms
        lengths = (LONG, 3 * LONG, LONG + 1)
        xs = [np.full(n, 1 + i, np.uint8) for i, n in enumerate(lengths)]
        outs = [np.zeros(n + 5, np.uint8) for n in lengths]
        requests = [
            first.send(x, dest=1, tag=i, nonblocking=True) for i, x in enumerate(xs)
        ]
        ranks.bring()
        for i in (2, 0, 1):
            requests.append(second.recv(outs[i], source=0, tag=i, nonblocking=True))
        while not all([request.test() for request in requests]):
            ranks.bring()
        for x, out in zip(xs, outs, strict=True):
            assert out.tolist() == [*x.tolist(), 0, 0, 0, 0, 0]


@pytest.mark.parametrize("told", [False, True])
def test_a_peer_that_is_lost_before_a_long_message_has_come(
    told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COMMRT_PROGRESS", "off")
    with RanksByHand([[0], [1]]) as ranks:
        sent, received, _ = announced(ranks, LONG)
        if told:
            ranks.bring()
            assert not sent.test()
        for relay, peer in zip(ranks.relays, (1, 0), strict=True):
            relay.native.lost(peer, "gloo: No route to host")
        why = "cannot be reached: the connection to process .* failed: .*No route"
        with pytest.raises(PeerFailedError, match=f"rank 1 {why}"):
            sent.wait()
        with pytest.raises(PeerFailedError, match=f"rank 0 {why}"):
            received.wait()
