# SPDX-License-Identifier: Apache-2.0
"""Latencies of a cluster's links: as people write them, and as they are wired."""

from __future__ import annotations

from pathlib import Path

import pytest

from commrt.cluster.latency import latency_text, parse_latency
from commrt.cluster.measure import Found
from commrt.cluster.relay import Cut
from commrt.cluster.topology import fat_tree, star, with_latency
from commrt.cluster.topology_file import read_topology
from commrt.cluster.wiring import Wiring
from commrt.errors import UsageError

MBIT = 1_000_000
NETWORK = """\
hosts: [a, b]
switches: [s]
links:
  - {ends: [a, s], rate: 500mbit, latency: 1.5ms}
  - {ends: [s, b]}
"""


@pytest.mark.parametrize(
    ("text", "latency_us"),
    [("200us", 200), ("1.5ms", 1500), ("100ms", 100_000), ("50us", 50), ("none", 0)],
)
def test_latencies_are_read_and_written(text: str, latency_us: int) -> None:
    assert parse_latency(text) == latency_us
    assert parse_latency(latency_text(latency_us)) == latency_us


@pytest.mark.parametrize("text", ["0us", "49us", "101ms", "0.001us"])
def test_a_latency_that_cannot_be_kept_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="cannot be kept: choose one from 50us to"):
        parse_latency(text)


@pytest.mark.parametrize("text", ["", "200", "1s", "-1us", "1e3us", "soon"])
def test_a_latency_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="expected a number and us or ms"):
        parse_latency(text)


@pytest.mark.parametrize("rate", [None, 1001 * MBIT, 100_000 * MBIT])
def test_a_link_that_a_relay_cannot_keep_up_with_is_refused(rate: int | None) -> None:
    with pytest.raises(UsageError, match=r"h1-s1 .* a rate of at most 1gbit"):
        with_latency(star(2, rate), 200)


def test_a_fat_trees_upper_links_are_checked_too() -> None:
    tree = fat_tree(4, 1000 * MBIT, per_switch=4, spines=1)
    with pytest.raises(UsageError, match="link s1-spine1 has a latency"):
        with_latency(tree, 200)


def test_a_file_has_latencies(tmp_path: Path) -> None:
    file = tmp_path / "network.yaml"
    file.write_text(NETWORK)
    assert [link.latency_us for link in read_topology(file).links] == [1500, 0]


def test_only_links_with_a_latency_are_cut(tmp_path: Path) -> None:
    file = tmp_path / "network.yaml"
    file.write_text(NETWORK)
    wiring = Wiring(read_topology(file), 9000)
    assert wiring.cuts() == [Cut(("c0a", "c0b"), 1500)]
    cables = "\n".join(wiring.cables({"a": "/ns/a", "b": "/ns/b"}))
    host, port = "c0a mtu 9000 type veth peer name eth0", "peer name p0b mtu 9000"
    assert host in cables
    assert f"c0b mtu 9000 type veth {port}" in cables
    assert "add name p1a mtu 9000 type veth peer name eth0" in cables
    assert Wiring(star(3), 9000).cuts() == []


def test_a_round_trip_that_was_asked_for_is_printed() -> None:
    found = Found(("h1", "h2"), 500 * MBIT, 1.0, 497e6, 800, 873.4, 0.5)
    assert found.line().split()[-3:] == ["800", "873", "50%"]
