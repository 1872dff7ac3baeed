# SPDX-License-Identifier: Apache-2.0
"""Networks: every way is a chain of links from host to host, and no longer than due."""

from __future__ import annotations

import numpy as np
import pytest

from commrt import algorithms
from commrt.errors import UsageError
from commrt.schedule.builder import Builder, build_program
from commrt.schedule.ir import RankProgram, Schedule
from commrt.sim.network_files import load_network, preset_names
from commrt.sim.placements import machines, place
from commrt.sim.simulate import simulate
from commrt.sim.topologies.dragonflies import Dragonfly
from commrt.sim.topologies.fat_trees import FatTree, KAryFatTree
from commrt.sim.topologies.gpu_clusters import GpuCluster
from commrt.sim.topologies.graphs import Graph, NamedLink
from commrt.sim.topologies.loop_networks import LoopNetwork
from commrt.sim.topologies.network import Cable, Network
from commrt.sim.topologies.tori import Mesh, Torus

DESCRIBED = (
    "star:hosts=1",
    "star:hosts=7",
    "full:hosts=5",
    "torus:dims=1",
    "torus:dims=2",
    "torus:dims=5",
    "torus:dims=4x3",
    "torus:dims=2x3x4",
    "mesh:dims=5x1x2",
    "dragonfly:groups=1,routers=1,hosts=1,global_ports=0",
    "dragonfly:groups=7,routers=3,hosts=2,global_ports=2",
    "fat_tree:down=3,up=1",
    "fat_tree:down=3x5,up=1x2",
    "fat_tree:down=2x3x2,up=1x2x3,routing=adaptive",
    "k_ary_fat_tree:k=4,oversubscription=3",
    "loop:switches=1,hosts=2",
    "loop:switches=2,hosts=2",
    "loop:switches=7,hosts=2",
    "loop:switches=16,hosts=1,bundle=2",
)


def all_pairs(hosts: int) -> tuple[np.ndarray, np.ndarray]:  # type: ignore[type-arg]
    source, target = np.divmod(np.arange(hosts * hosts), hosts)
    return source, target


def check_chains(network: Network, source: np.ndarray, target: np.ndarray) -> None:  # type: ignore[type-arg]
    """Check that each way leads from its source to its target, link by link."""
    found, links = network.find_ways(source, target), network.links
    assert len(found.of_pair) == len(source) + 1
    for pair, (one, other) in enumerate(zip(source, target, strict=True)):
        first, last = found.of_pair[pair], found.of_pair[pair + 1]
        assert first < last
        for way in range(first, last):
            here = int(one)
            for link in found.links[found.starts[way] : found.starts[way + 1]]:
                assert links.tails[link] == here
                here = int(links.heads[link])
            assert here == other


def hops(network: Network, source: int, target: int) -> int:
    return len(network.way(source, target))


@pytest.mark.parametrize("text", DESCRIBED)
def test_each_way_is_a_chain_of_links(text: str) -> None:
    network = load_network(text).network
    check_chains(network, *all_pairs(network.num_hosts))
    assert hops(network, 0, 0) == 0
    names = {network.node_name(node) for node in range(network.num_nodes)}
    assert len(names) == network.num_nodes
    assert (network.links.latency_us > 0).all()
    assert (network.links.shared_rate >= network.links.flow_rate).all()


@pytest.mark.parametrize("name", preset_names())
def test_presets_are_whole_networks_with_sources(name: str) -> None:
    network = load_network(name).network
    drawn = np.random.default_rng(7).integers(network.num_hosts, size=(2, 300))
    check_chains(network, *drawn)
    assert any("chosen here" in note for note in network.notes)
    assert len(network.notes) > 1


def test_messages_take_the_shorter_way_round_a_torus() -> None:
    dims = (5, 4)
    torus, mesh = Torus(dims).network(), Mesh(dims).network()
    source, target = all_pairs(20)
    for one, other in zip(source.tolist(), target.tolist(), strict=True):
        if one == other:
            continue
        places = zip(np.unravel_index(one, dims), np.unravel_index(other, dims),
                     dims, strict=True)  # fmt: skip
        apart = [(abs(int(a) - int(b)), width) for a, b, width in places]
        assert hops(mesh, one, other) == 2 + sum(far for far, _ in apart)
        shorter = sum(min(far, width - far) for far, width in apart)
        assert hops(torus, one, other) == 2 + shorter


@pytest.mark.parametrize("switches", [2, 4, 16, 64])
def test_switches_whose_numbers_differ_in_a_bit_are_neighbours(switches: int) -> None:
    network = LoopNetwork(switches, 1).network()
    for switch in range(switches):
        for bit in range(switches.bit_length() - 1):
            assert hops(network, switch, switch ^ (1 << bit)) == 3


