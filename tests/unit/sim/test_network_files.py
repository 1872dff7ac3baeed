# SPDX-License-Identifier: Apache-2.0
"""Descriptions of networks are read, or refused with the place in the file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from commrt import algorithms
from commrt.errors import UsageError
from commrt.sim.network_files import load_network
from commrt.sim.placements import place
from commrt.sim.platform_files import platform_xml
from commrt.sim.quantities import (
    nbytes_text,
    parse_latency,
    parse_nbytes,
    parse_rate,
    time_text,
)
from commrt.sim.simulate import simulate
from commrt.sim.topologies.network import Network

GRAPH = """\
# Two switches, and a slow cable between them.
hosts: [a, b, c, d]
switches: [s, t]
links:
  - {ends: [a, s], rate: 8gbit, latency: 2us}
  - {ends: [b, s], rate: 1GB/s, latency: 2us}
  - {ends: [c, t], rate: 1GB/s, latency: 2us}
  - {ends: [d, t], rate: 1GB/s, latency: 2us}
  - {ends: [s, t], rate: 500MB/s, bundle: 2, latency: 500ns}
"""


def written(folder: Path, text: str, name: str = "net.yaml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def time_of(network: Network, nbytes: int = 400_000) -> float:
    schedule = algorithms.schedule("allreduce", "direct", network.num_hosts)
    return simulate(schedule, network, nbytes).time_us


def test_a_file_of_nodes_and_links_is_a_network(tmp_path: Path) -> None:
    network = load_network(str(written(tmp_path, GRAPH))).network
    assert [network.node_name(node) for node in range(6)] == [*"abcdst"]
    assert len(network.links) == 10
    way = network.way(0, 2)
    assert [network.link_name(link) for link in way] == ["a→s", "s→t", "t→c"]
    np.testing.assert_array_equal(network.links.shared_rate[way], [1000, 1000, 1000])
    np.testing.assert_array_equal(network.links.flow_rate[way], [1000, 500, 1000])
    assert network.links.latency_us[way].sum() == 4.5


def test_a_kind_with_its_numbers_and_costs_is_a_network(tmp_path: Path) -> None:
    text = """\
