# SPDX-License-Identifier: Apache-2.0
"""A network that takes as long as measured calls did: ``commrt-tune fit``.

The recording of a tuning run has the times of schedules. The fit looks for a star of
hosts, and for costs of messages, on which the simulator gives these times
(commrt/sim/least_squares.py). A fifth of the cells, drawn, is left out, and judges the
result.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from commrt import algorithms
from commrt.errors import UsageError
from commrt.files.write import write_file
from commrt.planning.footprint import DIRECT_CHUNK_NBYTES
from commrt.planning.prediction import full_nbytes
from commrt.schedule.ir import Schedule, full_multiple
from commrt.select.facts import Candidate, Query
from commrt.sim.costs import Costs
from commrt.sim.fragments import CONNECTIONS, as_sent_by_tcp
from commrt.sim.least_squares import least_squares
from commrt.sim.quantities import nbytes_text
from commrt.sim.simulate import simulate
from commrt.sim.topologies.crossbars import Star
from commrt.sim.topologies.network import Cable
from commrt.tuning.decide import curves_of
from commrt.tuning.recording_reader import load_recording
from commrt.tuning.samples import Recording
from commrt.vocabulary.operations import SCHEDULED

__all__ = ["Cell", "Fitted", "add_fit", "cells_of", "fit", "simulated_us"]

_ITEM_NBYTES = 4
_TCP = "tcp"
_MOST_CELLS = 240
_HELD_OUT = 5
_NUMBERS = (
    *("gbytes_per_s", "latency_us", "send_overhead_us", "receive_overhead_us"),
    "reduce_us_per_byte",
)
_LOCAL = ("local_latency_us", "local_gbytes_per_s")


class Cell(NamedTuple):
    """One measured time of a schedule."""

    op: str
    candidate: Candidate
    nodes: tuple[int, ...]
    """The number of the node of each rank; all differ where one node was measured."""
    nbytes: int
    """Rule bytes."""
    us: float


@dataclass(frozen=True)
class Fitted:
    """The result of a fit."""

    values: Mapping[str, float]
    """Rate and latency of a message between two hosts, and costs, by their names."""
    errors: tuple[float, ...]
    """Relative errors of the cells that shaped it."""
    held_out: tuple[float, ...]
    """Relative errors of the others."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Costs that are known of the backend's messages."""

    def text(self, hosts: int, source: str) -> str:
        """Return the network as a file for ``commrt-sim``."""
        costs = {key: value for key, value in self.values.items() if key in _COSTS}
        rate, latency = self.values["gbytes_per_s"], self.values["latency_us"] / 2
        lines = [
            "# Written by commrt-tune fit.",
            f"name: {json.dumps(f'star of {hosts} hosts, fitted to {source}')}",
            "notes:",
            f'  - "{len(self.errors)} measured times: median error '
            f"{median(self.errors):.0%}; {len(self.held_out)} that were left out: "
            f'{median(self.held_out):.0%}"',
            "kind: star",
            f"hosts: {hosts}",
            f"rate: {rate:.4g}GB/s",
            f"latency: {1000 * latency:.4g}ns",
            "costs:",
            *(f"  {key}: {value:.4g}" for key, value in costs.items()),
            *(f"  {key}: {json.dumps(value)}" for key, value in self.fixed.items()),
        ]
        return "\n".join(lines) + "\n"


_COSTS = (*_NUMBERS[2:], *_LOCAL)


