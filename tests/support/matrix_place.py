# SPDX-License-Identifier: Apache-2.0
"""Runs parts of the matrix of ranks in one thread, in a process of its own.

``python matrix_place.py SEED CASES PLACE PLACE ...`` draws the parts that these places
have of so many cases, and prints a line for each: what was wrong, and how many were
compared.
"""

from __future__ import annotations

import faulthandler
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from matrix_drawing import Drawing, Visit, Where, must_visit
from matrix_stepped import Stepped


@dataclass(frozen=True)
class Place:
    """Some ranks, on pretended nodes or on one."""

    size: int
    nodes: str
    share: float
    """Of all cases, beside those of the other places."""


_ON_NODES = ("1,1", "2,1", "2,2", "1,3", "2,1,3", "3,4", "1,2,2,3")
# Cases of many ranks take long.
PLACES = {
    **{str(n): Place(n, "", 1.4 if n <= 8 else 0.4) for n in range(1, 17)},
    **{n: Place(sum(map(int, n.split(","))), n, 0.1) for n in _ON_NODES},
}
MOST_WRONG = 5
_PLAIN = "MATRIX_PLAIN_KERNELS"


def number_of(place: str, cases: int) -> int:
    """Return how many of all cases a place has."""
    whole = sum(each.share for each in PLACES.values())
    return round(cases * PLACES[place].share / whole)


def must(place: str, seed: str) -> list[Visit]:
    """Return what a place must visit, so that all of them together miss nothing."""
    wheres = [Where(each.size, each.nodes) for each in PLACES.values()]
    return must_visit(seed, wheres)[list(PLACES).index(place)]


def repeat(line: str) -> str:
    """Return what is typed to run one case alone."""
    return f"repeat it: pytest tests/matrix --case '{line}'"


def run(place: str, seed: str, cases: int) -> dict[str, Any]:
    """Run a place's part; return what was wrong, and how many cases were compared."""
    one, wrong = PLACES[place], list[str]()
    with Stepped(one.size, one.nodes) as ranks:
        drawing = Drawing(
            ranks.where(),
            number_of(place, cases),
            seed,
            must(place, seed),
            heap=not one.nodes,
        )
        for trials in drawing.visits():
            for trial in trials:
                try:
                    found = ranks.run(trial)
                except Exception as error:
                    raise AssertionError(repeat(trial.line())) from error
                if found:
                    wrong += [*found[:2], repeat(trial.line())]
            if len(wrong) > 3 * MOST_WRONG:
                break
    return {"wrong": wrong, "compared": ranks.compared}


def run_all(seed: str, cases: int, plain_kernels: bool) -> Iterator[dict[str, Any]]:
    """Run all places, in a process for each core; yield what was found at each."""
    # pytest shows the stacks of a test after two minutes, which this one may take.
    faulthandler.cancel_dump_traceback_later()
    environment = {**os.environ, _PLAIN: "1"} if plain_kernels else None

    def spawn(places: list[str]) -> list[dict[str, Any]]:
        done = subprocess.run(
            [sys.executable, __file__, seed, str(cases), *places],
            capture_output=True,
            text=True,
            timeout=7200,
            env=environment,
            check=False,
        )
        found = [json.loads(line) for line in done.stdout.splitlines()]
        if done.returncode != 0:
            end = f"ended with {done.returncode}:\n{done.stderr[-6000:]}"
            found.append({"wrong": [end], "compared": 0})
        return found

    halves = shared_out(len(os.sched_getaffinity(0)))
    with ThreadPoolExecutor(len(halves)) as pool:
        for found in pool.map(spawn, halves):
            yield from found


def shared_out(workers: int) -> list[list[str]]:
    """Return the places in as many lists, which take about as long as each other."""
    lists: list[list[str]] = [[] for _ in range(workers)]
    taken = [0.0] * workers

    def price(place: str) -> float:
        return PLACES[place].share * (2 + PLACES[place].size)

    for place in sorted(PLACES, key=price, reverse=True):
        least = taken.index(min(taken))
        lists[least].append(place)
        taken[least] += price(place)
    return [places for places in lists if places]


if __name__ == "__main__":
    if _PLAIN in os.environ:
        from commrt._native import kernels

        assert kernels.use_isa(kernels.isas()[0])
    for one_place in sys.argv[3:]:
        found = run(one_place, sys.argv[1], int(sys.argv[2]))
        print(json.dumps(found), flush=True)
