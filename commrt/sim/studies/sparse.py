# SPDX-License-Identifier: Apache-2.0
"""Break-even points of sparse allreduces, after Renggli, Nguyen and others.

SparCML (Renggli et al., SC 2019, arXiv 1802.08021) sums sparse vectors by recursive
doubling or by a split with an allgather. Nguyen, Wahib and Takano ("Topology-aware
sparse allreduce for large-scale deep learning", IPCCC 2019) use rings within nodes and
between them; the author's public logs have times that were simulated for ABCI. This
study sends messages of the lengths that entries at random places give, over the same
machine, and finds the density from which the best dense allreduce is faster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from commrt.sim.costs import Costs
from commrt.sim.network_files import load_network
from commrt.sim.simulate import simulate
from commrt.sim.topologies.network import Network
from commrt.sim.traffic import Message, Round, schedule_of_rounds

__all__ = ["ALGORITHMS", "Case", "break_even", "fill", "study_sparse", "times_us"]

LENGTH = 16_777_216
GPUS = 4
"""Of a node."""
_ITEM, _INDEX = 4, 4
DENSE = ("dense ring", "dense two rings")
_MERGING = Costs(reduce_us_per_byte=2.2e-3 / (_ITEM + _INDEX))

_KNOWN = (
    "known (author's public logs, code): 16,777,216 elements of 4 bytes with indices "
    "of 4, entries at places drawn evenly; ABCI, nodes of 4 GPUs; a piece is sent "
    "dense once its entries take as many bytes",
    "chosen here: expected numbers of entries, the same on all ranks; an entry is "
    "merged in 2.2 ns, as on commrt's machines, and dense elements are added at no "
    "cost; ABCI's platform as commrt-sim has it; the split's allgather is a ring",
)
PUBLISHED_MS: dict[tuple[int, float], tuple[float, ...]] = {
    (8, 0.002): (20.5, 8.07, 0.42, 0.50, 17.6, 0.54),
    (8, 0.031): (20.5, 8.07, 6.2, 6.8, 18.6, 7.2),
    (8, 0.0625): (20.5, 8.07, 11.9, 12.4, 19.7, 13.0),
    (16, 0.0078): (22.0, 11.0, 4.5, 4.7, 26.7, 4.1),
    (16, 0.0156): (22.0, 11.0, 8.9, 8.9, 27.1, 7.6),
    (16, 0.031): (22.0, 11.0, 17.0, 16.1, 27.9, 13.7),
    (64, 0.002): (23.6, 13.4, 5.6, 5.4, 27.7, 4.7),
    (64, 0.0078): (23.6, 13.4, 20.9, 17.9, 28.1, 14.9),
    (64, 0.0625): (23.6, 13.4, 78.2, 46.9, 31.1, 23.3),
}
"""Times of the public logs by ranks and density, in the order of ``ALGORITHMS``."""


@dataclass(frozen=True)
class Case:
    """Ranks whose vectors have entries at so many of their places."""

    ranks: int
    density: float
    length: int = LENGTH
    gpus: int = GPUS

    @property
    def nodes(self) -> int:
        """Nodes of the ranks."""
        return -(-self.ranks // self.gpus)

    def merges(self, ranks: int) -> bool:
        """Return whether a piece of the sum of so many ranks travels as entries."""
        return fill(ranks, self.density) * (_ITEM + _INDEX) < _ITEM

    def nbytes(self, length: float, ranks: int) -> int:
        """Return the bytes of a range of the sum of so many ranks."""
        part = fill(ranks, self.density)
        return round(length * min(part * (_ITEM + _INDEX), _ITEM))


def fill(ranks: int, density: float) -> float:
    """Return the expected part of all places at which one of the ranks has an entry."""
    return float(1.0 - (1.0 - density) ** ranks)


# -- messages --------------------------------------------------------------------------


def _shifted(ranks: list[int], nbytes: int, reduces: bool = False) -> list[Message]:
    """Return a message from each rank to the next one, the last's to the first."""
    if len(ranks) == 1:
        return []
    following = [*ranks[1:], ranks[0]]
    pairs = zip(ranks, following, strict=True)
    return [Message(one, other, nbytes, reduces) for one, other in pairs]


def _nodes(case: Case) -> list[list[int]]:
    every = range(case.ranks)
    return [[*every[at : at + case.gpus]] for at in range(0, case.ranks, case.gpus)]


def _rails(case: Case) -> list[list[int]]:
    """Return the ranks that have equal places in their nodes."""
    return [[*range(place, case.ranks, case.gpus)] for place in range(case.gpus)]


def _together(groups: list[list[int]], nbytes: int, reduces: bool = False) -> Round:
    return [each for group in groups for each in _shifted(group, nbytes, reduces)]


def _dense_ring(case: Case) -> Iterator[Round]:
    part = case.length * _ITEM // case.ranks
    for _ in range(2 * (case.ranks - 1)):
        yield _shifted([*range(case.ranks)], part)


