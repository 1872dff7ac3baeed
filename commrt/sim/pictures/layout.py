# SPDX-License-Identifier: Apache-2.0
"""Places of a network's nodes in a picture."""

from __future__ import annotations

import math

import numpy as np

from commrt.errors import UsageError
from commrt.sim.topologies.network import Floats, Network

__all__ = ["MOST_NODES", "positions"]

MOST_NODES = 6000


def positions(network: Network, width: float, height: float) -> Floats:
    """Return x and y of each node: tiers from below, a ring, or a grid.

    Raises:
        UsageError: there are more nodes than a picture can show.
    """
    if network.num_nodes > MOST_NODES:
        raise UsageError(
            f"a picture of {network.num_nodes:,} hosts and switches: nobody could read "
            f"it; draw a network of at most {MOST_NODES:,}"
        )
    starts = [*network.tiers, network.num_nodes]
    counts = np.diff(starts)
    found = np.zeros((network.num_nodes, 2))
    for tier, (first, count) in enumerate(zip(starts, counts.tolist(), strict=False)):
        place = np.arange(count)
        if network.drawing == "tiers":
            x = width * (place + 0.5) / max(count, 1)
            y = np.full(count, height * (1 - (tier + 0.5) / len(counts)))
        elif network.drawing == "grid":
            across = math.isqrt(max(count - 1, 0)) + 1
            across = _across(network, count, across)
            x = width * (place % across + 0.5 + 0.2 * (tier == 0)) / across
            rows = -(-count // across)
            y = height * (place // across + 0.5 + 0.2 * (tier == 0)) / rows
        else:
            radius = min(width, height) * (0.48 - 0.1 * (tier > 0))
            angle = 2 * math.pi * (place + 0.5) / max(count, 1) - math.pi / 2
            x = width / 2 + radius * np.cos(angle)
            y = height / 2 + radius * np.sin(angle)
        found[first : first + count] = np.stack([x, y], axis=1)
    return found


def _across(network: Network, count: int, usual: int) -> int:
    """Return the length of a row of routers, from the name of the last one."""
    last = network.node_name(network.num_nodes - 1).lstrip("r").split(".")
    if len(last) == 2 and last[1].isdecimal() and count % (int(last[1]) + 1) == 0:
        return int(last[1]) + 1
    return usual
