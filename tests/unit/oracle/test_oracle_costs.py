# SPDX-License-Identifier: Apache-2.0
"""Costs of transfers: measured, modelled, simulated; groups that share links."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from commrt.backends.catalog import catalog
from commrt.errors import UsageError
from commrt.oracle import AlphaBeta
from commrt.oracle.contention import link_audit
from commrt.oracle.costs import (
    MeasuredCosts,
    ModelledCosts,
    SimulatedCosts,
    interpolated_s,
    tabled_costs,
)
from commrt.oracle.transfers import COLLECTIVES, MESSAGE, Group, Transfer
from commrt.select.table import load_file
from commrt.sim.network_files import load_network
from commrt.sim.placements import place
from commrt.sim.topologies.network import Network

SHIPPED = Path(__file__).parents[3] / "tables" / "amd-epyc-2-cores.yaml"
FOUR = Group("data", 4, 1, 4)


def transfer(coll: str, nbytes: float, group: Group = FOUR) -> Transfer:
    return Transfer(coll, group, nbytes, 1, "test")


def star(hosts: int) -> Network:
    return load_network(f"star:hosts={hosts},rate=8gbit,latency=1us").network


# -- groups ----------------------------------------------------------------------------


@given(st.integers(1, 5), st.integers(1, 5), st.integers(1, 4))
def test_groups_have_each_rank_once(ranks: int, stride: int, spans: int) -> None:
    group = Group("any", ranks, stride, ranks * stride * spans)
    members = group.members
    assert sorted(r for each in members for r in each) == [*range(group.world)]
    assert {len(each) for each in members} == {ranks}
    for each in members:
        assert {*np.diff(each).tolist()} <= {stride}


def test_sent_bytes_are_those_of_rings() -> None:
    sent = {coll: transfer(coll, 400).sent_nbytes for coll in COLLECTIVES}
    assert sent == {
        "allreduce": 600,
        "allgather": 300,
        "reduce_scatter": 300,
        "alltoall": 300,
        MESSAGE: 400,
    }


@pytest.mark.parametrize(
    ("numbers", "problem"),
    [
        ((-1.0, 0.0), "alpha_s is -1.0"),
        ((0.0, float("nan")), "beta_s is nan"),
        ((0.0, 0.0, {"data": 0.5}), "contention of data is 0.5"),
    ],
)
def test_costs_without_sense_are_refused(numbers: tuple[float], problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        AlphaBeta(*numbers)


# -- measured --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nbytes", "seconds"),
    [(0, 1.0), (10, 1.0), (15, 1.5), (20, 2.0), (30, 5.0), (40, 8.0)],
)
def test_times_lie_on_lines_between_points(nbytes: float, seconds: float) -> None:
    points = ((10, 1.0), (20, 2.0), (30, 5.0))
    assert interpolated_s(points, nbytes) == pytest.approx(seconds)


def test_a_byte_beyond_the_last_point_never_costs_less_than_none() -> None:
    assert interpolated_s(((10, 2.0), (20, 1.0)), 1000) == 1.0
    assert interpolated_s(((10, 2.0),), 1000) == 2.0


def test_ranks_that_lie_in_another_way_are_the_next_best() -> None:
    points = {("allreduce", 4, 1): ((8, 1.0),), ("allreduce", 4, 8): ((8, 3.0),)}
    costs = MeasuredCosts(points, "somebody")
    far = Group("data", 4, 6, 24)
    assert costs.seconds(transfer("allreduce", 8, far)) == 3.0
    assert costs.seconds(transfer("allreduce", 8)) == 1.0


def test_what_nobody_measured_is_an_error_with_what_there_is() -> None:
    costs = MeasuredCosts({("allreduce", 2, 1): ((8, 1.0),)}, "somebody")
    with pytest.raises(UsageError, match="no times of alltoall on 4 ranks; there are "
                       "allreduce on 2"):  # fmt: skip
        costs.seconds(transfer("alltoall", 8))


@pytest.mark.parametrize(
    "points",
    [{}, {("allreduce", 2, 1): ()}, {("sum", 2, 1): ((8, 1.0),)}]
    + [
        {("allreduce", 2, 1): pairs}
        for pairs in (((8, 0.0),), ((8, 1.0), (4, 1.0)), ((-8, 1.0),))
    ],
)
def test_measured_times_without_sense_are_refused(
    points: dict[tuple[str, int, int], tuple[tuple[int, float], ...]],
) -> None:
    with pytest.raises(UsageError, match="somebody"):
        MeasuredCosts(points, "somebody")


def test_a_selection_table_has_measured_times() -> None:
    table = load_file(SHIPPED, catalog())
    costs = tabled_costs(table, SHIPPED.name)
    rule = next(
        rule
        for rule in table.rules
        if rule.op == "allreduce" and rule.match.ranks == 2 and rule.evidence
    )
    assert rule.evidence is not None
    point = rule.evidence.points[0]
    took = costs.seconds(transfer("allreduce", point.nbytes, Group("data", 2, 1, 2)))
    # Another rule, of another state of the machine, may have been faster.
    assert 0 < took <= point.us * 1e-6 * (1 + 1e-9)
    assert "measured by commrt-tune" in costs.origin


# -- modelled --------------------------------------------------------------------------


@pytest.mark.parametrize("coll", COLLECTIVES)
@pytest.mark.parametrize("link_class", ["near", "network"])
def test_the_model_costs_more_for_more_bytes(coll: str, link_class: str) -> None:
    costs = ModelledCosts(link_class)  # type: ignore[arg-type]
    times = [costs.seconds(transfer(coll, n)) for n in (16, 1 << 16, 1 << 22)]
    assert 0 < times[0] < times[1] < times[2]
    assert "projected" in costs.origin


# -- simulated -------------------------------------------------------------------------


def test_a_simulated_ring_costs_what_the_formula_says() -> None:
    network = star(4)
    costs = SimulatedCosts(network, place(network, 4), names=("ring",))
    # Two cables of a microsecond, and 1000 bytes a microsecond each way.
    formula = AlphaBeta(2e-6, 1e-9)
    for coll in ("allreduce", "allgather", "reduce_scatter"):
        for nbytes in (1 << 20, 3 << 20):
            one = transfer(coll, nbytes)
            assert costs.seconds(one) == pytest.approx(formula.seconds(one), rel=1e-6)
    assert costs.seconds(transfer(MESSAGE, 1 << 20)) == pytest.approx(
        2e-6 + (1 << 20) * 1e-9
    )
    assert "simulated" in costs.origin


def test_the_fastest_algorithm_counts() -> None:
    network = star(8)
    hosts = place(network, 8)
    group = Group("data", 8, 1, 8)
    best = SimulatedCosts(network, hosts)
    for name in ("ring", "recursive_doubling"):
        one = SimulatedCosts(network, hosts, names=(name,))
        for nbytes in (32, 1 << 20):
            asked = transfer("allreduce", nbytes, group)
            assert best.seconds(asked) <= one.seconds(asked) * (1 + 1e-9)


def test_groups_on_a_star_do_not_hinder_each_other() -> None:
    network = star(8)
    costs = SimulatedCosts(network, place(network, 8))
    for group in (Group("a", 4, 1, 8), Group("a", 4, 2, 8), Group("a", 2, 4, 8)):
        assert costs.audit("allreduce", group).penalty == 1
    assert str(costs.audit("allreduce", Group("a", 4, 1, 8))).startswith("no link")


def test_groups_behind_one_cable_share_it() -> None:
    text = "fat_tree:down=4x2,up=1x1,rate=8gbit,latency=1us"
    network = load_network(text).network
    hosts = place(network, 8)
    costs = SimulatedCosts(network, hosts, names=("ring",))
    alone = SimulatedCosts(network, hosts, names=("ring",), audits=False)
    # Four pairs, each with a rank on either side of the one cable between switches.
    across = Group("data", 2, 4, 8)
    audit = costs.audit("allreduce", across)
    assert (audit.penalty, audit.groups) == (4, 4)
    assert "4 groups share the link" in str(audit)
    one = transfer("allreduce", 1 << 20, across)
    least = transfer("allreduce", 1, across)
    # Links cost bytes more time, and latencies none.
    assert costs.seconds(least) == pytest.approx(alone.seconds(least))
    bytes_alone = alone.seconds(one) - alone.seconds(least)
    assert costs.seconds(one) - costs.seconds(least) == pytest.approx(4 * bytes_alone)
    # Pairs of neighbours have no link in common.
    assert costs.audit("allreduce", Group("filter", 2, 1, 8)).penalty == 1


def test_two_groups_share_an_adapter_of_abci() -> None:
    """ParaDL's penalty of 2: a node has four GPUs and two adapters."""
    network = load_network("abci").network
    costs = SimulatedCosts(network, place(network, 32))
    audit = costs.audit("allreduce", Group("data", 8, 4, 32))
    assert (audit.penalty, audit.groups) == (2, 2)
    assert "nic" in audit.link


