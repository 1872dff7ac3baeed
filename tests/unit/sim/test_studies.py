# SPDX-License-Identifier: Apache-2.0
"""Published studies that are repeated by simulation."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from commrt import algorithms
from commrt.errors import UsageError
from commrt.launch.mpiexec import Completed
from commrt.sim.cli import main
from commrt.sim.costs import Costs
from commrt.sim.network_files import load_network
from commrt.sim.simulate import simulate
from commrt.sim.studies import STUDIES, mcrdl
from commrt.sim.studies.bine import Pair, rows
from commrt.sim.studies.hybrid_switch import HybridSwitch, Ports, kept_circuits, play
from commrt.sim.studies.sparse import ALGORITHMS, Case, break_even, fill, times_us
from commrt.sim.topologies.crossbars import Star
from commrt.sim.topologies.network import Cable
from commrt.sim.traffic import Message, schedule_of_rounds

MIB = 1 << 20


@pytest.mark.parametrize("name", ["bine", "hybrid-switch", "sparse"])
def test_the_command_prints_a_study_and_says_that_it_is_simulated(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert name in STUDIES
    assert main(["study", name, "--quick"]) == 0
    first, *_, last = capsys.readouterr().out.splitlines()
    assert "simulated" in first
    assert len(last) > 20


@pytest.mark.parametrize("quick", [True, False])
def test_the_study_of_mixed_backends_runs_in_clusters(
    quick: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[list[str]] = []

    def ran(argv: list[str], environ: object, *, timeout_s: float) -> Completed:
        asked.append(argv)
        return Completed(tuple(argv), 0, "workload  mixed\n", "", False, 1.0)

    monkeypatch.setattr(mcrdl, "run_process", ran)
    assert main(["study", "mcrdl", *["--quick"] * quick]) == 0
    said = capsys.readouterr().out.splitlines()
    launchers = ["torchrun"] if quick else ["torchrun", "mpiexec"]
    assert [argv[argv.index("--launcher") + 1] for argv in asked] == launchers
    assert all("commrt.bench.mixed" in argv for argv in asked)
    assert "measured here, not simulated" in said[2]
    assert said.count("workload  mixed") == len(launchers)


def test_a_study_that_cannot_make_a_cluster_says_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failed = Completed(("x",), 2, "", "commrt cluster: it needs root", False, 1.0)
    monkeypatch.setattr(mcrdl, "run_process", lambda *_, **__: failed)
    assert main(["study", "mcrdl"]) == 2
    assert "it needs root" in capsys.readouterr().err


# -- messages of any lengths -----------------------------------------------------------


def test_rounds_follow_one_another_on_each_rank() -> None:
    shift = [Message(rank, (rank + 1) % 4, 1000) for rank in range(4)]
    network = Star(4, Cable(1.0, 2.0)).network()
    took = [
        simulate(schedule_of_rounds("ring", 4, [shift] * n), network, 0, itemsize=1)
        for n in (1, 3)
    ]
    # Each way has two cables: 4 us, and 1,000 bytes at 1,000 bytes per microsecond.
    assert [run.time_us for run in took] == pytest.approx([5.0, 15.0])


def test_a_rank_waits_for_its_own_messages_alone() -> None:
    rounds = [[Message(0, 1, 10_000)], [Message(2, 3, 1000)], [Message(1, 2, 1000)]]
    run = simulate(
        *(schedule_of_rounds("three", 4, rounds), Star(4, Cable(1.0, 0.0)).network()),
        0,
        itemsize=1,
    )
    begun = dict(
        zip(run.ranks_of(run.messages.send), run.messages.begun_us, strict=True)
    )
    assert (begun[0], begun[2], begun[1]) == pytest.approx((0.0, 0.0, 10.0))


def test_merging_is_charged_where_a_message_says_so() -> None:
    network = Star(2, Cable(1.0, 0.0)).network()
    times = [
        simulate(
            schedule_of_rounds("one", 2, [[Message(0, 1, 1000, reduces)]]),
            *(network, 0),
            itemsize=1,
            costs=Costs(reduce_us_per_byte=0.5),
        ).time_us
        for reduces in (False, True)
    ]
    assert times == pytest.approx([1.0, 501.0])


@pytest.mark.parametrize("message", [(0, 0, 1), (0, 4, 1), (-1, 0, 1), (0, 1, -1)])
def test_messages_that_cannot_be_are_refused(message: tuple[int, int, int]) -> None:
    with pytest.raises(UsageError, match="wrong: a message"):
        schedule_of_rounds("wrong", 4, [[Message(*message)]])


# -- Bine ------------------------------------------------------------------------------


def test_bytes_between_groups_are_those_of_the_trees_edges() -> None:
    pair = Pair("bcast", "binomial", (), (("form", "tree"),))
    ranks, hosts = 16, 4
    (row, other) = rows(pair, ranks, hosts)
    crossing = [
        (rank + place) // hosts != ((rank & (rank - 1)) + place) // hosts
        for place in range(4)
        for rank in range(1, ranks)
    ]
    assert row.root == "0"
    assert row.usual_nbytes == sum(crossing) / 4 * MIB
    assert other.root == "any"
    assert other.bine_nbytes < other.usual_nbytes


def test_butterflies_send_less_between_groups() -> None:
    (row,) = rows(Pair("allgather", "recursive_doubling"), 32, 8)
    assert row.root == "none"
    assert row.bine_nbytes < 0.3 * row.usual_nbytes
    assert row.bine_us < row.usual_us


# -- circuits --------------------------------------------------------------------------


def test_a_ring_keeps_its_circuits() -> None:
    size, nbytes = 8, 8 * MIB
    ring = algorithms.schedule("allreduce", "ring", size)
    switch = HybridSwitch()
    rounds = 2 * (size - 1)
    alone = play(ring, nbytes, HybridSwitch(circuit_rate=0.0), Ports(size))
    of_packet = switch.packet_us + MIB / switch.packet_rate
    assert alone.time_us == pytest.approx(rounds * of_packet)
    kept = play(ring, nbytes, switch, kept_circuits(ring, nbytes))
    of_circuit = switch.circuit_us + MIB / switch.circuit_rate
    assert kept.time_us == pytest.approx(rounds * of_circuit)
    assert (kept.changes, kept.circuit_part) == (0, 1.0)


def test_a_ring_sets_circuits_once_and_halving_in_every_step() -> None:
    size, nbytes = 16, 256 * MIB
    found = {}
    for name in ("ring", "halving_doubling"):
        one, ports = algorithms.schedule("allreduce", name, size), Ports(size)
        calls = [play(one, nbytes, HybridSwitch(), ports) for _ in range(3)]
        found[name] = [call.changes / size for call in calls]
    steps = 4
    assert found["ring"] == [1, 0, 0]
    # The last partner of a call is the first one of the next.
    assert found["halving_doubling"] == [2 * steps - 1, 2 * steps - 2, 2 * steps - 2]


def test_circuits_that_cost_more_than_they_bring_are_left_alone() -> None:
    ring = algorithms.schedule("allreduce", "ring", 8)
    slow = HybridSwitch(reconfigure_us=math.inf)
    assert play(ring, MIB, slow, Ports(8)).circuit_part == 0.0


def test_each_port_has_one_circuit(seed: int) -> None:
    rng, ports = random.Random(seed), Ports(6)
    for _ in range(200):
        source, target = rng.sample(range(6), 2)
        was = ports.to[source] == target
        assert ports.join(source, target) is not was
        pairs = {(a, b) for a, b in enumerate(ports.to) if b >= 0}
        assert pairs == {(a, b) for b, a in enumerate(ports.of) if a >= 0}
        assert (source, target) in pairs


# -- sparse vectors --------------------------------------------------------------------


def test_a_piece_is_dense_once_its_entries_take_as_much() -> None:
    assert fill(2, 0.5) == 0.75
    case = Case(8, 0.1)
    assert case.nbytes(1000, 1) == 800
    assert case.nbytes(1000, 8) == 4000
    assert Case(8, 0.5).nbytes(1000, 1) == 4000


def nbytes_of(name: str, case: Case) -> float:
    """Return the bytes that a rank sends on average."""
    messages = itertools.chain.from_iterable(ALGORITHMS[name](case))
    return sum(message.nbytes for message in messages) / case.ranks


def test_ranks_send_what_the_algorithms_formulas_say() -> None:
    case = Case(16, 1e-3, length=1 << 20)
    length = 4 * case.length
    sums = [1 << bit for bit in range(4)]
    assert nbytes_of("dense ring", case) == 2 * 15 / 16 * length
    inside, between = 2 * 3 / 4 * length, 2 * 3 / 4 * length / 4
    assert nbytes_of("dense two rings", case) == inside + between
    assert nbytes_of("recursive doubling", case) == sum(
        case.nbytes(case.length, each) for each in sums
    )
    part = case.length / 16
    assert nbytes_of("split", case) == 15 * (
        case.nbytes(part, 1) + case.nbytes(part, 16)
    )
    assert nbytes_of("split, dense", case) == 15 * (case.nbytes(part, 1) + 4 * part)
    full = Case(16, 1.0, length=1 << 20)
    assert nbytes_of("two rings", full) == nbytes_of("dense two rings", full)


def test_the_break_even_point_separates_quicker_from_slower() -> None:
    network, dense = load_network("abci").network, ["dense ring", "dense two rings"]
    name, density = break_even(8, network, dense)
    best = min(times_us(Case(8, 1.0), network, dense).values())
    sparse = [one for one in ALGORITHMS if one not in dense]
    assert times_us(Case(8, density), network, [name])[name] < best
    above = times_us(Case(8, 1.05 * density), network, sparse)
    assert min(above.values()) >= best