def _dense_two_rings(case: Case) -> Iterator[Round]:
    inside = case.length * _ITEM // case.gpus
    for _ in range(case.gpus - 1):
        yield _together(_nodes(case), inside)
    for _ in range(2 * (case.nodes - 1)):
        yield _together(_rails(case), inside // case.nodes)
    for _ in range(case.gpus - 1):
        yield _together(_nodes(case), inside)


def _recursive_doubling(case: Case) -> Iterator[Round]:
    for bit in range(case.ranks.bit_length() - 1):
        nbytes = case.nbytes(case.length, 1 << bit)
        every = range(case.ranks)
        merges = case.merges(1 << bit)
        yield [Message(rank, rank ^ (1 << bit), nbytes, merges) for rank in every]


def _split(case: Case, last: int) -> Iterator[Round]:
    """Yield direct messages to the owner of each range, and a ring of the sums."""
    every = range(case.ranks)
    own = case.nbytes(case.length / case.ranks, 1)
    pairs = ((one, other) for one in every for other in every if one != other)
    yield [Message(*pair, own, case.merges(1)) for pair in pairs]
    for _ in range(case.ranks - 1):
        yield _shifted([*every], last)


def _sparse_split(case: Case) -> Iterator[Round]:
    return _split(case, case.nbytes(case.length / case.ranks, case.ranks))


def _dense_split(case: Case) -> Iterator[Round]:
    return _split(case, case.length * _ITEM // case.ranks)


def _two_rings(case: Case) -> Iterator[Round]:
    inside = case.length / case.gpus
    for summed in range(1, case.gpus):
        nbytes = case.nbytes(inside, summed)
        yield _together(_nodes(case), nbytes, case.merges(summed))
    between = inside / case.nodes
    for summed in range(1, case.nodes):
        before = summed * case.gpus
        nbytes = case.nbytes(between, before)
        yield _together(_rails(case), nbytes, case.merges(before))
    for _ in range(case.nodes - 1):
        yield _together(_rails(case), case.nbytes(between, case.ranks))
    for _ in range(case.gpus - 1):
        yield _together(_nodes(case), case.nbytes(inside, case.ranks))


ALGORITHMS: dict[str, Callable[[Case], Iterator[Round]]] = {
    "dense ring": _dense_ring,
    "dense two rings": _dense_two_rings,
    "recursive doubling": _recursive_doubling,
    "split": _sparse_split,
    "split, dense": _dense_split,
    "two rings": _two_rings,
}
"""The rounds of each algorithm. Those of two rings need whole nodes."""


def times_us(case: Case, network: Network, names: list[str]) -> dict[str, float]:
    """Return the simulated time of some algorithms; rank r is on host r."""
    hosts = np.arange(case.ranks)
    found = {}
    for name in names:
        made = schedule_of_rounds(name, case.ranks, ALGORITHMS[name](case))
        run = simulate(made, network, 0, hosts, itemsize=1, costs=_MERGING)
        found[name] = run.time_us
    return found


def break_even(ranks: int, network: Network, against: list[str]) -> tuple[str, float]:
    """Return the sparse algorithm that is ahead the longest, and up to which density.

    It is compared with the quickest of some dense ones. The density is within 2 %.
    """
    dense = min(times_us(Case(ranks, 1.0), network, against).values())
    sparse = [name for name in ALGORITHMS if name not in DENSE]

    def ahead(density: float, names: list[str]) -> list[str]:
        times = times_us(Case(ranks, density), network, names)
        return [name for name, time in times.items() if time < dense]

    low, high, left = 1e-5, 1.0, sparse
    if at_most := ahead(high, sparse):
        return at_most[0], high
    while high / low > 1.02:
        middle = (low * high) ** 0.5
        found = ahead(middle, left)
        if found:
            low, left = middle, found
        else:
            high = middle
    return left[0], low


def study_sparse(quick: bool = False) -> Iterator[str]:
    """Yield the lines of the study.

    Args:
        quick: 8 ranks only.
    """
    network = load_network("abci").network
    yield "Sparse allreduce: simulated ms, those of the public logs in brackets"
    yield from _KNOWN
    names = [*ALGORITHMS]
    yield f"{'ranks':>6}{'density':>9}" + "".join(f"{name:>20}" for name in names)
    for (ranks, density), logged in PUBLISHED_MS.items():
        if quick and ranks > 8:
            continue
        found = times_us(Case(ranks, density), network, names)
        pairs = zip(found.values(), logged, strict=True)
        cells = [f"{own / 1e3:.2f} ({theirs:g})" for own, theirs in pairs]
        yield f"{ranks:>6}{density:>8.2%} " + "".join(f"{each:>20}" for each in cells)
    yield (
        "density up to which a sparse allreduce is quicker, times the number of ranks "
        "(simulated); the public logs have 0.3 on 8 ranks and 0.45 on 16 to 64 against "
        "the best dense one"
    )
    yield f"{'ranks':>6}{'against the best dense one':>40}{'against a dense ring':>40}"
    for ranks in (8,) if quick else (8, 16, 32, 64):
        line = f"{ranks:>6}"
        for against in ([*DENSE], ["dense ring"]):
            name, density = break_even(ranks, network, against)
            line += f"{f'{ranks * density:.2f} ({name})':>40}"
        yield line
