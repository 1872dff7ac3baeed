# SPDX-License-Identifier: Apache-2.0
"""Networks of a cluster: shapes, routes without circles, mistakes in files."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path

import pytest

from commrt.cluster.rates import bucket
from commrt.cluster.routes import hops, path
from commrt.cluster.topology import Link, Topology, fat_tree, loop_network, star
from commrt.cluster.topology_file import read_topology
from commrt.cluster.wiring import Wiring, hosts_file
from commrt.errors import UsageError
from commrt.vocabulary.link_rates import parse_rate, rate_text

MBIT = 1_000_000


@pytest.mark.parametrize("num_hosts", [1, 2, 3, 7, 16])
def test_a_star_has_one_link_for_each_host(num_hosts: int) -> None:
    topology = star(num_hosts, 500 * MBIT)
    assert len(topology.hosts) == len(topology.links) == num_hosts
    assert topology.switches == ("s1",)
    assert {link.rate for link in topology.links} == {500 * MBIT}


def test_a_fat_tree_links_each_switch_to_each_spine_at_the_rate_asked_for() -> None:
    topology = fat_tree(10, 1000 * MBIT, per_switch=4, spines=2, oversubscription=2.0)
    assert topology.switches == ("s1", "s2", "s3", "spine1", "spine2")
    assert [topology.switch_of(host) for host in ("h4", "h5", "h10")] == [
        *("s1", "s2", "s3")
    ]
    up = [link for link in topology.links if "spine" in link.ends[1]]
    assert len(up) == 6
    assert {link.rate for link in up} == {1000 * MBIT}


def test_hosts_take_turns_among_spines() -> None:
    topology = fat_tree(8, per_switch=4, spines=2)
    used = {path(topology, "h1", host)[1].ends[1] for host in ("h5", "h6", "h7")}
    assert used == {"spine1", "spine2"}


def test_a_loop_network_is_a_ring_with_chords() -> None:
    topology = loop_network(16, per_switch=1)
    ring = [link for link in topology.links if link.ends[0] in topology.switches]
    # Sixteen of the ring, sixteen of length 2, and each of length 8 once.
    assert len(ring) == 16 + 16 + 8
    assert len(path(topology, "h1", "h9")) == 3
    assert len(path(loop_network(16, per_switch=1, chords=[]), "h1", "h9")) == 10


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_small_rings_have_no_link_twice(size: int) -> None:
    topology = loop_network(size, per_switch=1)
    pairs = [frozenset(link.ends) for link in topology.links]
    assert len({*pairs}) == len(pairs)


@pytest.mark.parametrize(
    "topology",
    [
        star(3),
        fat_tree(7, per_switch=3, spines=3),
        loop_network(9, per_switch=2),
        loop_network(16, per_switch=1),
    ],
    ids=["star", "fat-tree", "loop", "ring-of-16"],
)
def test_each_route_ends_and_each_hop_is_nearer(topology: Topology) -> None:
    table = {(hop.switch, hop.host) for hop in hops(topology)}
    assert len(table) == len(topology.switches) * len(topology.hosts)
    for pair in permutations(topology.hosts, 2):
        links = path(topology, *pair)
        assert pair[0] in links[0].ends
        assert pair[1] in links[-1].ends
        assert len({*map(id, links)}) == len(links) <= len(topology.switches) + 1


def test_a_disconnected_network_is_refused_with_the_hosts_that_are_lost() -> None:
    links = (Link(("a", "s1")), Link(("b", "s2")), Link(("c", "s2")))
    with pytest.raises(UsageError, match=r"a cannot reach b, c: .* add links"):
        Topology(("a", "b", "c"), ("s1", "s2"), links)


@pytest.mark.parametrize(
    ("hosts", "links", "message"),
    [
        (("a", "a"), (("a", "s"),), "a is given 2 times"),
        (("a", "s"), (("a", "s"),), "s is given 2 times"),
        (("A",), (("A", "s"),), "name 'A': expected at most 32 lower-case"),
        (("localhost",), (("localhost", "s"),), "not localhost"),
        (("a",), (("a", "x"),), "'x' is neither a host nor a switch"),
        (("a", "b"), (("a", "b"),), "joins two hosts"),
        (("a",), (("s", "s"),), "its two ends are the same"),
        (("a",), (("a", "s"), ("a", "s")), "a has 2 links"),
        ((), (("s", "s"),), "0 hosts: expected a number from 1"),
    ],
)
def test_a_wrong_network_is_refused(
    hosts: tuple[str, ...], links: tuple[tuple[str, str], ...], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        Topology(hosts, ("s",), tuple(Link(ends) for ends in links))


def test_numbers_out_of_range_are_refused() -> None:
    with pytest.raises(UsageError, match="129 hosts: expected a number from 1 to 128"):
        star(129)
    with pytest.raises(UsageError, match="oversubscription 0: expected"):
        fat_tree(4, oversubscription=0)
    with pytest.raises(UsageError, match="chord 9: expected lengths from 1 to 4"):
        loop_network(8, per_switch=1, chords=[9])
    with pytest.raises(UsageError, match="0 spines"):
        fat_tree(4, spines=0)


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("500mbit", 500 * MBIT),
        ("2.5gbit", 2500 * MBIT),
        ("1500kbit", 1_500_000),
        ("unlimited", None),
    ],
)
def test_rates_are_read_and_written(text: str, rate: int | None) -> None:
    assert parse_rate(text) == rate
    assert parse_rate(rate_text(rate)) == rate


@pytest.mark.parametrize("text", ["0mbit", "999kbit", "101gbit", "0.0001gbit"])
def test_a_rate_that_cannot_be_kept_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="cannot be kept: choose one from 1mbit to"):
        parse_rate(text)


def test_a_rate_that_the_hosts_of_a_switch_need_together_is_checked() -> None:
    with pytest.raises(UsageError, match="rate 1600gbit of s1-spine1 cannot be kept"):
        fat_tree(16, 100_000 * MBIT, per_switch=16, spines=1)


@pytest.mark.parametrize("text", ["", "500", "500 mbit", "-1mbit", "1e9mbit", "fast"])
def test_a_rate_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"expected a number and kbit, mbit or gbit"):
        parse_rate(text)


def test_a_bucket_holds_the_largest_packet_of_the_kernel() -> None:
    assert bucket(MBIT) == "tbf rate 1000000bit burst 68000 limit 74250"
    assert "burst 1250000 " in bucket(10_000 * MBIT)


def test_a_bucket_may_be_as_small_as_a_packet() -> None:
    assert bucket(200 * MBIT, 3200).startswith("tbf rate 200000000bit burst 3200 ")
    wiring = Wiring(star(2, 200 * MBIT), 1500, 3200)
    rates = [*wiring.switch_rates(), *wiring.host_rates("h1")]
    assert len(rates) == 3
    assert all("burst 3200 " in line for line in rates)


def test_headers_of_packets_leave_less_of_a_rate_for_data() -> None:
    """1448 bytes of data, as every capture of TCP with time stamps shows, of 1514."""
    assert Wiring(star(2), 1500).data_share == 1448 / 1514


def test_switches_get_a_fixed_entry_for_each_host() -> None:
    wiring = Wiring(fat_tree(5, 500 * MBIT, per_switch=2, spines=2), 9000)
    tables = [*wiring.tables()]
    assert sum(line.startswith("fdb add") for line in tables) == 5 * 5
    assert sum(" flood off" in line for line in tables) == 5 + 2 * 3 * 2
    cables = [*wiring.cables({host: f"/ns/{host}" for host in wiring.topology.hosts})]
    assert sum("netns /ns/h" in line for line in cables) == 5
    assert len([*wiring.host_addresses("h1")]) == 3 + 4


def test_hosts_know_each_other_by_name() -> None:
    wiring = Wiring(star(2), 1500)
    assert hosts_file(wiring) == ("127.0.0.1 localhost\n10.77.0.1 h1\n10.77.0.2 h2\n")


NETWORK = """\
hosts: [a, b]
switches: [s]
links:
  - {ends: [a, s], rate: 500mbit}
  - {ends: [s, b]}
