# SPDX-License-Identifier: Apache-2.0
"""Each cost of a message adds what its formula says."""

from __future__ import annotations

import numpy as np
import pytest

from commrt.errors import ScheduleError, UsageError
from commrt.schedule.builder import Builder, build_program
from commrt.schedule.ir import RankProgram, Schedule
from commrt.sim.costs import Costs
from commrt.sim.simulate import simulate
from commrt.sim.topologies.crossbars import Full, Star
from commrt.sim.topologies.network import Cable

# One message of 10,000 bytes takes 10 us, after 2 us on its way.
CABLE = Cable(1.0, 2.0)
NBYTES = 10_000


def schedule_of(author: object, size: int, coll: str = "allreduce") -> Schedule:
    def make(rank: int) -> RankProgram:
        return build_program(author, coll, rank, size)  # type: ignore[arg-type]

    return Schedule(coll, "by_hand", size, 0, make)


def one_message(b: Builder) -> None:
    """Rank 0 sends all, rank 1 adds it to its own."""
    b.blocks(1)
    if b.rank == 0:
        b.send(b.inp[0], 1)
    else:
        b.rred(b.out[0], 0, src=b.inp[0])


def time_us(costs: Costs, author: object = one_message, size: int = 2) -> float:
    network = Full(size, CABLE).network()
    return simulate(schedule_of(author, size), network, NBYTES, costs=costs).time_us


@pytest.mark.parametrize(
    ("costs", "expected_us"),
    [
        (Costs(), 12),
        (Costs(send_overhead_us=1), 13),
        (Costs(receive_overhead_us=3), 15),
        (Costs(reduce_us_per_byte=0.001), 22),
        (Costs(copy_us_per_byte=0.001), 12),
        (Costs(eager_nbytes=0), 12),
        # A request and an answer, 2 us each.
        (Costs(eager_nbytes=0, handshake=True), 16),
        (Costs(eager_nbytes=NBYTES, handshake=True), 12),
        (Costs(eager_nbytes=NBYTES - 1, handshake=True), 16),
        (Costs(local_latency_us=9, local_gbytes_per_s=0.1), 12),
        (Costs(contention_penalty=1), 12),
        # A link that rested passes 3,000 bytes at once, and all of a shorter message.
        (Costs(burst_nbytes=3000), 9),
        (Costs(burst_nbytes=3000, queued_nbytes=NBYTES), 9),
        (Costs(burst_nbytes=20_000), 2),
        (Costs(burst_nbytes=20_000, queued_nbytes=NBYTES), 2),
    ],
)
def test_one_message_takes_its_latency_its_bytes_and_its_costs(
    costs: Costs, expected_us: float
) -> None:
    assert time_us(costs) == pytest.approx(expected_us, rel=1e-12)


def late_receiver(b: Builder) -> None:
    """Rank 1 receives only when it has copied for 20 us; rank 0 sends twice."""
    b.blocks(2)
    if b.rank == 0:
        first = b.send(b.inp[0], 1)
        b.after(first)
        b.send(b.inp[1], 1)
    else:
        copied = b.copy(b.out[:], b.inp[:])
        b.after(copied)
        b.recv(b.out[0], 0)
        b.recv(b.out[1], 0)


def test_rendezvous_waits_for_its_receive_and_eager_messages_do_not() -> None:
    """Eager: 2 + 5 + 5 us, received at 20 us. Else 20 + 2 + 5 us, twice 2 + 5."""
    copies = {"copy_us_per_byte": 0.002}
    assert time_us(Costs(**copies), late_receiver) == pytest.approx(20)  # type: ignore[arg-type]
    rendezvous = Costs(eager_nbytes=0, **copies)  # type: ignore[arg-type]
    assert time_us(rendezvous, late_receiver) == pytest.approx(20 + 7 + 7)


def twice(b: Builder) -> None:
    """Rank 0 sends half, copies, and sends the rest when it has copied."""
    b.blocks(2)
    if b.rank == 0:
        first = b.send(b.inp[0], 1)
        b.after(first)
        copied = b.copy(b.out[:], b.inp[:])
        b.after(copied)
        b.send(b.inp[1], 1)
    else:
        b.recv(b.out[0], 0)
        b.recv(b.out[1], 0)


