# SPDX-License-Identifier: Apache-2.0
"""Numbers that are fitted to measured cells, and the times that follow from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

from commrt.bench.sealed.cells import ITEM_NBYTES, Cell, runners
from commrt.bench.sealed.measuring import Times
from commrt.bench.sealed.networks import Numbers, one_switch, simulated
from commrt.bench.sealed.openmpi_rules import fixed_rule
from commrt.planning.host_plans import distinct
from commrt.schedule.ir import Schedule
from commrt.select.facts import Candidate
from commrt.sim.costs import Costs
from commrt.sim.fragments import as_sent_by_tcp
from commrt.sim.least_squares import least_squares
from commrt.sim.simulate import simulate

__all__ = [
    "OPENMPI",
    "SIMULATOR",
    "TWO_NUMBERS",
    "Model",
    "fitted",
    "predicted",
    "simulator",
    "two_numbers",
]

SIMULATOR, TWO_NUMBERS, OPENMPI = "simulator", "two numbers", "Open MPI's rules"
"""Who predicts."""
Model = Callable[[Cell, Schedule, Numbers], float]
"""Returns the microseconds of a schedule in a cell."""
_FULL_START = {
    "share": 0.95,
    "latency_us": 15.0,
    "send_overhead_us": 8.0,
    "receive_overhead_us": 5.0,
    "reduce_us_per_byte": 1e-3,
    "contention_penalty": 0.05,
}
_TWO_START = {"share": 0.95, "latency_us": 30.0}


class _AsSent:
    """Schedules cut into fragments, each cut once."""

    def __init__(self) -> None:
        self._cut: dict[tuple[int, int], tuple[Schedule, Schedule]] = {}

    def __call__(self, cell: Cell, schedule: Schedule) -> Schedule:
        key = id(schedule), cell.num_elements
        if key not in self._cut:
            cut = as_sent_by_tcp(schedule, cell.num_elements, ITEM_NBYTES)
            self._cut[key] = schedule, cut
        return self._cut[key][1]


def simulator() -> Model:
    """Return the simulator: fragments on the network that there is."""
    as_sent = _AsSent()

    def time_us(cell: Cell, schedule: Schedule, numbers: Numbers) -> float:
        network = simulated(cell.topology, numbers)
        cut = as_sent(cell, schedule)
        return simulate(
            cut, network, 0, itemsize=ITEM_NBYTES, costs=numbers.costs
        ).time_us

    return time_us


def two_numbers(cell: Cell, schedule: Schedule, numbers: Numbers) -> float:
    """Return the time by one latency and one rate, whatever the network is.

    R. Hockney, "The communication challenge for MPP", Parallel Computing 20 (1994):
    each message takes a + nb, and a port carries one message after the other.
    """
    nbytes = cell.num_elements * ITEM_NBYTES
    network = one_switch(cell.topology, numbers)
    costs = Costs(in_order=True)
    run = simulate(schedule, network, nbytes, itemsize=ITEM_NBYTES, costs=costs)
    return run.time_us


def fitted(cells: Sequence[Cell], times: Times, model: Model, *, full: bool) -> Numbers:
    """Return the numbers with which a model's times are like measured ones."""
    rows = [
        (cell, schedule, median(times[cell.key][str(one)]))
        for cell in cells
        for one, schedule in runners(cell)
    ]

    def time_us(at: int, values: Mapping[str, float]) -> float:
        return model(rows[at][0], rows[at][1], Numbers(values))

    start = _FULL_START if full else _TWO_START
    return Numbers(least_squares([us for *_, us in rows], time_us, start))


def predicted(cells: Sequence[Cell], full: Numbers, two: Numbers) -> dict[str, Any]:
    """Return for each cell the time of each candidate, and who wins by whom."""
    models = {SIMULATOR: (simulator(), full), TWO_NUMBERS: (two_numbers, two)}
    return {cell.key: _row(cell, models) for cell in cells}


def _row(cell: Cell, models: Mapping[str, tuple[Model, Numbers]]) -> dict[str, Any]:
    times = {
        name: {
            str(one): round(model(cell, schedule, numbers), 2)
            for one, schedule in runners(cell)
        }
        for name, (model, numbers) in models.items()
    }
    winners = {name: min(mine, key=mine.__getitem__) for name, mine in times.items()}
    winners[OPENMPI] = _by_fixed_rule(cell)
    return {"us": times, "winners": winners}


def _by_fixed_rule(cell: Cell) -> str:
    """Return the candidate that runs what Open MPI's rule names."""
    nbytes = cell.num_elements * ITEM_NBYTES
    rule = Candidate("tcp", fixed_rule(cell.op, nbytes, cell.ranks))
    nodes = tuple(range(cell.ranks))
    for one, _ in runners(cell):
        if len(distinct(cell.op, [one, rule], nodes)) == 1:
            return str(one)
    raise AssertionError(f"{cell.key}: nobody runs {rule}")