name: ours
notes: [measured in May]
kind: fat_tree
down: [2, 3]
up: [1, 2]
cables: [{rate: 25gbit, latency: 1us}, {rate: 100gbit, latency: 500ns, bundle: 2}]
costs: {send_overhead_us: 0.5, eager_nbytes: 8192, handshake: true}
"""
    found = load_network(str(written(tmp_path, text)))
    assert found.network.name == "ours"
    assert found.network.notes == ("measured in May",)
    assert found.network.num_hosts == 6
    assert found.costs.send_overhead_us == 0.5
    assert found.costs.eager_nbytes == 8192
    assert found.costs.handshake
    inline = load_network("fat_tree:down=2x3,up=1x2,rate=25gbit").network
    assert inline.num_nodes == found.network.num_nodes


REFUSED = {
    "": "the file is empty",
    "hosts: [a": r"line 2: not YAML",
    "{}": "hosts is missing",
    "kind: tors\ndims: [3]": "line 1, kind: unknown kind of network 'tors'; did you",
    "kind: star\nhosts: 0": "hosts is 0; expected 1 or more",
    "kind: star\nhosts: many": "line 2, hosts: 'many' is no whole number",
    "kind: star\nhost: 4": "line 2, host: unknown key 'host'; did you mean 'hosts'",
    "kind: star": "line 1: hosts is missing",
    "kind: star\nhosts: 4\nrate: 0gbit": "line 3, rate: rate '0gbit': expected one ab",
    "kind: star\nhosts: 4\nrate: -3gbit": "line 3, rate: rate '-3gbit'",
    "kind: star\nhosts: 4\nrate: 5": "expected a number and a unit",
    "kind: star\nhosts: 4\nlatency: -1us": "line 3, latency",
    "kind: star\nhosts: 9999999": "at most 4,000,000 can be simulated",
    "kind: torus\ndims: [4, 99999999999999999999]": "is no whole number",
    "kind: star\nhosts: &x 4": None,
    "kind: star\nhosts: [*x]": "not YAML",
    "a: &a [1]\nb: *a": "aliases",
    "kind: !!python/object:os.system x": "tags are not allowed",
    "hosts: [a]\nhosts: [b]\nlinks: []": "given twice",
    "hosts: [a, a]\nlinks: []": "node 'a' is given twice",
    "hosts: [a, b]\nlinks:\n  - {ends: [a, c]}": r"line 3, links\[0\].ends\[1\]: no ho",
    "hosts: [a, b]\nlinks:\n  - {ends: [a]}": "1 names; a link has two ends",
    "hosts: [a, b]\nlinks:\n  - {ends: [a, a]}": "both ends of the link are a",
    "hosts: [a, b]\nlinks:\n  - {ends: [a, b], rate: 0gbit}": r"line 3, links\[0\].ra",
    "hosts: [a, b]\nlinks:\n  - {ends: [a, b], bundle: 0}": "0 cables",
    "hosts: [a, b]\nlinks: []": "host a cannot reach host b",
    "hosts: [a, b]\nlinks:\n  - {ends: [a, b], one_way: true}": "host b cannot reach",
    "kind: star\nhosts: 4\ncosts: {send_overhead_us: -1}": "send_overhead_us is -1",
    "kind: star\nhosts: 4\ncosts: {speed: 1}": "line 3, costs.speed: unknown key",
    "[[[[[[[[[[[[[[[[1]]]]]]]]]]]]]]]]": "deeper ones",
}


@pytest.mark.parametrize("text", [text for text, said in REFUSED.items() if said])
def test_a_wrong_file_is_refused_with_the_place(tmp_path: Path, text: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(UsageError, match=REFUSED[text]) as caught:
        load_network(str(path))
    assert str(caught.value).startswith(str(path))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("star", "hosts is missing"),
        ("star:hosts", "expected each name once"),
        ("star:hosts=4,hosts=5", "expected each name once"),
        ("torus:dims=4xfour", "'four' is no whole number"),
        ("nothing.yaml", "nothing.yaml"),
        ("dgx", "unknown kind of network 'dgx'"),
    ],
)
def test_a_wrong_text_of_the_command_line_is_refused(text: str, problem: str) -> None:
    with pytest.raises((UsageError, OSError), match=problem):
        load_network(text)


@pytest.mark.parametrize(
    ("text", "bytes_per_us"),
    [
        ("100gbit", 12500),
        ("12.5GB/s", 12500),
        ("1Gbps", 125),
        ("1GBps", 1000),
        ("1MiBps", 1.048576),
        ("1e3kB/s", 1),
        ("8Tbps", 1e6),
        ("unlimited", float("inf")),
    ],
)
def test_rates_are_read(text: str, bytes_per_us: float) -> None:
    assert parse_rate(text) == pytest.approx(bytes_per_us, rel=1e-12)


def test_lengths_and_times_are_read_and_written() -> None:
    assert [parse_latency(t) for t in ("500ns", "2us", "1ms", "none")] == [
        *(0.5, 2, 1000, 0)
    ]
    assert parse_latency("1e-6", bare="s") == pytest.approx(1)
    for nbytes in (0, 1, 1024, 1536, 3 << 20, 1 << 30):
        assert parse_nbytes(nbytes_text(nbytes)) == nbytes
    assert [time_text(t) for t in (1.5, 1500, 2e6)] == ["1.5 us", "1.5 ms", "2 s"]


@pytest.mark.parametrize("text", ["1.5", "1.5B", "-4", "4x", "1e30MB", ""])
def test_lengths_that_are_no_bytes_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="expected whole bytes"):
        parse_nbytes(text)


def xml(body: str, routing: str = "Full") -> str:
    return (
        "<?xml version='1.0'?>\n"
        '<!DOCTYPE platform SYSTEM "https://simgrid.org/simgrid.dtd">\n'
        f'<platform version="4.1">\n<zone id="z" routing="{routing}">\n{body}\n'
        "</zone>\n</platform>\n"
    )


HOSTS = '<host id="a" speed="1Gf"/><host id="b" speed="1Gf"/>'
LINK = '<link id="l" bandwidth="1GBps" latency="1us"'


def platform(tmp_path: Path, text: str) -> Network:
    return load_network(str(written(tmp_path, text, "net.xml"))).network


@pytest.mark.parametrize(
    ("policy", "expected_us"), [("SHARED", 401), ("FATPIPE", 201), ("SPLITDUPLEX", 201)]
)
def test_links_of_a_platform_are_shared_as_their_policy_says(
    tmp_path: Path, policy: str, expected_us: float
) -> None:
    """Two ranks exchange 200,000 bytes, in both directions at once."""
    way = '<route src="a" dst="b"><link_ctn id="l" direction="UP"/></route>'
    network = platform(tmp_path, xml(f'{HOSTS}{LINK} sharing_policy="{policy}"/>{way}'))
    schedule = algorithms.schedule("allreduce", "recursive_doubling", 2)
    run = simulate(schedule, network, 200_000)
    assert run.time_us == pytest.approx(expected_us, rel=1e-12)


def test_a_cluster_with_a_backbone_is_a_network(tmp_path: Path) -> None:
    body = (
        '<cluster id="c" prefix="n" suffix="" radical="0-2,7" speed="1Gf" bw="1GBps" '
        'lat="1us" bb_bw="500MBps" bb_lat="2us"/>'
    )
    text = (
        xml(body).replace('<zone id="z" routing="Full">\n', "").replace("</zone>", "")
    )
    network = platform(tmp_path, text)
    assert [network.node_name(node) for node in range(4)] == ["n0", "n1", "n2", "n7"]
    names = [network.link_name(link) for link in network.way(0, 3)]
    assert names == ["n0_link_UP", "c_backbone", "n7_link_DOWN"]
    assert network.links.latency_us[network.way(0, 3)].sum() == 4


def test_zones_are_joined_by_their_gateways(tmp_path: Path) -> None:
    body = """
