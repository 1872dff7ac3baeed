# SPDX-License-Identifier: Apache-2.0
"""Fragments of a schedule: their lengths, and how they follow each other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from commrt import algorithms
from commrt.errors import UsageError
from commrt.schedule.builder import Builder, build_program
from commrt.schedule.ir import RankProgram, Schedule
from commrt.sim.cli import main
from commrt.sim.costs import Costs
from commrt.sim.fragments import fragmented, num_fragments
from commrt.sim.simulate import simulate
from commrt.sim.topologies.crossbars import Full, Star
from commrt.sim.topologies.network import Cable

CABLE = Cable(1.0, 0.0)
IN_ORDER = Costs(in_order=True)


def chain(b: Builder) -> None:
    """Each rank passes on to the next one what it got."""
    b.blocks(1)
    where = b.inp[0] if b.rank == 0 else b.out[0]
    if b.rank:
        b.recv(b.out[0], b.rank - 1)
    if b.rank + 1 < b.size:
        b.send(where, b.rank + 1)


def chain_of(size: int) -> Schedule:
    def make(rank: int) -> RankProgram:
        return build_program(chain, "bcast", rank, size)

    return Schedule("bcast", "by_hand", size, 0, make)


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("fragments", [1, 2, 8, 64])
def test_fragments_of_a_chain_follow_each_other(size: int, fragments: int) -> None:
    """64 KiB at 1000 bytes a microsecond; a rank passes a fragment on as it comes."""
    cut = fragmented(chain_of(size), 16_384, 4, fragments)
    network = Full(size, CABLE).network()
    run = simulate(cut, network, 0, costs=IN_ORDER)
    each_us = 65.536 / fragments
    assert run.time_us == pytest.approx(each_us * (fragments + size - 2), rel=1e-9)


def test_fragments_that_are_in_no_order_all_end_late() -> None:
    """Those in hand share the cable, so that the second rank can pass nothing on."""
    network = Full(3, CABLE).network()
    cut = fragmented(chain_of(3), 16_384, 4, 8, depth=8)
    assert simulate(cut, network, 0, costs=IN_ORDER).time_us == pytest.approx(73.728)
    assert simulate(cut, network, 0).time_us == pytest.approx(131.072)


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_a_rank_has_few_fragments_in_hand(depth: int) -> None:
    """A send that waits for its receive holds its fragment; each link takes 5 us."""
    costs = Costs(in_order=True, eager_nbytes=0)
    network = Full(2, Cable(1.0, 5.0)).network()
    cut = fragmented(chain_of(2), 16_384, 4, 8, depth=depth)
    last = {1: 8 * (5 + 8.192), 2: 5 + 65.536, 4: 5 + 65.536}[depth]
    assert simulate(cut, network, 0, costs=costs).time_us == pytest.approx(last)


@pytest.mark.parametrize("num_elements", [0, 1, 100, 12_345])
@pytest.mark.parametrize("fragments", [1, 3, 7])
def test_blocks_are_cut_at_lines_of_memory(num_elements: int, fragments: int) -> None:
    ring = algorithms.schedule("allreduce", "ring", 3)
    cut = fragmented(ring, num_elements, 4, fragments)
    for space, whole in zip(cut.program(1).spaces, ring.program(1).spaces, strict=True):
        assert space.counts is not None
        edges = whole.bounds(num_elements)
        for block in range(whole.nblk):
            parts = space.counts[block :: whole.nblk]
            assert len(parts) == fragments
            assert sum(parts) == edges[block + 1] - edges[block]
            assert all(part % 16 == 0 for part in parts[:-1])


def test_ranks_cut_a_vector_by_its_largest_message() -> None:
    """A ring of 4 sends quarters, a chain whole vectors."""
    ring = algorithms.schedule("allreduce", "ring", 4)
    direct = algorithms.schedule("bcast", "direct", 4)
    assert num_fragments(ring, 1 << 18, 4, 65_536) == 4
    assert num_fragments(direct, 1 << 18, 4, 65_536) == 16
    assert num_fragments(direct, 1024, 4, 65_536) == 1
    assert num_fragments(direct, 0, 4, 65_536) == 1


@pytest.mark.parametrize(("fragments", "depth"), [(0, 2), (-1, 2), (2, 0)])
def test_no_fragments_are_refused(fragments: int, depth: int) -> None:
    with pytest.raises(UsageError, match="expected 1 or more"):
        fragmented(chain_of(2), 16, 4, fragments, depth)


def test_queued_messages_leave_one_after_the_other() -> None:
    """Three messages of 10 us to three ranks: at 10, 20 and 30 us; shared: all at 30.

    Rank 1 goes on with what it got at 10 us, to rank 2, whose link is then taken by
    half.
    """
    network = Star(4, CABLE).network()
    schedule = algorithms.schedule("bcast", "direct", 4)
    shared = simulate(schedule, network, 10_000)
    queued = simulate(schedule, network, 10_000, costs=Costs(queued_nbytes=10_000))
    assert shared.messages.ended_us.tolist() == pytest.approx([30, 30, 30])
    assert sorted(queued.messages.ended_us.tolist()) == pytest.approx([10, 20, 30])
    longer = simulate(schedule, network, 10_004, costs=Costs(queued_nbytes=10_000))
    assert longer.messages.ended_us.tolist() == pytest.approx([30.012] * 3)


def gathered(b: Builder) -> None:
    """Ranks 1 and 2 send to rank 0, and then rank 1 sends to rank 3."""
    b.blocks(2)
    if b.rank in (1, 2):
        b.send(b.inp[0], 0)
    if b.rank == 1:
        b.send(b.inp[1], 3)
    if b.rank == 0:
        b.rred(b.out[0], 1, src=b.inp[0])
        b.rred(b.out[0], 2)
    if b.rank == 3:
        b.recv(b.out[1], 1)


def test_a_queued_message_that_waits_elsewhere_keeps_no_other_one() -> None:
    """Both messages to rank 0 take 20 us there. The one to rank 3 leaves at 10 us."""

    def make(rank: int) -> RankProgram:
        return build_program(gathered, "allreduce", rank, 4)

    schedule = Schedule("allreduce", "by_hand", 4, 0, make)
    run = simulate(
        *(schedule, Star(4, CABLE).network(), 20_000), costs=Costs(queued_nbytes=10_000)
    )
    assert sorted(run.messages.ended_us.tolist()) == pytest.approx([20, 20, 20])
    assert run.links.busy_us.max() == pytest.approx(20)


def test_queued_messages_leave_others_their_part_of_the_link() -> None:
    """Rank 0 sends 30 us to one rank, and twice 10 us to another: 50 us in all."""

    def author(b: Builder) -> None:
        b.blocks(5)
        if b.rank == 0:
            b.send(b.inp[0:3], 1)
            b.send(b.inp[3], 2)
            b.send(b.inp[4], 2)
        if b.rank == 1:
            b.recv(b.out[0:3], 0)
        if b.rank == 2:
            b.recv(b.out[3], 0)
            b.recv(b.out[4], 0)

    def make(rank: int) -> RankProgram:
        return build_program(author, "bcast", rank, 3)

    schedule = Schedule("bcast", "by_hand", 3, 0, make)
    run = simulate(
        *(schedule, Star(3, CABLE).network(), 50_000), costs=Costs(queued_nbytes=10_000)
    )
    assert sorted(run.messages.ended_us.tolist()) == pytest.approx([20, 40, 50])


def simulated(tmp_path: Path, *options: str) -> float:
    out = tmp_path / "out.json"
    words = ["run", "binomial", "--coll", "bcast", "--topology", "star:hosts=4"]
    asked = ["--ranks", "4", "--bytes", "1MiB", "--json", str(out), *options]
    assert main([*words, *asked]) == 0
    (run,) = json.loads(out.read_text())
    return float(run["time_us"])


def test_the_command_cuts_messages_as_ranks_do(tmp_path: Path) -> None:
    whole = simulated(tmp_path, "--in-order")
    cut = simulated(tmp_path, "--in-order", "--chunk", "64KiB")
    binomial = algorithms.schedule("bcast", "binomial", 4)
    pieces = fragmented(binomial, 1 << 18, 4, 16)
    run = simulate(pieces, Star(4).network(), 0, costs=IN_ORDER)
    assert cut == run.time_us < 0.8 * whole
    assert simulated(tmp_path, "--in-order", "--chunk", "1GiB") == whole


def test_a_chunk_of_nothing_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["run", "ring", "--topology", "star:hosts=4", "--ranks", "4"]
    assert main([*words, "--chunk", "0"]) == 2
    assert "--chunk 0: expected 1 byte or more" in capsys.readouterr().err