@pytest.mark.parametrize("queued", [0, NBYTES])
@pytest.mark.parametrize(
    ("copies_us", "rest_us"), [(0, 3), (0.5, 2.5), (1, 2), (60, 2)]
)
def test_a_bucket_fills_while_its_link_rests(
    queued: int, copies_us: float, rest_us: float
) -> None:
    """Of the first 5,000 bytes 3,000 pass at once. The link rests for 2 us and more."""
    costs = Costs(
        burst_nbytes=3000,
        copy_us_per_byte=copies_us / NBYTES,
        eager_nbytes=0,
        queued_nbytes=queued,
    )
    # Sent and received at 4 us; the second one flows at 6 us, and after the copy.
    assert time_us(costs, twice) == pytest.approx(4 + copies_us + 2 + rest_us)


def to_one(b: Builder) -> None:
    """All others send to rank 0, which adds."""
    b.blocks(1)
    if b.rank:
        b.send(b.inp[0], 0)
    else:
        b.copy(b.out[0], b.inp[0])
        for peer in range(1, b.size):
            b.rred(b.out[0], peer)


@pytest.mark.parametrize("senders", [1, 2, 5])
@pytest.mark.parametrize("penalty", [0.0, 0.5, 3.0])
def test_a_shared_link_loses_what_the_penalty_says(
    senders: int, penalty: float
) -> None:
    network = Star(senders + 1, CABLE).network()
    run = simulate(
        schedule_of(to_one, senders + 1),
        *(network, NBYTES),
        costs=Costs(contention_penalty=penalty),
    )
    loss = 1 + penalty * (1 - 1 / senders)
    assert run.time_us == pytest.approx(4 + 10 * senders * loss, rel=1e-12)
    assert run.messages.sharers.tolist() == [senders] * senders


@pytest.mark.parametrize("senders", [1, 4])
def test_a_core_does_one_thing_after_the_other(senders: int) -> None:
    """Messages arrive together; each is then received, which takes 3 us."""
    costs = Costs(receive_overhead_us=3, send_overhead_us=1)
    network = Full(senders + 1, CABLE).network()
    run = simulate(schedule_of(to_one, senders + 1), network, NBYTES, costs=costs)
    assert run.time_us == pytest.approx(1 + 12 + 3 * senders, rel=1e-12)


def test_ranks_of_one_host_talk_at_its_own_rate() -> None:
    costs = Costs(local_latency_us=1, local_gbytes_per_s=2)
    network = Star(2, CABLE).network()
    hosts = np.array([1, 1])
    run = simulate(schedule_of(one_message, 2), network, NBYTES, hosts, costs=costs)
    assert run.time_us == pytest.approx(1 + 5, rel=1e-12)
    assert not run.links.nbytes.any()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("send_overhead_us", -1),
        ("reduce_us_per_byte", float("nan")),
        ("contention_penalty", float("inf")),
        ("eager_nbytes", -5),
        ("local_gbytes_per_s", 0),
    ],
)
def test_costs_that_no_machine_has_are_refused(name: str, value: float) -> None:
    with pytest.raises(UsageError, match=name):
        Costs(**{name: value})  # type: ignore[arg-type]


def both_receive_first(b: Builder) -> None:
    """Each rank sends only after it has received."""
    b.blocks(1)
    received = b.recv(b.out[0], b.rank + 1)
    b.after(received)
    b.send(b.inp[0], b.rank + 1)


def test_a_schedule_that_stops_is_an_error_with_the_circle() -> None:
    with pytest.raises(ScheduleError, match=r"deadlock.*rank 0 step 0"):
        time_us(Costs(), both_receive_first)


def one_too_many(b: Builder) -> None:
    """Nobody receives what rank 0 sends."""
    b.blocks(1)
    if b.rank == 0:
        b.send(b.inp[0], 1)


def test_a_message_without_a_receive_is_an_error() -> None:
    with pytest.raises(ScheduleError, match="rank 0 sends 1 messages to rank 1"):
        time_us(Costs(), one_too_many)


@pytest.mark.parametrize("nbytes", [-4, 6])
def test_bytes_that_are_no_elements_are_refused(nbytes: int) -> None:
    network = Full(2, CABLE).network()
    with pytest.raises(UsageError, match="expected a multiple of 4"):
        simulate(schedule_of(one_message, 2), network, nbytes)
