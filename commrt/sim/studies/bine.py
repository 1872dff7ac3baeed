# SPDX-License-Identifier: Apache-2.0
"""Bine trees send less between groups of hosts, after De Sensi and others.

"Bine Trees: Enhancing Collective Operations by Optimizing Communication Locality" (SC
2025) reports up to 33 % less traffic on global links than binomial trees have, on four
supercomputers. ``study_bine`` sends both over a dragonfly whose groups are fully
joined, and counts the bytes on the links between groups. A job's first rank may lie
anywhere within its group, so figures are means over such places.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from commrt.algorithms import schedule
from commrt.schedule.ir import ParamValue, full_multiple
from commrt.sim.simulate import Simulated, simulate
from commrt.sim.topologies.dragonflies import Dragonfly
from commrt.sim.topologies.network import Cable, Network
from commrt.vocabulary.operations import operation

__all__ = ["PAIRS", "Pair", "Row", "rows", "study_bine"]

_GBYTES_PER_S = 25.0
_HOST_US, _GLOBAL_US = 0.9, 1.0
_NBYTES = 1 << 20
_PLACES = 4

_KNOWN = (
    "published (abstract): up to 33 % less traffic on global links than binomial "
    "trees, on four supercomputers (dragonfly, dragonfly+, fat tree, torus); "
    "the theory: partners of a step are 2/3 as far apart",
    "chosen here: a dragonfly of groups with 16 to 64 hosts, one rank a host, block "
    "placement that begins at 4 places of the first group; 25 GB/s for hosts and for "
    "each cable between two groups, 0.9 and 1 us",
)


@dataclass(frozen=True)
class Pair:
    """An operation, and the two algorithms that are compared."""

    coll: str
    usual: str
    """The usual algorithm: a binomial tree, or a butterfly."""
    usual_params: tuple[tuple[str, ParamValue], ...] = ()
    bine_params: tuple[tuple[str, ParamValue], ...] = ()


PAIRS = (
    Pair("bcast", "binomial", (), (("form", "tree"),)),
    Pair("reduce", "binomial", (), (("form", "tree"),)),
    Pair("scatter", "binomial"),
    Pair("gather", "binomial"),
    Pair("allgather", "recursive_doubling"),
    Pair("reduce_scatter", "halving_doubling"),
    Pair("allreduce", "halving_doubling", (), (("form", "halving"),)),
    Pair("allreduce", "recursive_doubling", (), (("form", "whole"),)),
)


@dataclass(frozen=True)
class Row:
    """Both algorithms of a pair; means over places of the first rank in its group."""

    pair: Pair
    ranks: int
    hosts: int
    """Hosts of a group."""
    root: str
    """0, or any: the mean over some; none where the operation has none."""
    usual_nbytes: float
    """Bytes on links between groups."""
    bine_nbytes: float
    usual_us: float
    """Simulated time."""
    bine_us: float


def rows(pair: Pair, ranks: int, hosts: int) -> Iterator[Row]:
    """Yield what both algorithms send between groups of so many hosts.

    Operations with a root have two rows: with root 0, and with other ones.
    """
    groups = -(-(ranks + hosts) // hosts)
    cable, near = Cable(_GBYTES_PER_S, _GLOBAL_US), Cable(_GBYTES_PER_S, _HOST_US)
    network = Dragonfly(groups, 1, hosts, groups - 1, cable, cable, near).network()
    places = [hosts * at // _PLACES for at in range(_PLACES)]
    any_root = [ranks * at // _PLACES + at for at in range(_PLACES)]
    asked = {"none": [0] * _PLACES}
    if operation(pair.coll).has_root:
        asked = {"0": [0] * _PLACES, "any": any_root}
    for root, roots in asked.items():
        cases = [*zip(roots, places, strict=True)]
        usual = _means(network, pair.coll, pair.usual, pair.usual_params, ranks, cases)
        bine = _means(network, pair.coll, "bine", pair.bine_params, ranks, cases)
        yield Row(pair, ranks, hosts, root, usual[0], bine[0], usual[1], bine[1])


def _means(
    network: Network,
    coll: str,
    name: str,
    params: tuple[tuple[str, ParamValue], ...],
    ranks: int,
    cases: list[tuple[int, int]],
) -> tuple[float, float]:
    """Return bytes between groups and time, as means over roots and first hosts."""
    multiple = 4 * full_multiple(coll, ranks)
    nbytes = multiple * max(1, _NBYTES // multiple)
    found = []
    for root, place in cases:
        one = schedule(coll, name, ranks, root, dict(params))
        run = simulate(one, network, nbytes, np.arange(ranks) + place)
        found.append((_between_groups(run), run.time_us))
        one.forget_programs()
    of_bytes, of_times = zip(*found, strict=True)
    return float(np.mean(of_bytes)), float(np.mean(of_times))


def _between_groups(run: Simulated) -> float:
    """Return the bytes on links from router to router; a group has one router."""
    network = run.network
    ends = np.minimum(network.links.tails, network.links.heads)
    return float(run.links.nbytes[ends >= network.num_hosts].sum())


def study_bine(quick: bool = False) -> Iterator[str]:
    """Yield the lines of the study.

    Args:
        quick: 64 ranks only.
    """
    yield "Bine trees and butterflies: bytes between groups, and times, all simulated"
    yield from _KNOWN
    yield (
        "bytes on links between groups, in those of the usual algorithm; and the same "
        f"for simulated times of {_NBYTES >> 20} MiB"
    )
    yield (
        f"{'operation':<16}{'against':<20}{'root':>5}{'ranks':>7}{'hosts':>7}"
        f"{'bytes':>9}{'time':>8}"
    )
    least, more = 1.0, []
    sizes = (64,) if quick else (64, 100, 256, 500)
    for ranks in sizes:
        for hosts in (16, 24, 64):
            if ranks <= hosts:
                continue
            for row in (row for pair in PAIRS for row in rows(pair, ranks, hosts)):
                pair, part = row.pair, row.bine_nbytes / row.usual_nbytes
                if pair.usual == "binomial":
                    least = min(least, part)
                if part > 1.005:
                    more.append(
                        f"{pair.coll} against {pair.usual}, root {row.root}, {ranks} "
                        f"ranks, {hosts} hosts: {part:.2f}"
                    )
                yield (
                    f"{pair.coll:<16}{pair.usual:<20}{row.root:>5}{ranks:>7}{hosts:>7}"
                    f"{part:>9.2f}{row.bine_us / row.usual_us:>8.2f}"
                )
    yield (
        f"the least against a binomial tree: {least:.2f} of its bytes, that is "
        f"{100 * (1 - least):.0f} % less (simulated)"
    )
    yield f"where it sends more (simulated): {'; '.join(more) or 'nowhere above'}"
