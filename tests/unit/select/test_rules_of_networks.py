# SPDX-License-Identifier: Apache-2.0
"""Rules between nodes hold for the library and the network that were measured."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from stated_offers import StatedOffers

from commrt.select.facts import Candidate, CommFacts, Query
from commrt.select.fingerprint import Cpu, Machine
from commrt.select.network import NO_LIBRARY, Network, library_of
from commrt.select.policy import Policy
from commrt.select.rules import Match, Rule
from commrt.select.table import Table

SEEN = Network("Open MPI 5", 0.49, 20.0)
RING, DIRECT = Candidate("tcp", "ring"), Candidate("tcp", "direct")
QUERY = Query("allreduce", 1 << 20, op="sum")
FACTS = CommFacts(2, 2, 1, 2, "network")


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("Open MPI v5.0.11", "Open MPI 5"),
        ("MPICH 4.3.2", "MPICH 4"),
        ("Intel(R) MPI Library 2021.17 for Linux* OS", "Intel(R) MPI Library 2021"),
        ("MVAPICH Version 3.0", "MVAPICH Version 3"),
        ("some MPI", "some MPI"),
        ("", NO_LIBRARY),
    ],
)
def test_a_library_is_known_by_its_first_version_number(text: str, name: str) -> None:
    assert library_of(text) == name


@pytest.mark.parametrize(
    ("other", "is_like"),
    [
        (SEEN, True),
        (replace(SEEN, gbps=0.3), True),
        (replace(SEEN, gbps=0.9, latency_us=90.0), True),
        (replace(SEEN, gbps=0.2), False),
        (replace(SEEN, gbps=9.4), False),
        (replace(SEEN, latency_us=150.0), False),
        (replace(SEEN, latency_us=3.0), False),
        (replace(SEEN, library="Open MPI 4"), False),
        (replace(SEEN, library=NO_LIBRARY), False),
    ],
)
def test_networks_are_compared_with_tolerance(other: Network, is_like: bool) -> None:
    assert SEEN.is_like(other) == other.is_like(SEEN) == is_like
    assert (SEEN.distance(other) == 0) == (other == SEEN)


def test_measured_values_are_rounded_and_never_nothing() -> None:
    made = Network.measured("MPICH 4", 21.4567, 1.6e-2)
    assert made == Network("MPICH 4", 0.5, 21.5)
    assert str(made) == "MPICH 4, 0.5 Gbit/s, 21.5 µs"
    least = Network.measured(NO_LIBRARY, 0.0, 0.0)
    assert least.latency_us > 0
    assert math.isfinite(least.gbps)
    assert str(least).startswith("no MPI, ")


def policy(network: Network | None, *seen: Network | None) -> Policy:
    """Return that of ranks with a table of one rule for each network of ``seen``."""
    rules = [
        Rule("allreduce", Match(0, None, ranks=2, nodes=2, network=each), use)
        for each, use in zip(seen, (RING, DIRECT), strict=False)
    ]
    table = Table(Machine(Cpu("cpu", 1, 2)), tuple(rules))
    costs = {"tcp/ring": 2.0, "tcp/direct": 1.0}
    offers = StatedOffers((DIRECT, RING), lambda query, one: costs[one.name])
    return Policy(replace(FACTS, network=network), table, offers)


def test_a_rule_holds_on_a_network_that_is_like_its_own() -> None:
    found = policy(replace(SEEN, gbps=0.6), SEEN).choose(QUERY)
    assert (found.source, found.candidate) == ("table", RING)


@pytest.mark.parametrize(
    "here", [replace(SEEN, library="MPICH 4"), replace(SEEN, gbps=9.4)]
)
def test_elsewhere_the_model_decides_and_says_why(here: Network) -> None:
    found = policy(here, SEEN).choose(QUERY)
    assert (found.source, found.candidate) == ("model", DIRECT)
    assert f"the table's rule is for {SEEN}, and here is {here}" in found.reason
    assert str(here) in str(policy(here, SEEN).explain(QUERY))


def test_a_rule_without_a_network_holds_on_any() -> None:
    assert policy(SEEN, None).choose(QUERY).candidate == RING


def test_a_rule_with_a_network_holds_on_no_single_node() -> None:
    found = policy(None, SEEN)
    alone = replace(FACTS, nodes=1, ppn=2, link_class="near")
    rule = replace(found.table.rules[0], match=Match(0, None, network=SEEN))  # type: ignore[union-attr]
    table = Table(Machine(Cpu("cpu", 1, 2)), (rule,))
    assert table.lookup(FACTS, QUERY) is not None
    assert table.lookup(alone, QUERY) is None


def test_the_nearer_network_is_taken_and_before_any() -> None:
    near, far = replace(SEEN, gbps=0.5), replace(SEEN, gbps=0.8)
    assert policy(SEEN, far, near).choose(QUERY).candidate == DIRECT
    assert policy(SEEN, near, far).choose(QUERY).candidate == RING
    assert policy(SEEN, None, far).choose(QUERY).candidate == DIRECT


def test_what_is_not_measured_yet_may_be_any_network() -> None:
    """So a backend learns beforehand what a table could ask for."""
    asked = policy(None, SEEN)
    assert asked.table is not None
    assert asked.table.applies_to(asked.facts)
    other = replace(asked.facts, network=replace(SEEN, gbps=40.0))
    assert not asked.table.applies_to(other)