def cells_of(recording: Recording, backend: str | None = None) -> list[Cell]:
    """Return the measured times of one backend's schedules, on arrays of the host.

    ``backend``: None: the one with the most times. Where launches spanned nodes, those
    on one node are left out; of these only links of the commonest class count, on the
    commonest network.
    """
    groups = [each for each in recording.groups() if each.device == "host"]
    groups = [each for each in groups if each.nodes > 1] or groups
    classes = Counter((each.link_class, each.network) for each in groups)
    found: dict[str, list[Cell]] = {}
    for group in groups:
        if (group.link_class, group.network) != classes.most_common(1)[0][0]:
            continue
        apart = group.nodes == 1
        each = range(group.ranks)
        nodes = tuple(rank if apart else rank // group.ppn for rank in each)
        for op in recording.orders:
            known = algorithms.names(op, group.ranks) if op in SCHEDULED else ()
            curves = curves_of(recording, group, op) if known else {}
            for candidate, curve in curves.items():
                if candidate.algorithm in known:
                    found.setdefault(candidate.backend, []).extend(
                        Cell(op, candidate, nodes, nbytes, seen.us)
                        for nbytes, seen in curve.estimates.items()
                        if seen.us > 0
                    )
    if backend is not None and backend not in found:
        raise UsageError(
            f"commrt-tune fit: --backend {backend}: the recording has schedules of "
            f"{', '.join(sorted(found)) or 'no backend'}"
        )
    if not found:
        return []
    return found[backend or max(found, key=lambda name: (len(found[name]), name))]


def simulated_us(cell: Cell, values: Mapping[str, float], kept: _Kept) -> float:
    """Return the simulated time of a cell with such a network and such costs."""
    hosts = max(cell.nodes) + 1
    cable = Cable(values["gbytes_per_s"], values["latency_us"] / 2)
    given: Any = {key: values[key] for key in _COSTS if key in values}
    given |= _fixed(cell)
    run = simulate(
        *(kept.schedule(cell), Star(max(hosts, 2), cable).network(), kept.nbytes(cell)),
        np.array(cell.nodes),
        itemsize=_ITEM_NBYTES,
        costs=Costs(**given),
    )
    return max(run.time_us, 1e-3)


def _fixed(cell: Cell) -> Mapping[str, Any]:
    """Return the costs that are known of the messages that carried a cell."""
    return CONNECTIONS if cell.candidate.backend == _TCP else {}


class _Kept:
    """Schedules of cells, each made once."""

    def __init__(self) -> None:
        self._made: dict[tuple[Any, ...], Schedule] = {}
        self._cut: dict[Cell, Schedule] = {}

    def schedule(self, cell: Cell) -> Schedule:
        """Return what is simulated: over connections of commrt's own, its fragments."""
        if cell.candidate.backend != _TCP:
            return self._whole(cell)
        if cell not in self._cut:
            number = self._num_elements(cell)
            self._cut[cell] = as_sent_by_tcp(self._whole(cell), number, _ITEM_NBYTES)
        return self._cut[cell]

    def nbytes(self, cell: Cell) -> int:
        """Return the length that is simulated; fragments have their own."""
        if cell.candidate.backend == _TCP:
            return 0
        return self._num_elements(cell) * _ITEM_NBYTES

    @staticmethod
    def _num_elements(cell: Cell) -> int:
        size = len(cell.nodes)
        whole = full_nbytes(Query(cell.op, cell.nbytes, "float32"), size)
        unit = full_multiple(cell.op, size)
        return max(1, whole // (_ITEM_NBYTES * unit)) * unit

    def _whole(self, cell: Cell) -> Schedule:
        one = cell.candidate
        key = cell.op, one.algorithm, tuple(sorted(one.params.items())), cell.nodes
        if key not in self._made:
            spans = algorithms.get(cell.op, one.algorithm).spans_nodes
            self._made[key] = algorithms.schedule(
                *(cell.op, one.algorithm, len(cell.nodes), 0),
                {
                    name: value
                    for name, value in one.params.items()
                    if name
                    in algorithms.param_choices(cell.op, one.algorithm, len(cell.nodes))
                },
                cell.nodes if spans else None,
            )
        return self._made[key]


def fit(cells: Sequence[Cell]) -> Fitted:
    """Return the network and the costs that fit measured times best.

    Raises UsageError for fewer than 10 cells.
    """
    if len(cells) < 2 * _HELD_OUT:
        raise UsageError(
            f"commrt-tune fit: {len(cells)} measured times of schedules; expected at "
            f"least {2 * _HELD_OUT}: record more operations or sizes"
        )
    taken = random.Random(1).sample(list(cells), min(len(cells), _MOST_CELLS))
    fifth = len(taken) // _HELD_OUT
    judging, shaping = taken[:fifth], taken[fifth:]
    kept = _Kept()
    values = least_squares(
        [cell.us for cell in shaping],
        lambda at, values: simulated_us(shaping[at], values, kept),
        _first_guess(shaping),
    )
    return Fitted(
        values,
        tuple(_off(cell, values, kept) for cell in shaping),
        tuple(_off(cell, values, kept) for cell in judging),
        _fixed(taken[0]),
    )


def _first_guess(cells: Sequence[Cell]) -> dict[str, float]:
    """Return numbers of the right order: the shortest call, and the highest rate."""
    shortest = min(cell.us for cell in cells)
    bytes_per_us = max(cell.nbytes / cell.us for cell in cells)
    guess = (bytes_per_us / 1000, shortest / 2, shortest / 8, shortest / 8)
    values = dict(zip(_NUMBERS, (*guess, 0.2 / bytes_per_us), strict=True))
    if any(len({*cell.nodes}) < len(cell.nodes) for cell in cells):
        values |= zip(_LOCAL, (shortest / 8, bytes_per_us / 250), strict=True)
    return values


def _off(cell: Cell, values: Mapping[str, float], kept: _Kept) -> float:
    return abs(simulated_us(cell, values, kept) / cell.us - 1)


# -- the command -----------------------------------------------------------------------


def add_fit(commands: Any) -> None:
    """Add the command to the parser's."""
    parser = commands.add_parser(
        "fit", help="a network for the simulator, from a recording"
    )
    parser.set_defaults(command=_fit)
    parser.add_argument("recording", type=Path, metavar="RAW")
    parser.add_argument(
        "--hosts", type=int, help="hosts of the network (default: those measured)"
    )
    parser.add_argument(
        "--backend", help="whose schedules (default: the one with the most times)"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")


def _fit(arguments: argparse.Namespace) -> int:
    if arguments.hosts is not None and arguments.hosts < 2:
        raise UsageError(f"--hosts {arguments.hosts}: expected 2 or more")
    cells = cells_of(load_recording(arguments.recording), arguments.backend)
    found = fit(cells)
    measured = max(len({*cell.nodes}) for cell in cells)
    hosts = measured if arguments.hosts is None else arguments.hosts
    write_file(arguments.out, found.text(hosts, arguments.recording.name), parents=True)
    sys.stdout.write(f"schedules of {cells[0].candidate.backend}\n")
    if cells[0].candidate.backend == _TCP:
        sys.stdout.write(
            f"simulate them as ranks send them: commrt-sim run --chunk "
            f"{nbytes_text(DIRECT_CHUNK_NBYTES)}\n"
        )
    for key, value in found.values.items():
        sys.stdout.write(f"{key:<22}{value:>12.4g}\n")
    least, most = min(cell.nbytes for cell in cells), max(cell.nbytes for cell in cells)
    sys.stdout.write(
        f"{len(cells)} measured times, {nbytes_text(least)} to {nbytes_text(most)}; "
        f"simulated ones are off by {median(found.errors):.0%} (median), and by "
        f"{median(found.held_out):.0%} in cells that were left out\n"
        f"wrote {arguments.out}\n"
    )
    return 0