<zone id="left" routing="Floyd">
  <host id="a" speed="1f"/><router id="r"/>
  <link id="la" bandwidth="1GBps" latency="1us"/>
  <route src="a" dst="r"><link_ctn id="la"/></route>
</zone>
<zone id="right" routing="Dijkstra">
  <host id="b" speed="1f"/><router id="m"/><router id="q"/>
  <link id="lb" bandwidth="1GBps" latency="1us"/>
  <link id="lm" bandwidth="1GBps" latency="1us"/>
  <route src="b" dst="m"><link_ctn id="lb"/></route>
  <route src="m" dst="q"><link_ctn id="lm"/></route>
</zone>
<link id="between" bandwidth="1GBps" latency="5us"/>
<zoneRoute src="left" dst="right" gw_src="r" gw_dst="q"><link_ctn id="between"/>
</zoneRoute>"""
    network = platform(tmp_path, xml(body))
    names = [network.link_name(link) for link in network.way(0, 1)]
    assert names == ["la", "between", "lm", "lb"]
    back = [network.link_name(link) for link in network.way(1, 0)]
    assert back == names[::-1]


BOMB = """<?xml version="1.0"?>
<!DOCTYPE platform [<!ENTITY a "aaaaaaaaaa"><!ENTITY b "&a;&a;&a;&a;&a;&a;&a;&a;">]>
<platform version="4.1"><zone id="&b;" routing="Full"/></platform>
"""


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (BOMB, "line 2: the document declares the entity 'a'"),
        ("<platform", "line 1: not XML"),
        ('<platform version="3"></platform>', "line 1: <platform version='3'> begins"),
        (xml(""), "the platform has no host"),
        (xml('<hots id="a"/>'), "line 5: <hots> is not supported; did you mean 'host'"),
        (xml(HOSTS + HOSTS), "line 5: 'a' is given twice"),
        (xml(HOSTS), "host a cannot reach host b"),
        (
            xml(HOSTS + LINK + ' sharing_policy="WIFI"/>'),
            "line 5: link l: sharing_poli",
        ),
        (xml('<link id="l" bandwidth="0Bps"/>'), "line 5: link l: rate '0Bps'"),
        (xml('<link id="l" bandwidth="-1GBps"/>'), "line 5: link l: rate '-1GBps'"),
        (xml('<link id="l"/>'), "line 5: bandwidth is missing in <link>"),
        (
            xml(HOSTS + '<route src="a" dst="c"></route>'),
            "line 5: no host, router or zo",
        ),
        (
            xml(f'{HOSTS}<route src="a" dst="b"><link_ctn id="x"/></route>'),
            "line 5: no link before this line is called 'x'",
        ),
        (xml("", "Quantum"), "line 4: routing 'Quantum' is not supported"),
        (
            xml('<cluster id="c" radical="0-99999999" speed="1f" bw="1Bps"/>'),
            "line 5: radical '0-99999999': the network has",
        ),
        (
            xml('<cluster id="c" radical="0-3" topology="TORUS"/>'),
            "clusters with topology TORUS are not supported",
        ),
        ("<platform version='4.1'>" + "<zone id='z'>" * 100, "is given twice|deeper"),
    ],
)
def test_a_wrong_platform_is_refused_with_the_line(
    tmp_path: Path, text: str, problem: str
) -> None:
    path = written(tmp_path, text, "net.xml")
    with pytest.raises(UsageError, match=problem):
        load_network(str(path))


@pytest.mark.parametrize(
    "text",
    [
        "star:hosts=3",
        "torus:dims=3x2",
        "loop:switches=4,hosts=2,bundle=2",
        "fat_tree:down=2x3,up=1x2",
        "dragonfly:groups=3,routers=2,hosts=1,global_ports=1",
    ],
)
def test_a_network_that_is_written_and_read_again_takes_the_same_times(
    tmp_path: Path, text: str
) -> None:
    network = load_network(text).network
    again = platform(tmp_path, platform_xml(network))
    assert again.num_hosts == network.num_hosts
    assert time_of(again) == pytest.approx(time_of(network), rel=1e-9)


def test_a_network_that_would_fill_gigabytes_is_not_written() -> None:
    with pytest.raises(UsageError, match="take a smaller network"):
        platform_xml(load_network("star:hosts=5000").network)


def test_a_file_places_ranks_by_name_or_number(tmp_path: Path) -> None:
    network = load_network(str(written(tmp_path, GRAPH))).network
    path = written(tmp_path, "# ours\nd\n\n1\nd\n", "ranks.txt")
    assert place(network, 3, f"file:{path}").tolist() == [3, 1, 3]
    with pytest.raises(UsageError, match="names hosts for 3 ranks; expected 4"):
        place(network, 4, f"file:{path}")
    wrong = written(tmp_path, "a\nz\n", "wrong.txt")
    with pytest.raises(UsageError, match=r"wrong.txt, line 2: no host .* 'z'"):
        place(network, 2, f"file:{wrong}")