"""


def test_a_file_describes_a_network(tmp_path: Path) -> None:
    file = tmp_path / "network.yaml"
    file.write_text(NETWORK)
    topology = read_topology(file)
    assert topology.hosts == ("a", "b")
    assert [link.rate for link in topology.links] == [500 * MBIT, None]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("hosts:", "host:", "the file: unknown key 'host'; did you mean 'hosts'"),
        ("switches: [s]", "", "the file: switches is missing"),
        ("500mbit", "500", r"links\[0\].rate: expected a rate such as 500mbit"),
        ("500mbit", "5zbit", r"links\[0\]: rate '5zbit': expected a number"),
        ("500mbit}", "500mbit, latency: 5}", r"links\[0\].latency: expected a latency"),
        ("500mbit}", "500mbit, latency: 5s}", r"links\[0\]: latency '5s': expected"),
        ("[s, b]}", "[s, b], latency: 1ms}", "link s-b has a latency and the rate"),
        ("[s, b]", "[s]", r"links\[1\].ends has 1 names"),
        ("[s, b]", "[s, 7]", r"links\[1\].ends: 7 is no name"),
        ("[a, b]", "a", "hosts: expected a list"),
        ("[a, b]", "[a, b", r"line \d: "),
        ("[a, b]", "[a, b, a]", "a is given 2 times"),
        (NETWORK, "", "the file: expected a mapping with"),
    ],
)
def test_a_mistake_in_a_file_is_named_with_its_place(
    tmp_path: Path, old: str, new: str, message: str
) -> None:
    file = tmp_path / "network.yaml"
    file.write_text(NETWORK.replace(old, new))
    with pytest.raises(UsageError, match=f"network.yaml is no file of a .*{message}"):
        read_topology(file)


def test_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not a regular file"):
        read_topology(tmp_path)
