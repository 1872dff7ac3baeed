# SPDX-License-Identifier: Apache-2.0
"""Tori and meshes of any number of dimensions.

Each router has one host and a cable to its neighbours in each dimension. A message goes
along one dimension after the other, the shorter way round; of two equal ways the rising
one. This is dimension-order routing: Dally and Seitz, "Deadlock-free message routing in
multiprocessor interconnection networks", IEEE Transactions on Computers C-36, 1987.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from commrt.errors import UsageError
from commrt.sim.topologies.network import (
    Cable,
    Ints,
    LinkBuilder,
    Network,
    Ways,
    check_count,
    check_links,
    ways_of_columns,
)

__all__ = ["Mesh", "Torus"]


@dataclass(frozen=True)
class Torus:
    """Routers in a grid whose rows are closed to rings."""

    dims: tuple[int, ...]
    """Routers along each dimension, the last one varying fastest."""
    cable: Cable = field(default_factory=Cable)
    """Between neighbouring routers."""
    host_cable: Cable | None = None
    """Between a host and its router; as ``cable`` where left out."""

    def network(self) -> Network:
        """Return the network."""
        return _grid(self.dims, self.cable, self.host_cable or self.cable, wraps=True)


@dataclass(frozen=True)
class Mesh:
    """Routers in a grid whose rows are open."""

    dims: tuple[int, ...]
    """Routers along each dimension, the last one varying fastest."""
    cable: Cable = field(default_factory=Cable)
    """Between neighbouring routers."""
    host_cable: Cable | None = None
    """Between a host and its router; as ``cable`` where left out."""

    def network(self) -> Network:
        """Return the network."""
        return _grid(self.dims, self.cable, self.host_cable or self.cable, wraps=False)


def _grid(
    dims: tuple[int, ...], cable: Cable, host_cable: Cable, *, wraps: bool
) -> Network:
    if not dims:
        raise UsageError("dims is empty; expected routers along each dimension")
    for width in dims:
        check_count("each of dims", width)
    count = 1
    for width in dims:
        count *= width
        check_links(count)
    build, routers = LinkBuilder(), np.arange(count)
    up, down = build.both(routers, routers + count, host_cable)
    places = np.stack(np.unravel_index(routers, dims))
    # The link from each router, along each dimension, upwards (0) or downwards (1).
    numbers = np.full((count, len(dims), 2), -1)
    for dim, width in enumerate(dims):
        if width == 1:
            continue
        beside = places.copy()
        beside[dim] = (places[dim] + 1) % width
        # Two routers of a ring have one cable between them.
        has = places[dim] < width - 1 if not wraps or width == 2 else routers >= 0
        ends, others = routers[has], np.ravel_multi_index(tuple(beside), dims)[has]
        numbers[ends, dim, 0], numbers[others, dim, 1] = build.both(
            ends + count, others + count, cable
        )
        if wraps and width == 2:
            numbers[:, dim, 0] = numbers[:, dim].max(axis=1)
    widest = tuple(width // 2 if wraps else width - 1 for width in dims)

    def ways(source: Ints, target: Ints) -> Ways:
        apart = source != target
        here = np.stack(np.unravel_index(source, dims))
        there = np.stack(np.unravel_index(target, dims))
        columns = [np.where(apart, up[source], -1)]
        for dim, width in enumerate(dims):
            shift = there[dim] - here[dim]
            if wraps:
                shift = shift % width
                shift = np.where(shift > width // 2, shift - width, shift)
            for hop in range(widest[dim]):
                moves = hop < np.abs(shift)
                router = np.ravel_multi_index(tuple(here), dims)
                link = numbers[router, dim, (shift < 0).astype(np.int64)]
                columns.append(np.where(moves, link, -1))
                here[dim] = (here[dim] + np.where(moves, np.sign(shift), 0)) % width
        columns.append(np.where(apart, down[target], -1))
        return ways_of_columns(columns, len(source))

    def name(node: int) -> str:
        if node < count:
            return f"h{node}"
        return "r" + ".".join(map(str, places[:, node - count].tolist()))

    shape = "x".join(map(str, dims))
    return Network(
        f"{shape} {'torus' if wraps else 'mesh'}",
        *(count, 2 * count, name, build.links(), ways, (0, count)),
        drawing="grid" if len(dims) == 2 else "ring",
    )
