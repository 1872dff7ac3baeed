# SPDX-License-Identifier: Apache-2.0
"""Gantt chart of a simulated run: a lane for each rank, and one for each busy link."""

from __future__ import annotations

import numpy as np

from commrt.errors import UsageError
from commrt.sim.critical_path import critical_path
from commrt.sim.link_series import link_series
from commrt.sim.pictures.svg import document, heat, label, legend, line, rect
from commrt.sim.quantities import nbytes_text, time_text
from commrt.sim.simulate import Simulated

__all__ = ["MOST_RANKS", "gantt"]

MOST_RANKS = 128
_MOST_BARS = 40_000
_LEFT, _RIGHT, _TOP, _WIDTH = 130, 20, 58, 1000
_LANE, _LINK_LANE = 16, 12
_SPANS = 200


def gantt(run: Simulated, links: int = 16) -> str:
    """Return the chart as SVG.

    A rank's lane has what it sends above (blue) and what it receives below (green);
    the critical path is red. A link's lane shows the part of its rate that is used.

    Args:
        run: what to draw.
        links: lanes of links, those that most flows share.

    Raises:
        UsageError: there are more ranks or messages than a picture can show.
    """
    ranks, messages = run.schedule.size, run.messages
    if ranks > MOST_RANKS or 2 * len(messages.send) > _MOST_BARS:
        raise UsageError(
            f"a chart of {ranks} ranks and {len(messages.send):,} messages: nobody "
            f"could read it; draw at most {MOST_RANKS} ranks and {_MOST_BARS // 2:,} "
            f"messages"
        )
    scale = _WIDTH / run.time_us if run.time_us else 0.0
    on_path = {leg.message for leg in critical_path(run)}
    senders = run.ranks_of(messages.send).tolist()
    receivers = run.ranks_of(messages.recv).tolist()
    parts = _head(run)
    for rank in range(ranks):
        y = _TOP + rank * _LANE
        parts.append(label(_LEFT - 6, y + 11, f"rank {rank}", "end", 9))
        parts.append(rect(_LEFT, y + _LANE - 1, _WIDTH, 0.4, "#ddd"))
    columns = (
        messages.begun_us,
        messages.flowing_us,
        messages.ended_us,
        messages.nbytes,
    )
    rows = zip(*(column.tolist() for column in columns), strict=True)
    for number, (begun, flowing, ended, nbytes) in enumerate(rows):
        hint = (
            f"{senders[number]} → {receivers[number]}: {nbytes_text(int(nbytes))}, "
            f"{time_text(begun)} to {time_text(ended)} (simulated)"
        )
        red = number in on_path
        for rank, shift, colour in (
            (senders[number], 1, "#2f6fa7"),
            (receivers[number], 8, "#3c9a5f"),
        ):
            x, y = _LEFT + begun * scale, _TOP + rank * _LANE + shift
            colour = "#c8302a" if red else colour
            parts.append(rect(x, y + 2, (flowing - begun) * scale, 2, colour))
            x = _LEFT + flowing * scale
            parts.append(rect(x, y, (ended - flowing) * scale, 6, colour, hint))
    bottom = _TOP + ranks * _LANE + 14
    parts += _link_lanes(run, links, bottom)
    height = bottom + (links + 1) * _LINK_LANE + 30
    title = f"Simulated {run.schedule.coll} {run.schedule.algorithm}"
    return document(_LEFT + _WIDTH + _RIGHT, height, title, parts)


def _head(run: Simulated) -> list[str]:
    schedule = run.schedule
    nbytes = nbytes_text(run.num_elements * run.itemsize)
    title = (
        f"Simulated: {schedule.coll} {schedule.algorithm}, {schedule.size} ranks, "
        f"{nbytes}, on {run.network.name}: {time_text(run.time_us)}"
    )
    parts = [
        label(8, 18, title, size=13),
        label(8, 34, "above: sent, below: received, red: critical path", size=10),
    ]
    for tick in range(6):
        x = _LEFT + _WIDTH * tick / 5
        parts.append(label(x, _TOP - 8, time_text(run.time_us * tick / 5), "middle", 9))
        parts.append(line((x, _TOP - 4, x, _TOP), "#888", 1))
    return parts


def _link_lanes(run: Simulated, count: int, top: float) -> list[str]:
    series = link_series(run, _SPANS)
    shared, mean = run.links.peak_flows, series.mean(axis=1)
    busiest = np.lexsort((-mean, -shared))[:count]
    parts = [
        label(_LEFT, top + 4, "links that most flows share (simulated load)", size=10)
    ]
    parts.append(legend(_LEFT + _WIDTH - 160, 16, 160))
    for row, link in enumerate(busiest.tolist()):
        y = top + (row + 1) * _LINK_LANE
        name = run.network.link_name(link)
        parts.append(label(_LEFT - 6, y + 9, name[:24], "end", 9))
        for span, load in enumerate(series[link].tolist()):
            if load > 0:
                x = _LEFT + _WIDTH * span / _SPANS
                width = _WIDTH / _SPANS
                hint = f"{name}: {100 * load:.0f} % (simulated)"
                parts.append(rect(x, y, width, _LINK_LANE - 2, heat(load), hint))
    return parts
