# SPDX-License-Identifier: Apache-2.0
"""Which transport parameters the tuner tries, and when it gives them up."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tuning_recordings import DIRECT, NATIVE, Truth, record
from tuning_recordings import TRUTH as CROSSING

from commrt.backends.staged.variants import copy_variants, piece_variants
from commrt.backends.variants import transport_variants
from commrt.select.facts import Candidate, CommFacts, LinkClass
from commrt.tuning.job import middle
from commrt.tuning.samples import Failure
from commrt.tuning.variants import sizes_to_refine, variants_to_try

TWO_SHOTS = Candidate("shm", "direct", {"shots": 2})
WIDE = Candidate("shm", "direct", {"chunk": 524288})
DEEP = Candidate("shm", "direct", {"depth": 4})
TRUTH: Truth = {
    DIRECT: lambda n: 0.20 + 6e-5 * n,
    NATIVE: lambda n: 0.75 + 5e-5 * n,
    WIDE: lambda n: 0.20 + 5e-5 * n,
    DEEP: lambda n: 0.25 + 7e-5 * n,
}
MAX_NBYTES = 32 << 20


def tried(
    truth: Truth, launches: int, held_out: bool = False
) -> dict[int, set[Candidate]]:
    recording = record(3, truth, launches=launches, held_out=0)
    found: dict[int, set[Candidate]] = {}
    for item in variants_to_try(recording, 2, "float32", MAX_NBYTES, held_out=held_out):
        found.setdefault(item.nbytes, set()).add(Candidate.parse(item.candidate))
    return found


@pytest.mark.parametrize(
    ("candidate", "nbytes", "names"),
    [
        (NATIVE, 1 << 20, set()),
        (DIRECT, 48, set()),
        (DIRECT, 64, {"inline"}),
        (DIRECT, 560, {"inline"}),
        (DIRECT, 640, {"inline"}),
        (DIRECT, 2176, set()),
        (TWO_SHOTS, 1024, {"inline"}),
        (DIRECT, 4096, set()),
        (WIDE, 1 << 20, set()),
        (TWO_SHOTS, 131072, set()),
        (TWO_SHOTS, 262144, {"chunk"}),
        (TWO_SHOTS, 524288, {"chunk", "store"}),
        (TWO_SHOTS, 1 << 20, {"chunk", "depth", "reuse", "store"}),
        (TWO_SHOTS, 8 << 20, {"chunk", "depth", "reuse", "store"}),
        (Candidate("shm", "no_such_algorithm"), 1 << 20, set()),
    ],
)
def test_one_parameter_at_a_time_where_it_changes_something(
    candidate: Candidate, nbytes: int, names: set[str]
) -> None:
    found = transport_variants("allreduce", candidate, 2, nbytes, "float32")
    changed = [
        dict(set(one.params.items()) - set(candidate.params.items())) for one in found
    ]
    assert {name for change in changed for name in change} == names
    assert all(len(change) == 1 for change in changed)
    assert len(set(found)) == len(found)


def test_a_short_budget_tries_what_matters_most() -> None:
    found = transport_variants(
        "allreduce", TWO_SHOTS, 2, 8 << 20, "float32", thorough=False
    )
    names = {name for one in found for name in one.params}
    assert names == {"shots", "chunk", "store"}


@pytest.mark.parametrize(
    ("crowded", "nbytes", "thorough", "found"),
    [
        (True, 8, True, [0, 4]),
        (True, 1 << 19, False, [0]),
        (True, 1 << 20, True, []),
        (False, 8, True, []),
    ],
)
def test_how_soon_to_yield_is_tried_where_ranks_share_cores_and_switches_show(
    crowded: bool, nbytes: int, thorough: bool, found: list[int]
) -> None:
    variants = transport_variants(
        *("allreduce", TWO_SHOTS, 4, nbytes, "float32"),
        thorough=thorough,
        crowded=crowded,
    )
    assert [one.params["spins"] for one in variants if "spins" in one.params] == found


@pytest.mark.parametrize("link_class", ["oversubscribed", "near"])
def test_a_crowd_is_known_by_its_link_class(link_class: LinkClass) -> None:
    facts = CommFacts(4, 1, 4, 2, link_class)
    recording = record(3, TRUTH, launches=1, held_out=0, facts=facts)
    items = variants_to_try(recording, 4, "float32", MAX_NBYTES, held_out=False)
    tried_spins = any("spins" in item.candidate for item in items)
    assert tried_spins == (link_class == "oversubscribed")


@pytest.mark.parametrize(
    ("coll", "nbytes", "found"),
    [
        ("allreduce", 512, [48]),
        ("allreduce", 1024, [48]),
        ("allreduce", 2048, [48, 2096]),
        ("bcast", 1024, [48]),
        ("bcast", 4096, []),
    ],
)
def test_lines_are_tried_where_they_would_be_used_and_otherwise_where_not(
    coll: str, nbytes: int, found: list[int]
) -> None:
    variants = transport_variants(coll, DIRECT, 2, nbytes, "float32")
    assert [one.params["inline"] for one in variants if "inline" in one.params] == found


def test_chunks_that_cut_alike_are_one() -> None:
    # Two messages of 256 KiB: by default they are left whole, as by 524288 bytes.
    found = transport_variants("allreduce", TWO_SHOTS, 2, 1 << 19, "float32")
    chunks = [one.params["chunk"] for one in found if "chunk" in one.params]
    assert chunks == [65536, 131072]


def test_what_flows_one_way_is_cut_smaller() -> None:
    found = transport_variants("bcast", DIRECT, 2, 1 << 19, "float32")
    chunks = [one.params["chunk"] for one in found if "chunk" in one.params]
    assert chunks == [65536, 262144, 524288]


def test_the_leader_s_are_tried_and_what_does_not_win_is_given_up() -> None:
    first = tried(TRUTH, launches=1)
    assert {WIDE, DEEP} <= first[6291456]
    assert not [nbytes for nbytes in first if 2096 < nbytes <= 8192]
    later = tried(TRUTH, launches=3)
    assert WIDE in later[6291456]
    assert all(DEEP not in variants for variants in later.values())


@pytest.mark.parametrize(
    ("lost_at", "given_up"), [({6 << 20}, set()), ({6 << 20, 12 << 20},) * 2]
)
def test_who_is_ahead_on_both_sides_of_a_size_goes_on_to_be_tried_there(
    lost_at: set[int], given_up: set[int]
) -> None:
    """Its launches there may have met an unusual state of the machine."""

    def mostly_ahead(nbytes: int) -> float:
        return TRUTH[DIRECT](nbytes) * (1.02 if nbytes in lost_at else 0.8)

    found = tried({**TRUTH, WIDE: mostly_ahead}, launches=3)
    around = {3 << 20, 6 << 20, 12 << 20, 24 << 20}
    assert {nbytes for nbytes in around if WIDE not in found[nbytes]} == given_up


def test_a_slower_schedule_has_no_variants() -> None:
    faster = Candidate("shm", "recursive_doubling")
    truth = {**TRUTH, faster: lambda n: 0.1 + 1e-5 * n}
    found = tried(truth, launches=1)
    assert {one.algorithm for variants in found.values() for one in variants} == {
        "recursive_doubling"
    }


@pytest.mark.parametrize(("slower", "found"), [(1.05, True), (1.2, False)])
def test_who_is_close_behind_the_leader_is_tried_too(
    slower: float, found: bool
) -> None:
    close = Candidate("shm", "recursive_doubling")
    truth = {DIRECT: TRUTH[DIRECT], close: lambda n: slower * TRUTH[DIRECT](n)}
    tried_at = tried(truth, launches=1)
    names = {one.algorithm for one in tried_at[6291456]}
    assert names == ({"direct", "recursive_doubling"} if found else {"direct"})


def test_what_failed_is_not_tried_again() -> None:
    recording = record(3, TRUTH, launches=1, held_out=0)
    recording.failures.append(Failure(2, "allreduce", 6291456, WIDE, "hung"))
    items = variants_to_try(recording, 2, "float32", MAX_NBYTES, held_out=False)
    assert items
    assert str(WIDE) not in {item.candidate for item in items}
    elsewhere = replace(recording.failures[0], ranks=4)
    recording.failures[:] = [elsewhere]
    items = variants_to_try(recording, 2, "float32", MAX_NBYTES, held_out=False)
    assert str(WIDE) in {item.candidate for item in items}


def test_a_judging_launch_measures_what_would_be_chosen() -> None:
    between = tried(TRUTH, launches=3, held_out=True)
    assert all(nbytes not in tried(TRUTH, launches=1) for nbytes in between)
    assert WIDE in between[6291456 * 9 // 5]


def test_where_the_choice_changes_later_launches_measure_the_size_between() -> None:
    # With TRUTH of the recordings: crossings at 1667 B and at 240 000 B.
    recording = record(2, CROSSING, launches=3, held_out=1)
    found = sizes_to_refine(recording, 2, "float32", MAX_NBYTES)
    assert found == [("allreduce", 1024), ("allreduce", 227024)]
    assert sizes_to_refine(recording, 4, "float32", MAX_NBYTES) == []


def test_a_size_once_begun_is_gone_on_with() -> None:
    recording = record(3, TRUTH, launches=3, held_out=0)
    before = sizes_to_refine(recording, 2, "float32", MAX_NBYTES)
    assert ("allreduce", 16384) not in before
    begun = replace(recording.samples[0], nbytes=16384)
    recording.samples.append(begun)
    after = sizes_to_refine(recording, 2, "float32", MAX_NBYTES)
    assert ("allreduce", 16384) in after


@pytest.mark.parametrize(
    ("op", "ranks", "low", "high", "found"),
    [
        ("allreduce", 2, 512, 2048, 1024),
        ("allreduce", 2, 8 << 20, 16 << 20, 8 << 20),
        ("reduce_scatter", 3, 516, 2052, 1032),
        ("barrier", 2, 0, 1, 0),
    ],
)
def test_halfway_is_a_whole_number_of_elements(
    op: str, ranks: int, low: int, high: int, found: int
) -> None:
    assert middle(op, ranks, "float32", low, high) == found


def test_what_wins_between_near_cores_alone_goes_on_to_be_tried() -> None:
    """As many far launches, in which it loses, do not outvote the near ones."""
    near = record(3, {**TRUTH, WIDE: lambda n: 0.1 + 2e-5 * n}, launches=3, held_out=0)
    for sample in [*near.samples]:
        slower = 2.0 if sample.candidate == WIDE else 1.0
        times = tuple(slower * us for us in sample.us)
        far = replace(sample, launch=sample.launch + 3, us=times, link_class="far")
        near.samples.append(far)
        near.launches[far.launch] = replace(
            near.launches[sample.launch], index=far.launch
        )
    items = variants_to_try(near, 2, "float32", MAX_NBYTES, held_out=False)
    assert str(WIDE) in {one.candidate for one in items if one.nbytes == 6 << 20}


def test_copies_by_kernels_are_tried_of_short_staged_calls() -> None:
    ring = Candidate("staged", "ring", {"piece": 64})
    [found] = copy_variants(ring, 16 << 10)
    assert found == Candidate("staged", "ring", {"piece": 64, "copies": "kernel"})
    assert copy_variants(found, 8) == []
    assert copy_variants(ring, (16 << 10) + 1) == []
    assert copy_variants(Candidate("nccl", "native"), 8) == []


def test_pieces_of_staged_calls_are_tried_where_they_differ() -> None:
    ring = Candidate("staged", "ring")

    def pieces(full_nbytes: int) -> list[int]:
        return [int(one.params["piece"]) for one in piece_variants(ring, full_nbytes)]

    assert pieces(1 << 18) == []  # one piece in any case
    assert pieces(1 << 20) == [1 << 18]
    assert pieces(4 << 20) == [1 << 18, 1 << 22]
    assert pieces(64 << 20) == [1 << 18, 1 << 22, 1 << 24]
    assert piece_variants(Candidate("nccl", "ring"), 64 << 20) == []
    assert piece_variants(Candidate("staged", "ring", {"piece": 9}), 64 << 20) == []


def test_the_leader_on_devices_is_tried_with_other_pieces() -> None:
    staged, native = Candidate("staged", "direct"), Candidate("nccl", "native")
    truth: Truth = {staged: lambda n: 9 + 6e-5 * n, native: lambda n: 20 + 9e-5 * n}
    found = tried(truth, launches=1)
    wanted = {Candidate("staged", "direct", {"piece": n}) for n in (1 << 18, 1 << 22)}
    assert wanted <= found[6 << 20]
    assert all("chunk" not in one.params for each in found.values() for one in each)