def most_flows(network: Network, hosts: int, name: str, **params: int) -> int:
    """Return the most flows that one link between switches ever has."""
    schedule = algorithms.schedule("allreduce", name, hosts, 0, params)
    run = simulate(schedule, network, 4 * hosts * 1024)
    inner = network.links.tails >= network.num_hosts
    inner &= network.links.heads >= network.num_hosts
    return int(run.links.peak_flows[inner].max())


@pytest.mark.parametrize(
    ("switches", "hosts", "shifted", "plain"), [(16, 4, 1, 4), (64, 8, 2, 8)]
)
def test_shifted_halving_doubling_spreads_over_the_shortcuts(
    switches: int, hosts: int, shifted: int, plain: int
) -> None:
    """Shifting divides the flows of a shortcut by the number of lengths, rounded up."""
    network = LoopNetwork(switches, hosts, Cable(bundle=shifted)).network()
    ranks = switches * hosts
    assert most_flows(network, ranks, "halving_doubling") == plain
    found = most_flows(network, ranks, "shifted_halving_doubling", k=hosts)
    assert found == shifted


def test_static_routing_takes_the_digits_of_the_destination() -> None:
    network = FatTree((4, 4), (1, 2)).network()
    for target in range(4, 16):
        way = network.way(0, target)
        spine = int(network.links.heads[way[1]]) - (16 + 4)
        assert spine == target % 2