def test_a_link_that_a_group_does_not_use_does_not_hold_it_back() -> None:
    network = star(6)
    one = np.array([0]), np.array([1]), np.array([8.0])
    # Two groups send to host 1; the third one is alone.
    shared = link_audit(network, place(network, 6), [[0, 1], [2, 1]], *one)
    assert (shared.penalty, shared.groups) == (2, 2)
    groups = [[0, 1], [2, 3], [4, 5]]
    assert link_audit(network, place(network, 6), groups, *one).penalty == 1
    # A group's own slowest link counts, not one of others that is slower still.
    text = "hosts: [a, b, c, d]\nswitches: [s, t]\nlinks:\n"
    for ends, rate in (("a, s", 8), ("b, s", 8), ("s, t", 1), ("c, t", 1), ("d, t", 1)):
        text += f"  - {{ends: [{ends}], rate: {rate}GB/s}}\n"
    apart = network_of(text)
    assert link_audit(apart, place(apart, 4), [[0, 1], [2, 3]], *one).penalty == 1


def network_of(text: str) -> Network:
    """Return the network of a file with this text."""
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(text)
        file.flush()
        return load_network(file.name).network


def test_an_audit_without_messages_finds_nothing() -> None:
    network = star(2)
    none = np.empty(0, np.int64)
    found = link_audit(network, place(network, 2), [[0], [1]], none, none, none * 1.0)
    assert found.penalty == 1


def test_more_ranks_than_hosts_are_refused() -> None:
    network = star(4)
    costs = SimulatedCosts(network, place(network, 4))
    with pytest.raises(UsageError, match="hosts of 4 ranks for a job of 8"):
        costs.seconds(transfer("allreduce", 8, Group("data", 8, 1, 8)))
