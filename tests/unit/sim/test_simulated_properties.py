# SPDX-License-Identifier: Apache-2.0
"""Laws that every simulated run keeps, and planted bugs that break one of them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_by_hand import ends_by_hand, messages_of

from commrt import _native, algorithms
from commrt.schedule.ir import Schedule
from commrt.sim.costs import Costs
from commrt.sim.fragments import fragmented
from commrt.sim.link_series import crossings
from commrt.sim.network_files import load_network
from commrt.sim.simulate import Simulated, simulate
from commrt.sim.topologies.graphs import Graph, NamedLink
from commrt.sim.topologies.network import Network

# Ranks and networks: uneven ones, shared links, bundles, one rank alone.
CASES = {
    "star": ("star:hosts={}", (1, 2, 5, 8)),
    "full": ("full:hosts={}", (3, 7)),
    "loop": ("loop:switches={},hosts=3,bundle=2", (4, 5)),
    "tree": ("fat_tree:down=4x{},up=1x2", (2, 3)),
    "adaptive": ("fat_tree:down=4x{},up=1x3,routing=adaptive", (3,)),
    "mesh": ("mesh:dims=3x{}", (2, 3)),
    "torus": ("torus:dims=2x{}", (3, 5)),
    "dragonfly": ("dragonfly:groups={},routers=2,hosts=2,global_ports=2", (3, 5)),
}
NAMES = ("ring", "halving_doubling", "recursive_doubling", "double_tree", "direct")


def uneven_star(number: int) -> Network:
    """Return hosts around a switch; each cable is faster than the one before."""
    hosts = [f"h{host}" for host in range(number)]
    links = []
    for host, name in enumerate(hosts):
        rate = 1000.0 * (1 + 3 * host)
        links.append(NamedLink(name, "sw", rate, rate, 1.0))
        links.append(NamedLink("sw", name, rate, rate, 1.0))
    return Graph("uneven star", hosts, ["sw"], links).network()


def network_of(kind: str, number: int) -> Network:
    if kind == "uneven":
        return uneven_star(number)
    return load_network(CASES[kind][0].format(number)).network


def schedule_on(network: Network, name: str) -> Schedule:
    size = network.num_hosts
    known = algorithms.names("allreduce", size)
    return algorithms.schedule("allreduce", name if name in known else "ring", size)


networks = st.sampled_from(
    [(kind, number) for kind, (_, numbers) in CASES.items() for number in numbers]
)
fixed_ways = networks.filter(lambda one: one[0] != "adaptive")
# Few bytes, none, many that are no multiple of the ranks.
lengths = st.sampled_from([0, 4, 60, 4096, 400_012, 4_000_000])


def check_laws(run: Simulated) -> None:
    """Check that links carry what messages bring, and no more than they can."""
    links, messages, network = run.links, run.messages, run.network
    passed = crossings(run)
    carried = np.bincount(
        passed.link, messages.nbytes[passed.message], minlength=len(network.links)
    )
    np.testing.assert_array_equal(links.nbytes, carried)
    assert (links.peak_rate <= network.links.shared_rate * (1 + 1e-9)).all()
    moved = messages.nbytes > 0
    span = (messages.ended_us - messages.flowing_us)[moved]
    # No flow is faster than one cable, at any time.
    least = np.array([1 / fastest(run, number) for number in np.flatnonzero(moved)])
    assert (span >= messages.nbytes[moved] * least * (1 - 1e-9)).all()
    assert (links.busy_us <= run.time_us * (1 + 1e-9)).all()
    whole = network.links.shared_rate * links.busy_us
    assert (links.nbytes <= whole * (1 + 1e-9)).all()
    assert (run.steps.done_us >= run.steps.ready_us).all()


def fastest(run: Simulated, message: int) -> float:
    rates = [run.network.links.flow_rate[link] for link in run.way_of(message)]
    return float(min(rates))


def ends_of(run: Simulated) -> dict[tuple[int, int], float]:
    """Return when each message arrived, by the place of its send."""
    ended = run.messages.ended_us.tolist()
    return {
        run.place_of(send): end
        for send, end in zip(run.messages.send.tolist(), ended, strict=True)
    }


def check_messages(run: Simulated) -> None:
    """Check each message against the schedule's own: ends and bytes."""
    expected = messages_of(run.schedule, run.num_elements, run.itemsize)
    found = {
        run.place_of(int(send)): (run.place_of(int(recv)), int(nbytes))
        for send, recv, nbytes in zip(
            run.messages.send, run.messages.recv, run.messages.nbytes, strict=True
        )
    }
    assert found == expected


@given(networks | st.just(("uneven", 5)), st.sampled_from(NAMES), lengths)
@settings(max_examples=60)
def test_links_carry_what_messages_bring_and_no_more_than_they_can(
    where: tuple[str, int], name: str, nbytes: int
) -> None:
    network = network_of(*where)
    run = simulate(schedule_on(network, name), network, nbytes)
    check_laws(run)
    check_messages(run)


@given(
    fixed_ways | st.tuples(st.just("uneven"), st.integers(1, 6)), st.sampled_from(NAMES)
)
@settings(max_examples=25)
def test_times_equal_those_of_a_simulator_without_shortcuts(
    where: tuple[str, int], name: str
) -> None:
    network = network_of(*where)
    schedule = schedule_on(network, name)
    run = simulate(schedule, network, 40_004)
    by_hand = ends_by_hand(schedule, network, 40_004)
    assert ends_of(run) == pytest.approx(by_hand, rel=1e-9)
    assert run.time_us == pytest.approx(max(by_hand.values(), default=0), rel=1e-9)


