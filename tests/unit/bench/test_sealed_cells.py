# SPDX-License-Identifier: Apache-2.0
"""The cells of sealed predictions, their networks, and the rules they are held to."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from commrt import algorithms
from commrt.bench.sealed.cells import Cell, cells, fitting_cells, runners
from commrt.bench.sealed.networks import (
    FITTED_ON,
    NETWORKS,
    Numbers,
    one_switch,
    simulated,
)
from commrt.bench.sealed.openmpi_rules import fixed_rule
from commrt.bench.sealed.predicting import (
    OPENMPI,
    SIMULATOR,
    TWO_NUMBERS,
    fitted,
    predicted,
    simulator,
    two_numbers,
)
from commrt.cluster.routes import path
from commrt.errors import UsageError
from commrt.schedule.ir import full_multiple
from commrt.sim.simulate import simulate

FULL = {
    "share": 0.9,
    "latency_us": 12.0,
    "send_overhead_us": 4.0,
    "receive_overhead_us": 7.0,
    "reduce_us_per_byte": 5e-4,
}
TWO = {"share": 0.9, "latency_us": 30.0}


def test_no_cell_is_one_that_shapes_the_numbers() -> None:
    known, fitting = cells(), fitting_cells()
    assert len({cell.key for cell in known}) == len(known) >= 500
    assert not {*NETWORKS} & {*FITTED_ON}
    assert not {cell.nbytes for cell in known} & {cell.nbytes for cell in fitting}


def test_vectors_are_such_that_ranks_can_share_them() -> None:
    for cell in (*cells(), *fitting_cells()):
        unit = full_multiple(cell.op, cell.ranks)
        assert cell.num_elements % unit == 0
        assert 0 <= cell.nbytes - 4 * cell.num_elements < 4 * unit


def test_several_algorithms_run_each_cell() -> None:
    for op, network in itertools.product(("bcast", "alltoall"), ("star-3", "loop-4")):
        names = [str(one) for one, _ in runners(Cell(network, op, 8192))]
        assert len({*names}) == len(names) >= 2


@pytest.mark.parametrize("name", [*NETWORKS, *FITTED_ON])
def test_simulated_links_are_those_of_the_cluster(name: str) -> None:
    topology = {**FITTED_ON, **NETWORKS}[name]
    network = simulated(topology, Numbers(FULL))
    hosts = topology.hosts
    for source, target in itertools.permutations(range(len(hosts)), 2):
        links = path(topology, hosts[source], hosts[target])
        way = network.way(source, target)
        assert len(way) == len(links)
        here = hosts[source]
        for link, number in zip(links, way, strict=True):
            assert link.rate is not None
            assert network.links.shared_rate[number] == pytest.approx(
                link.rate / 8e6 * FULL["share"]
            )
            assert network.node_name(int(network.links.tails[number])) == here
            here = network.node_name(int(network.links.heads[number]))
        assert here == hosts[target]
        assert network.links.latency_us[way[0]] == FULL["latency_us"] / 2
        for link, number in list(zip(links, way, strict=True))[1:]:
            assert link.rate is not None  # a switch waits for a whole packet
            assert network.links.latency_us[number] == pytest.approx(
                FULL["latency_us"] / 2 + 1514 * 8e6 / link.rate
            )


def test_a_star_is_what_the_model_without_a_network_knows() -> None:
    numbers, schedule = Numbers(FULL), algorithms.schedule("allreduce", "ring", 5)
    topology = NETWORKS["star-5"]
    costs = replace(numbers.costs, burst_nbytes=0.0)
    both = [
        simulate(schedule, made(topology, numbers), 40_000, costs=costs)
        for made in (simulated, one_switch)
    ]
    # Eight rounds, in each of which the switch waits for a packet of 1514 bytes.
    waits_us = 8 * 1514 / 12.5
    assert both[0].time_us == pytest.approx(both[1].time_us + waits_us, rel=1e-9)


@pytest.mark.parametrize(
    ("op", "nbytes", "ranks", "expected"),
    [
        ("allreduce", 8191, 4, "recursive_doubling"),
        ("allreduce", 8192, 4, "halving_doubling"),
        ("allreduce", 65_536, 3, "ring"),
        ("allreduce", 262_144, 3, "halving_doubling"),
        ("bcast", 8191, 5, "binomial"),
        ("bcast", 1_048_575, 5, "direct"),
        ("bcast", 1_048_576, 7, "chain"),
        ("bcast", 1_048_576, 8, "direct"),
        ("reduce", 65_535, 4, "chain"),
        ("reduce", 1_048_576, 8, "binomial"),
        ("allgather", 1_048_576, 8, "recursive_doubling"),
        ("allgather", 1_048_576, 6, "dissemination"),
        ("alltoall", 524_288 * 4, 4, "pairwise"),
        ("alltoall", 524_288 * 8, 8, "direct"),
        ("reduce_scatter", 8192, 6, "halving_doubling"),
    ],
)
def test_open_mpis_rules(op: str, nbytes: int, ranks: int, expected: str) -> None:
    assert fixed_rule(op, nbytes, ranks) == expected


@pytest.mark.parametrize(("op", "ranks"), [("scan", 4), ("bcast", 2), ("bcast", 16)])
def test_a_rule_that_is_not_there_is_an_error(op: str, ranks: int) -> None:
    with pytest.raises(UsageError, match=f"fixed_rule: {op} on {ranks} ranks"):
        fixed_rule(op, 8192, ranks)


@pytest.mark.full(sample=20)
@pytest.mark.parametrize("cell", cells(), ids=lambda cell: cell.key)
def test_every_cell_has_three_winners(cell: Cell) -> None:
    row = predicted([cell], Numbers(FULL), Numbers(TWO))[cell.key]
    names = {str(one) for one, _ in runners(cell)}
    assert {*row["winners"]} == {SIMULATOR, TWO_NUMBERS, OPENMPI}
    assert {*row["winners"].values()} <= names
    for who, times in row["us"].items():
        assert {*times} == names
        assert times[row["winners"][who]] == min(times.values()) > 0


@pytest.mark.parametrize("full", [True, False])
def test_a_fit_finds_the_numbers_that_made_the_times(full: bool) -> None:
    truth = Numbers(FULL if full else TWO)
    model = simulator() if full else two_numbers
    known = [cell for cell in fitting_cells() if cell.op in ("allreduce", "bcast")]
    times = {
        cell.key: {
            str(one): [model(cell, schedule, truth)] for one, schedule in runners(cell)
        }
        for cell in known
    }
    found = fitted(known, times, model, full=full)
    assert found.values["share"] == pytest.approx(0.9, rel=0.02)
    for cell in known:
        for one, schedule in runners(cell):
            (us,) = times[cell.key][str(one)]
            assert model(cell, schedule, found) == pytest.approx(us, rel=0.05)
