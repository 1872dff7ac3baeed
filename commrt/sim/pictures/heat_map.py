# SPDX-License-Identifier: Apache-2.0
"""Map of a network whose links are coloured by their load in a simulated run."""

from __future__ import annotations

import numpy as np

from commrt.sim.pictures.layout import positions
from commrt.sim.pictures.svg import document, heat, label, legend, line, rect
from commrt.sim.quantities import nbytes_text, time_text
from commrt.sim.simulate import Simulated
from commrt.sim.topologies.network import Floats

__all__ = ["heat_map", "loads"]

_WIDTH, _HEIGHT, _TOP = 1100.0, 620.0, 60.0


def loads(run: Simulated) -> Floats:
    """Return the part of its rate that each link carried, from start to end."""
    links = run.network.links
    rate = np.where(np.isfinite(links.shared_rate), links.shared_rate, links.flow_rate)
    whole = rate * run.time_us
    used = run.links.nbytes / np.where(np.isfinite(whole) & (whole > 0), whole, np.inf)
    return np.asarray(used, np.float64)


def heat_map(run: Simulated) -> str:
    """Return the map as SVG: the two directions of a cable side by side.

    Raises:
        UsageError: there are more nodes than a picture can show.
    """
    network, places, used = (
        run.network,
        positions(run.network, _WIDTH, _HEIGHT),
        loads(run),
    )
    schedule = run.schedule
    nbytes = nbytes_text(run.num_elements * run.itemsize)
    title = (
        f"Simulated: load of links, {schedule.coll} {schedule.algorithm}, "
        f"{schedule.size} ranks, {nbytes}, {time_text(run.time_us)}"
    )
    parts = [
        label(8, 18, title, size=13),
        label(8, 36, f"{network.name}; colour: part of a link's rate over the run"),
        legend(_WIDTH - 200, 14, 180),
    ]
    # The busiest ones are drawn last, on top.
    for link in np.argsort(used, kind="stable").tolist():
        tail, head = int(network.links.tails[link]), int(network.links.heads[link])
        if min(tail, head) < 0:
            continue
        start, end = places[tail], places[head]
        along = end - start
        length = float(np.hypot(*along)) or 1.0
        side = np.array([-along[1], along[0]]) / length * 1.6
        points = [*(start + side), *(end + side)]
        hint = (
            f"{network.link_name(link)}: {100 * used[link]:.1f} %, "
            f"{int(run.links.nbytes[link]):,} bytes, up to "
            f"{int(run.links.peak_flows[link])} flows (simulated)"
        )
        ends = (points[0], points[1] + _TOP, points[2], points[3] + _TOP)
        parts.append(
            line(ends, heat(float(used[link])), 1 + 2 * float(used[link]), hint)
        )
    for node, (x, y) in enumerate(places.tolist()):
        size, colour = (3, "#444") if node < network.num_hosts else (6, "#000")
        hint = network.node_name(node)
        x, y = x - size / 2, y + _TOP - size / 2
        parts.append(rect(x, y, size, size, colour, hint))
    return document(_WIDTH, _HEIGHT + _TOP, title, parts)