@given(
    fixed_ways | st.tuples(st.just("uneven"), st.integers(1, 6)),
    st.sampled_from(NAMES),
    st.booleans(),
    st.sampled_from([0, 1000, 8000, 1 << 20]),
    st.integers(1, 3),
)
@settings(max_examples=60)
def test_lines_of_messages_equal_those_of_a_simulator_without_shortcuts(
    where: tuple[str, int], name: str, in_order: bool, queued: int, fragments: int
) -> None:
    network = network_of(*where)
    cut = fragmented(schedule_on(network, name), 10_001, 4, fragments)
    costs = Costs(in_order=in_order, queued_nbytes=queued)
    run = simulate(cut, network, 0, costs=costs)
    by_hand = ends_by_hand(cut, network, 0, in_order=in_order, queued_nbytes=queued)
    assert ends_of(run) == pytest.approx(by_hand, rel=1e-9)


@given(networks, st.sampled_from(NAMES), st.integers(1, 5), st.integers(1, 3))
@settings(max_examples=30)
def test_lines_and_fragments_keep_the_laws(
    where: tuple[str, int], name: str, fragments: int, depth: int
) -> None:
    network = network_of(*where)
    schedule = schedule_on(network, name)
    whole = simulate(schedule, network, 400_012 * 4).messages.nbytes.sum()
    cut = fragmented(schedule, 400_012, 4, fragments, depth)
    run = simulate(cut, network, 0, costs=Costs(in_order=True, queued_nbytes=32_768))
    check_messages(run)
    assert run.messages.nbytes.sum() == whole
    links, passed = run.links, crossings(run)
    carried = np.bincount(
        passed.link, run.messages.nbytes[passed.message], minlength=len(links.nbytes)
    )
    np.testing.assert_array_equal(links.nbytes, carried)
    assert (links.busy_us <= run.time_us * (1 + 1e-9)).all()
    full = network.links.shared_rate * links.busy_us
    assert (links.nbytes <= full * (1 + 1e-9)).all()


@given(networks, st.sampled_from(NAMES), st.sampled_from([2, 3, 10]))
@settings(max_examples=30)
def test_rates_and_latencies_scale_the_time(
    where: tuple[str, int], name: str, factor: int
) -> None:
    kind, number = where
    text = CASES[kind][0].format(number)
    plain = load_network(f"{text},rate=10GB/s,latency=0us").network
    fast = load_network(f"{text},rate={10 * factor}GB/s,latency=0us").network
    schedule = schedule_on(plain, name)
    without = simulate(schedule, plain, 400_000).time_us
    assert simulate(schedule, fast, 400_000).time_us == pytest.approx(
        without / factor, rel=1e-9
    )
    near = load_network(f"{text},rate=10GB/s,latency=1us").network
    far = load_network(f"{text},rate=10GB/s,latency={factor}us").network
    assert simulate(schedule, far, 0).time_us == pytest.approx(
        factor * simulate(schedule, near, 0).time_us, rel=1e-9
    )


@given(st.integers(2, 12), st.sampled_from(NAMES), st.randoms(use_true_random=False))
@settings(max_examples=25)
def test_permuted_ranks_on_a_symmetric_network_take_the_same_time(
    ranks: int, name: str, random: object
) -> None:
    network = load_network(f"star:hosts={ranks}").network
    schedule = schedule_on(network, name)
    order = list(range(ranks))
    random.shuffle(order)  # type: ignore[attr-defined]
    one = simulate(schedule, network, 400_000)
    other = simulate(schedule, network, 400_000, np.array(order))
    assert other.time_us == pytest.approx(one.time_us, rel=1e-9)


def test_equal_inputs_give_equal_runs_to_the_last_bit() -> None:
    network = network_of("adaptive", 3)
    schedule = schedule_on(network, "direct")
    runs = [simulate(schedule, network, 400_000) for _ in range(3)]
    for run in runs[1:]:
        for column in ("posted_us", "flowing_us", "ended_us", "way", "sharers"):
            np.testing.assert_array_equal(
                getattr(run.messages, column), getattr(runs[0].messages, column)
            )


def test_only_flows_that_share_links_are_given_rates_anew() -> None:
    """A ring on a star has no shared link, so each flow gets its rate once."""
    run = simulate(
        algorithms.schedule("allreduce", "ring", 64),
        *(load_network("star:hosts=64").network, 640_000),
    )
    assert run.num_shared == len(run.messages.send)


# Flows that are held back at different links, and some that end long before others.
UNEVEN = (
    ("uneven", 5, "direct"),
    ("tree", 3, "direct"),
    ("torus", 5, "halving_doubling"),
    ("dragonfly", 5, "double_tree"),
    ("mesh", 3, "recursive_doubling"),
)


def is_broken(bug: str) -> bool:
    """Return whether some law fails with a bug in the rule of sharing."""
    for kind, number, name in UNEVEN:
        network = network_of(kind, number)
        schedule = schedule_on(network, name)
        run = simulate(schedule, network, 40_008, planted_bug=bug)
        expected = ends_by_hand(schedule, network, 40_008)
        try:
            check_laws(run)
            assert ends_of(run) == pytest.approx(expected, rel=1e-9)
        except AssertionError:
            return True
    return False


@pytest.mark.parametrize("bug", _native.planted_sharing_bugs())
def test_a_wrong_rule_of_sharing_breaks_a_law(bug: str) -> None:
    assert is_broken(bug)


def test_the_right_rule_of_sharing_breaks_none() -> None:
    assert not is_broken("none")
