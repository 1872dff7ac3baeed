# SPDX-License-Identifier: Apache-2.0
"""A page that plays a simulated run: links in the colour of their load, over time.

The page is one file without any reference to another one.
"""

from __future__ import annotations

import json

import numpy as np

from commrt.sim.link_series import link_series
from commrt.sim.pictures.layout import positions
from commrt.sim.pictures.svg import heat
from commrt.sim.quantities import nbytes_text, time_text
from commrt.sim.simulate import Simulated

__all__ = ["animation"]

_WIDTH, _HEIGHT, _FRAMES = 1100.0, 620.0, 120
_STEPS = 64
"""Loads that are told apart."""

_PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>TITLE</title><style>
body { font: 14px sans-serif; margin: 16px; color: #222 }
canvas { border: 1px solid #ccc; max-width: 100% }
input { width: 60% }
</style></head><body>
<h1 style="font-size: 17px">TITLE</h1>
<p>Simulated, not measured. A link has the colour of its load: pale is idle, red is
full.</p>
<p><button id="play">Pause</button>
<input id="frame" type="range" min="0" value="0" aria-label="time">
<span id="time"></span></p>
<canvas id="map" width="1100" height="620" role="img" aria-label="loads of links">
</canvas>
<script type="application/json" id="data">DATA</script>
<script>
const data = JSON.parse(document.getElementById("data").textContent);
const map = document.getElementById("map").getContext("2d");
const slider = document.getElementById("frame");
const button = document.getElementById("play");
slider.max = data.frames.length - 1;
let playing = true;
function draw() {
  const frame = Number(slider.value), loads = data.frames[frame];
  map.clearRect(0, 0, 1100, 620);
  const busy = new Map(loads);
  data.links.forEach(([x1, y1, x2, y2], link) => {
    const load = busy.get(link) || 0;
    map.strokeStyle = data.colours[load];
    map.lineWidth = load ? 2.5 : 0.6;
    map.beginPath(); map.moveTo(x1, y1); map.lineTo(x2, y2); map.stroke();
  });
  data.nodes.forEach(([x, y, host]) => {
    map.fillStyle = host ? "#555" : "#000";
    const size = host ? 3 : 7;
    map.fillRect(x - size / 2, y - size / 2, size, size);
  });
  document.getElementById("time").textContent = data.times[frame] + " (simulated)";
}
button.onclick = () => {
  playing = !playing;
  button.textContent = playing ? "Pause" : "Play";
};
slider.oninput = () => { playing = false; button.textContent = "Play"; draw(); };
setInterval(() => {
  if (!playing) return;
  slider.value = (Number(slider.value) + 1) % data.frames.length;
  draw();
}, 100);
draw();
</script></body></html>
"""


def animation(run: Simulated) -> str:
    """Return the page.

    Raises:
        UsageError: there are more nodes or messages than a page can show.
    """
    network, places = run.network, positions(run.network, _WIDTH, _HEIGHT)
    series = link_series(run, _FRAMES)
    steps = np.ceil(np.clip(series, 0, 1) * (_STEPS - 1)).astype(np.int64)
    frames = []
    for number in range(_FRAMES):
        busy = np.flatnonzero(steps[:, number])
        frames.append(np.stack([busy, steps[busy, number]], axis=1).tolist())
    tails, heads = network.links.tails, network.links.heads
    known = (tails >= 0) & (heads >= 0)
    start, end = places[tails], places[heads]
    along = end - start
    length = np.maximum(np.hypot(along[:, 0], along[:, 1]), 1e-9)[:, None]
    side = np.stack([-along[:, 1], along[:, 0]], axis=1) / length * 1.6
    ends = np.concatenate([start + side, end + side], axis=1).round(1)
    # Links without a place are drawn as points outside.
    ends[~known] = -10
    hosts = np.arange(network.num_nodes) < network.num_hosts
    data = {
        "colours": [heat(step / (_STEPS - 1)) for step in range(_STEPS)],
        "frames": frames,
        "links": ends.tolist(),
        "nodes": np.concatenate([places.round(1), hosts[:, None]], axis=1).tolist(),
        "times": [time_text(run.time_us * i / _FRAMES) for i in range(_FRAMES)],
    }
    schedule = run.schedule
    title = (
        f"Simulated: {schedule.coll} {schedule.algorithm}, {schedule.size} ranks, "
        f"{nbytes_text(run.num_elements * run.itemsize)}, on {network.name}"
    )
    # "</script>" cannot occur: names are in no part of the data.
    page = _PAGE.replace("DATA", json.dumps(data, separators=(",", ":")))
    return page.replace("TITLE", _escaped(title))


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
