# SPDX-License-Identifier: Apache-2.0
"""The cells of the sealed predictions, and who can run them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache

from commrt import algorithms
from commrt.bench.sealed.networks import FITTED_ON, NETWORKS
from commrt.cluster.topology import Topology
from commrt.planning.host_plans import distinct
from commrt.schedule.ir import Schedule, full_multiple
from commrt.select.facts import Candidate

__all__ = ["ITEM_NBYTES", "Cell", "cells", "cells_of", "fitting_cells", "runners"]

ITEM_NBYTES = 4
"""Elements are of type float32."""
_OPS = ("allreduce", "reduce", "bcast", "reduce_scatter", "allgather", "alltoall")
_NBYTES = (16_384, 40_960, 98_304, 229_376, 393_216, 589_824, 917_504)
_FITTED_NBYTES = (24_576, 163_840, 655_360)
_BACKEND = "tcp"


@dataclass(frozen=True)
class Cell:
    """An operation of one length on one network."""

    network: str
    op: str
    nbytes: int
    """Wanted bytes of the full vector: all ranks' blocks together."""

    @property
    def topology(self) -> Topology:
        """The network; KeyError for one of an earlier round."""
        return {**FITTED_ON, **NETWORKS}[self.network]

    @property
    def ranks(self) -> int:
        """One on each host."""
        return len(self.topology.hosts)

    @property
    def num_elements(self) -> int:
        """Elements of the full vector: as many as the ranks can share."""
        unit = full_multiple(self.op, self.ranks)
        return max(1, self.nbytes // ITEM_NBYTES // unit) * unit

    @property
    def key(self) -> str:
        """Its name in files."""
        return f"{self.network} {self.op} {self.nbytes}"


def cells() -> list[Cell]:
    """Return the cells that are predicted."""
    return [
        Cell(name, op, nbytes) for name in NETWORKS for op in _OPS for nbytes in _NBYTES
    ]


def fitting_cells() -> list[Cell]:
    """Return the cells that shape the numbers: other networks, other lengths."""
    return [
        Cell(name, op, nbytes)
        for name in FITTED_ON
        for op in _OPS
        for nbytes in _FITTED_NBYTES
    ]


def cells_of(keys: Iterable[str]) -> list[Cell]:
    """Return the cells with these names."""
    words = [key.split() for key in keys]
    return [Cell(name, op, int(nbytes)) for name, op, nbytes in words]


def runners(cell: Cell) -> Iterator[tuple[Candidate, Schedule]]:
    """Yield the algorithms that can run a cell, each program once."""
    for one in _candidates(cell.op, cell.ranks):
        params = tuple(one.params.items())
        yield one, _schedule(cell.op, one.algorithm, params, cell.ranks)


@lru_cache(maxsize=1024)
def _candidates(op: str, ranks: int) -> tuple[Candidate, ...]:
    nodes = tuple(range(ranks))
    found = [
        Candidate(_BACKEND, name, params)
        for name in algorithms.names(op, ranks, nodes)
        for params in algorithms.offered_params(op, name, ranks, nodes)
    ]
    return tuple(distinct(op, found, nodes))


@lru_cache(maxsize=1024)
def _schedule(
    op: str, algorithm: str, params: tuple[tuple[str, int | str], ...], ranks: int
) -> Schedule:
    spans = algorithms.get(op, algorithm).spans_nodes
    nodes = tuple(range(ranks)) if spans else None
    return algorithms.schedule(op, algorithm, ranks, 0, dict(params), nodes)
