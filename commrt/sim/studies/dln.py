# SPDX-License-Identifier: Apache-2.0
"""Shifted halving-doubling on Distributed Loop Networks, after Nguyen and Wahib.

"An Allreduce Algorithm and Network Co-design for Large-Scale Training of Distributed
Deep Learning" (CCGRID 2021) simulates shifted halving-doubling against a ring and
halving-doubling, on Distributed Loop Networks and fat trees. The paper is not freely
available; its settings are known from the author's public run scripts and a talk's
slides, and the rest is chosen here. ``study_dln`` prints which is which.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from commrt.algorithms import schedule
from commrt.sim.quantities import nbytes_text
from commrt.sim.simulate import simulate
from commrt.sim.topologies.fat_trees import FatTree
from commrt.sim.topologies.loop_networks import LoopNetwork
from commrt.sim.topologies.network import Cable, Network

__all__ = ["Row", "rows", "study_dln"]

_MIB = 1 << 20
_GBYTES_PER_S = 12.5
_CABLE_US, _SWITCH_US, _SPINE_US = 0.026, 0.090, 0.400
_SIDE_US = 7.5

_KNOWN = (
    "known (author's run scripts and platform, a talk's slides): loop networks with "
    "8 or 16 hosts a switch and 2 cables a shortcut, EDR 12.5 GB/s, cable 26 ns, "
    "switch 90 ns, spine 400 ns, 7.5 us on either side of a message; 128 to 512 nodes",
    "chosen here: lengths, 1,024 ranks, a full fat tree of 36-port switches with "
    "static routing as the other network, no cost of reductions, block placement",
    "published (a talk's slide, settings not printed there): shifted halving-doubling "
    "takes 31, 71 and 90 % less than the ring on the fat tree, about 50 % less than "
    "halving-doubling there, about 25 % less than halving-doubling on the loop "
    "network; the ring itself gains 2 to 5 % from the loop network",
)


@dataclass(frozen=True)
class Row:
    """Simulated times of one length on one number of ranks, in microseconds."""

    ranks: int
    hosts: int
    """Hosts of a switch of the loop network."""
    nbytes: int
    tree_ring_us: float
    tree_halving_us: float
    loop_ring_us: float
    loop_halving_us: float
    loop_shifted_us: float


def loop(ranks: int, hosts: int) -> Network:
    """Return the loop network: two cables a shortcut."""
    cable = Cable(_GBYTES_PER_S, _CABLE_US + _SWITCH_US, 2)
    near = Cable(_GBYTES_PER_S, _SIDE_US + _CABLE_US + _SWITCH_US / 2)
    return LoopNetwork(ranks // hosts, hosts, cable, near).network()


def tree(ranks: int) -> Network:
    """Return the fat tree: 16 hosts a switch, and a spine for each of them."""
    each = min(16, ranks)
    near = Cable(_GBYTES_PER_S, _SIDE_US + _CABLE_US + _SWITCH_US / 2)
    far = Cable(_GBYTES_PER_S, _CABLE_US + (_SWITCH_US + _SPINE_US) / 2)
    return FatTree((each, ranks // each), (1, each), (near, far)).network()


def rows(ranks: int, hosts: int, lengths: list[int]) -> Iterator[Row]:
    """Yield the simulated times for each length."""
    looped, treed = loop(ranks, hosts), tree(ranks)
    ring = schedule("allreduce", "ring", ranks)
    halving = schedule("allreduce", "halving_doubling", ranks)
    shifted = schedule(
        "allreduce", "shifted_halving_doubling", ranks, params={"k": hosts}
    )
    for nbytes in lengths:
        cases = (
            *((ring, treed), (halving, treed)),
            *((ring, looped), (halving, looped), (shifted, looped)),
        )
        times = [simulate(*case, nbytes).time_us for case in cases]
        yield Row(ranks, hosts, nbytes, *times)
    ring.forget_programs()


def study_dln(quick: bool = False) -> Iterator[str]:
    """Yield the lines of the study.

    Args:
        quick: 128 ranks and two lengths only.
    """
    yield "Shifted halving-doubling on distributed loop networks: simulated times"
    yield from _KNOWN
    yield (
        "change of shifted halving-doubling on the loop network, against ring and "
        "halving-doubling (HD) on the fat tree (FT) and on the loop network (DLN), in "
        "percent; negative: it is faster; all simulated"
    )
    yield (
        f"{'ranks':>6}{'hosts':>6}{'bytes':>9}{'time':>12}{'FT ring':>9}{'FT HD':>8}"
        f"{'DLN ring':>10}{'DLN HD':>8}{'ring DLN/FT':>13}"
    )
    worst: list[str] = []
    sizes = (
        ((128, 8),)
        if quick
        else tuple(
            (ranks, hosts) for ranks in (128, 256, 512, 1024) for hosts in (8, 16)
        )
    )
    lengths = [_MIB, 32 * _MIB] if quick else [1 << n for n in range(20, 29, 2)]
    for ranks, hosts in sizes:
        for row in rows(ranks, hosts, lengths):
            own = row.loop_shifted_us
            changes = {
                "FT ring": _change(own, row.tree_ring_us),
                "FT HD": _change(own, row.tree_halving_us),
                "DLN ring": _change(own, row.loop_ring_us),
                "DLN HD": _change(own, row.loop_halving_us),
            }
            where = f"{ranks} ranks, {hosts} a switch, {nbytes_text(row.nbytes)}"
            worst += [
                f"{where}: {change:+.0f} % against {name}"
                for name, change in changes.items()
                if change > 0.5
            ]
            ring = _change(row.loop_ring_us, row.tree_ring_us)
            yield (
                f"{ranks:>6}{hosts:>6}{nbytes_text(row.nbytes):>9}{own / 1000:>9.3f} ms"
                f"{changes['FT ring']:>+9.0f}{changes['FT HD']:>+8.0f}"
                f"{changes['DLN ring']:>+10.0f}{changes['DLN HD']:>+8.0f}{ring:>+13.1f}"
            )
    yield f"where it loses (simulated): {'; '.join(worst) or 'nowhere above'}"


def _change(ours_us: float, theirs_us: float) -> float:
    return 100.0 * (ours_us / theirs_us - 1)
