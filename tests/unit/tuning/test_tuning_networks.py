# SPDX-License-Identifier: Apache-2.0
"""Tables and recordings tell libraries and networks apart, however values vary."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tuning_recordings import RING, record

from commrt.select.facts import CommFacts
from commrt.select.fingerprint import Cpu, Machine
from commrt.select.network import Network
from commrt.select.rules import Evidence, Match, Point, Rule
from commrt.select.table import Table
from commrt.tuning.decide import decide
from commrt.tuning.measure import catalog
from commrt.tuning.merge import Input, merge
from commrt.tuning.merge_recordings import join
from commrt.tuning.recording_reader import parse_recording
from commrt.tuning.run import not_measured
from commrt.tuning.samples import Recording
from commrt.tuning.summary import describe_group
from commrt.tuning.table_writer import make_table

SEEN = Network("Open MPI 5", 0.49, 20.0)
AGAIN = Network("Open MPI 5", 0.47, 31.0)
OTHERS = [Network("MPICH 4", 0.49, 20.0), Network("Open MPI 5", 9.4, 20.0)]
FACTS = CommFacts(2, 2, 1, 2, "network", network=SEEN)
MACHINE = Machine(Cpu("cpu", 1, 2))


def launched(*networks: Network | None) -> Recording:
    """Return a run of which each launch has seen a network of its own."""
    made = record(seed=2, launches=len(networks), held_out=0, facts=FACTS)
    seen = [*made.launches.values()]
    made.launches.clear()
    for launch, network in zip(seen, networks, strict=True):
        made.begin(replace(launch, facts=replace(launch.facts, network=network)))
    return made


def rule(network: Network | None, launches: int = 3) -> Rule:
    where = Match(0, None, ranks=2, nodes=2, ppn=1, network=network)
    point = Point(8, 1.0, (0.9, 1.1), 9, launches)
    return Rule("allreduce", where, RING, Evidence("win", (point,)))


def test_launches_of_one_network_are_one_group() -> None:
    found = launched(SEEN, AGAIN, SEEN)
    [group] = found.groups()
    assert group.network == SEEN
    assert describe_group(group) == f"2 ranks on 2 nodes, network links ({SEEN})"
    assert {each.facts.network for each in found.launches.values()} == {SEEN}


@pytest.mark.parametrize("other", OTHERS)
def test_launches_of_two_networks_are_two_groups(other: Network) -> None:
    assert [each.network for each in launched(SEEN, other).groups()] == [SEEN, other]


@pytest.mark.parametrize("network", [SEEN, None])
def test_a_recording_keeps_its_network(network: Network | None) -> None:
    made = launched(network, network)
    assert parse_recording(made.to_json()).launches == made.launches


def test_joined_recordings_of_one_network_are_one_group() -> None:
    both = [("a", launched(SEEN, SEEN)), ("b", launched(AGAIN, AGAIN))]
    joined, _ = join(both, catalog())
    assert [each.network for each in joined.groups()] == [SEEN]


def test_a_table_says_on_which_network_it_was_measured() -> None:
    found = launched(SEEN, AGAIN, SEEN)
    table = make_table(
        decide(found, 0.04),
        MACHINE,
        software={},
        method={},
        tie_margin=0.04,
        date="2026-11-30",
    )
    assert {each.match.network for each in table.rules} == {SEEN}


def test_a_run_replaces_rules_of_its_own_network_only() -> None:
    rules = [rule(each) for each in (AGAIN, None, *OTHERS)]
    kept = not_measured(Table(MACHINE, tuple(rules)), launched(SEEN, SEEN), "cpu")
    assert [each.match.network for each in kept] == OTHERS


def test_merged_tables_have_one_cell_for_alike_networks() -> None:
    tables = [
        Input(name, table=Table(MACHINE, tuple(rule(n, launches) for n in networks)))
        for name, launches, networks in (
            ("a", 3, [SEEN]),
            ("b", 1, [AGAIN, OTHERS[0]]),
        )
    ]
    merged = merge(tables, catalog(), same_machine=False, date="2026-11-30")
    found = [each.match.network for each in merged.table.rules]
    assert (len(found), {*found}) == (2, {SEEN, OTHERS[0]})