def test_adaptive_routing_spreads_what_static_routing_lets_collide() -> None:
    """Three hosts of a switch send to hosts whose numbers have the same last digit."""

    def author(b: Builder) -> None:
        b.blocks(1)
        if b.rank in (0, 1, 2):
            b.send(b.inp[0], 4 * (b.rank + 1))
        elif b.rank in (4, 8, 12):
            b.recv(b.out[0], b.rank // 4 - 1)

    def make(rank: int) -> RankProgram:
        return build_program(author, "allreduce", rank, 16)

    schedule = Schedule("allreduce", "by_hand", 16, 0, make)
    times = {}
    for routing in ("static", "adaptive"):
        network = FatTree((4, 4), (1, 4), (Cable(1, 0),), routing).network()
        times[routing] = simulate(schedule, network, 4000).time_us
    assert times == {"static": pytest.approx(12), "adaptive": pytest.approx(4)}


def test_oversubscription_slows_down_what_leaves_a_switch() -> None:
    schedule = algorithms.schedule("allreduce", "recursive_doubling", 16)
    nbytes = 1 << 20
    full = simulate(schedule, FatTree((4, 4), (1, 4)).network(), nbytes)
    narrow = simulate(schedule, FatTree((4, 4), (1, 1)).network(), nbytes)
    # Two of four exchanges leave the switch, with four flows on one cable.
    bytes_us = nbytes / 12500
    assert full.time_us == pytest.approx(4 * bytes_us + 2 * 2 + 2 * 4, rel=1e-9)
    assert narrow.time_us == pytest.approx(
        (2 + 2 * 4) * bytes_us + 2 * 2 + 2 * 4, rel=1e-9
    )


def test_k_ary_trees_have_as_many_hosts_as_the_paper_says() -> None:
    for k in (2, 4, 8):
        assert KAryFatTree(k).network().num_hosts == k**3 // 4


FABRIC = FatTree((3, 4), (1, 2))
"""Twelve cards: six nodes with two, or three with four."""


def test_equal_gpus_of_a_unit_are_one_switch_apart() -> None:
    network = GpuCluster(2, 2, FABRIC, unit=3).network()
    assert hops(network, 0, 1) == 2  # over NVLink
    assert hops(network, 0, 2) == 4  # card, switch, card, GPU
    assert hops(network, 0, 3) == 6  # the same, after NVLink
    assert hops(network, 0, 6) == 6  # another unit, over a spine
    names = [network.link_name(link) for link in network.way(0, 3)]
    assert names[:3] == ["n0g0→n0nvlink", "n0nvlink→n0g1", "n0g1→n0nic1"]
    without = GpuCluster(2, 2, FABRIC, unit=3, relays=False).network()
    assert hops(without, 0, 3) == 6
    assert without.link_name(without.way(0, 3)[0]) == "n0g0→n0nic0"
    check_chains(network, *all_pairs(12))
    check_chains(without, *all_pairs(12))


def test_gpus_share_cards_in_order() -> None:
    network = GpuCluster(8, 4, FABRIC, unit=3, wiring="node", relays=False).network()
    check_chains(network, *all_pairs(24))
    names = [network.link_name(network.way(gpu, 8)[0]) for gpu in range(8)]
    assert names == [f"n0g{gpu}→n0nic{gpu // 2}" for gpu in range(8)]


@pytest.mark.parametrize(
    ("network", "problem"),
    [
        (lambda: LoopNetwork(0, 4), "switches is 0"),
        (lambda: Torus((4, 0)), "each of dims is 0"),
        (lambda: Torus(()), "dims is empty"),
        (lambda: Torus((100_000, 100_000)), "at most 4,000,000 can be simulated"),
        (lambda: FatTree((4, 4), (1,)), "down has 2 levels and up has 1"),
        (lambda: FatTree((4,), (2,)), "up begins with 2"),
        (lambda: FatTree((4,), (1,), routing="magic"), "expected static or adaptive"),
        (lambda: FatTree((2**40, 2**40), (1, 1)), "at most 4,000,000"),
        (lambda: KAryFatTree(5), "k is 5; expected an even number"),
        (lambda: Dragonfly(9, 2, 1, 1), "at most 3 groups"),
        (lambda: GpuCluster(3, 2, FABRIC, 2), "multiples of the cards"),
        (lambda: GpuCluster(2, 2, FABRIC, 4), "6 nodes in units of 4"),
        (lambda: GpuCluster(2, 2, FABRIC, 3, wiring="x"), "expected rail or node"),
    ],
)
def test_networks_that_cannot_be_are_refused(network: object, problem: str) -> None:
    shape = network()  # type: ignore[operator]
    with pytest.raises(UsageError, match=problem):
        shape.network()


def test_more_ways_than_memory_holds_are_refused() -> None:
    network = FatTree((32, 32), (1, 64), routing="adaptive").network()
    source, target = all_pairs(1024)
    with pytest.raises(UsageError, match="take static routing or fewer ranks"):
        network.find_ways(source, target)


@pytest.mark.parametrize(
    ("rate", "latency", "bundle"),
    [(0, 1, 1), (-1, 1, 1), (float("inf"), 1, 1), (1, -1, 1), (1, 1, 0)],
)
def test_cables_that_cannot_be_are_refused(
    rate: float, latency: float, bundle: int
) -> None:
    with pytest.raises(UsageError, match="expected"):
        Cable(rate, latency, bundle)


def joined(tail: str, head: str, latency_us: float = 1.0) -> NamedLink:
    return NamedLink(tail, head, 1000.0, 1000.0, latency_us)


def test_a_graph_takes_the_fewest_links_and_then_the_least_latency() -> None:
    pairs = [("a", "s"), ("s", "b"), ("a", "t"), ("t", "b"), ("b", "s"), ("s", "a")]
    links = [joined(*pair, 3 if "s" in pair else 1) for pair in pairs]
    network = Graph("g", ["a", "b"], ["s", "t"], links).network()
    assert network.way(0, 1) == [2, 3]
    assert network.way(1, 0) == [4, 5]


@pytest.mark.parametrize(
    "pairs", [[("a", "s")], [("a", "s"), ("s", "b")], [("b", "s"), ("s", "a")]]
)
def test_hosts_that_cannot_reach_each_other_are_named(
    pairs: list[tuple[str, str]],
) -> None:
    graph = Graph("g", ["a", "b"], ["s"], [joined(*pair) for pair in pairs])
    with pytest.raises(UsageError, match=r"host \w cannot reach host \w"):
        graph.network()


def test_messages_pass_through_no_other_host() -> None:
    pairs = [("a", "b"), ("b", "c"), ("c", "b"), ("b", "a")]
    graph = Graph("g", ["a", "b", "c"], [], [joined(*pair) for pair in pairs])
    with pytest.raises(UsageError, match="host a cannot reach host c"):
        graph.network()


def test_ranks_are_placed_as_asked() -> None:
    network = load_network("fat_tree:down=2x3,up=1x1").network
    assert place(network, 4).tolist() == [0, 1, 2, 3]
    assert place(network, 4, "cyclic").tolist() == [0, 2, 4, 1]
    drawn = place(network, 6, "random:3")
    assert sorted(drawn) == list(range(6))
    assert drawn.tolist() == place(network, 6, "random:3").tolist()
    assert drawn.tolist() != place(network, 6, "random:4").tolist()
    assert machines(network).tolist() == [6, 6, 7, 7, 8, 8]
    gpus = GpuCluster(2, 2, FABRIC, 3).network()
    assert place(gpus, 7, "cyclic").tolist() == [0, 2, 4, 6, 8, 10, 1]
    assert machines(gpus).tolist() == [n // 2 for n in range(12)]


@pytest.mark.parametrize(
    ("ranks", "how", "problem"),
    [
        (0, "block", "0 ranks"),
        (7, "block", "7 ranks on 6 hosts"),
        (7, "random", "7 ranks on 6 hosts"),
        (2, "spiral", "expected block, cyclic"),
        (2, "random:x", "expected block, cyclic"),
        (2, "block:2", "expected block, cyclic"),
    ],
)
def test_placements_that_cannot_be_are_refused(
    ranks: int, how: str, problem: str
) -> None:
    network = load_network("fat_tree:down=2x3,up=1x1").network
    with pytest.raises(UsageError, match=problem):
        place(network, ranks, how)
