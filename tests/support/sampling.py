# SPDX-License-Identifier: Apache-2.0
"""Which tests run: all with ``--full``, else a sample that changes with every run.

``@pytest.mark.full`` is left out of an ordinary run. ``@pytest.mark.full(sample=3)``
keeps three of the test's cases, drawn with the run's seed, so that many ordinary runs
cover what a full one covers. ``--share 0.3`` keeps that part of every test's cases, at
least one of each, and ``--functions 0.3`` that part of the tests; with ``--each-fault``
also a case of each kind of fault, so that none is left out (``fault_rows.py``). The
seed is printed; ``--seed`` repeats a run.

The matrices draw their cases themselves, ``--cases`` of them, and say at the end how
many they compared. ``--case`` repeats one case. Tests marked ``whole`` take no part in
shares: the matrices, drawn convolutions, all tests of ``tests/unit/house``, and those
that read pages against the sources.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from busy_machine import Moment, describe, now
from fault_rows import FAULTS

_BEGIN = pytest.StashKey[Moment]()
_NOTE = pytest.StashKey[str]()
_TALLY = pytest.StashKey[Counter[str]]()
CASES, ALL_CASES = 25_200, 502_000
"""Of the matrix of ranks in one thread, in an ordinary run and in a full one: 25,000
and 500,000, and some for what is rounded."""


FULL_LIMIT_S = 3600.0
"""Of a test in a full run, where one may try 200 seeds, and an ordinary one tries 2."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of this project."""
    group = parser.getgroup("commrt")
    group.addoption("--full", action="store_true", help="run the whole matrix")
    group.addoption(
        "--seed",
        type=int,
        default=random.SystemRandom().randrange(1_000_000),
        help="draws the samples; printed at the end of a run",
    )
    group.addoption(
        "--share",
        type=float,
        default=1.0,
        help="run only this part of each test's cases; for slow builds",
    )
    group.addoption(
        "--functions",
        type=float,
        default=1.0,
        help="run only this part of the tests; for slow builds",
    )
    group.addoption(
        "--each-fault",
        action="store_true",
        help="run at least one case of each kind of fault that is tested here",
    )
    group.addoption("--cases", type=int, help="how many cases a matrix draws")
    group.addoption(
        "--case", help="run only this case of a matrix, as a failure says it"
    )
    group.addoption(
        "--plain-kernels",
        action="store_true",
        help="reduce with the least instruction set, the one that sanitizers see",
    )


@pytest.hookimpl(tryfirst=True)  # before pytest-timeout takes its limit
def pytest_configure(config: pytest.Config) -> None:
    """Take the seed of the process that gives the tests out; choose the kernels."""
    if config.getoption("--full") and config.getoption("timeout", None) is None:
        config.option.timeout = FULL_LIMIT_S
    config.stash[_TALLY] = Counter()
    config.stash[_BEGIN] = now()
    given = getattr(config, "workerinput", {})
    config.option.seed = given.get("commrt_seed", config.option.seed)
    if config.getoption("--plain-kernels"):
        from commrt._native import kernels

        assert kernels.use_isa(kernels.isas()[0])


def pytest_report_header(config: pytest.Config) -> str:
    """Say the seed first, too: a sanitizer that finds something leaves no summary."""
    return f"seed: {config.getoption('--seed')}"


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell a worker of pytest-xdist the seed: its own option would draw another."""
    node.workerinput["commrt_seed"] = node.config.getoption("--seed")


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Take tests out that an ordinary run leaves out."""
    seed = config.getoption("--seed")
    one_case = config.getoption("--case") is not None
    items[:] = [item for item in items if ("one_case" in item.keywords) == one_case]
    if config.getoption("--full"):
        return
    left_out = set(_left_out(items, seed))
    rest = [item for item in items if item not in left_out]
    shares = config.getoption("--share"), config.getoption("--functions")
    shared = [item for item in rest if "whole" not in item.keywords]
    left_out |= set(_beyond(*shares, shared, seed))
    if config.getoption("--each-fault"):
        left_out -= set(_one_of_each_fault(rest, left_out, seed))
    if left_out:
        config.stash[_NOTE] = f"; {len(left_out)} tests only with --full"
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]


def _left_out(items: list[pytest.Item], seed: int) -> Iterator[pytest.Item]:
    """Yield what an ordinary run does without, by the test functions' marks."""
    groups: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("full") is not None:
            groups.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for name, cases in groups.items():
        mark = cases[0].get_closest_marker("full")
        assert mark is not None
        number = min(mark.kwargs.get("sample", 0), len(cases))
        yield from _all_but(number, cases, f"{name} {seed}")


def _beyond(
    share: float, functions: float, items: list[pytest.Item], seed: int
) -> Iterator[pytest.Item]:
    """Yield what is left out where only a share of functions, and of cases, runs."""
    groups: dict[str, list[pytest.Item]] = {}
    for item in items:
        groups.setdefault(item.nodeid.partition("[")[0], []).append(item)
    many = max(1, round(functions * len(groups))) if groups else 0
    kept = set(random.Random(f"{seed} functions").sample(sorted(groups), many))
    for name, cases in groups.items():
        number = max(1, round(share * len(cases))) if name in kept else 0
        yield from _all_but(number, cases, f"{name} {seed} share")


def _one_of_each_fault(
    items: list[pytest.Item], left_out: set[pytest.Item], seed: int
) -> Iterator[pytest.Item]:
    """Yield a case of each kind of fault of which none is kept."""
    for fault, names in FAULTS.items():
        begins = tuple(name if "[" in name else f"{name}[" for name in names)
        there = [
            item
            for item in items
            if f"{item.nodeid}[".removeprefix("tests/").startswith(begins)
        ]
        if there and left_out.issuperset(there):
            yield random.Random(f"{seed} {fault}").choice(there)


def _all_but(
    number: int, cases: list[pytest.Item], drawn_by: str
) -> Iterator[pytest.Item]:
    kept = set(random.Random(drawn_by).sample(range(len(cases)), number))
    yield from (case for at, case in enumerate(cases) if at not in kept)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Say how many cases were compared, how to repeat the run, who worked beside it."""
    for what, number in config.stash[_TALLY].items():
        terminalreporter.write_line(f"compared {number:,} cases: {what}")
    seed, left_out = config.getoption("--seed"), config.stash.get(_NOTE, "")
    terminalreporter.write_line(
        f"seed: {seed} (pytest --seed {seed} draws the same){left_out}"
    )
    cores = len(os.sched_getaffinity(0))
    terminalreporter.write_line(describe(config.stash[_BEGIN], now(), cores))


@pytest.fixture(scope="session")
def seed(request: pytest.FixtureRequest) -> int:
    """The run's seed, for tests that draw their own samples."""
    value: int = request.config.getoption("--seed")
    return value


@pytest.fixture(scope="session")
def full(request: pytest.FixtureRequest) -> bool:
    """Whether the whole matrix runs."""
    return bool(request.config.getoption("--full"))


@pytest.fixture(scope="session")
def num_cases(request: pytest.FixtureRequest) -> int:
    """How many cases the matrix of ranks in one thread draws."""
    asked: int | None = request.config.getoption("--cases")
    if asked is not None:
        return asked
    return ALL_CASES if request.config.getoption("--full") else CASES


@pytest.fixture(scope="session")
def case_line(request: pytest.FixtureRequest) -> str:
    """The case that ``--case`` repeats."""
    line: str = request.config.getoption("--case")
    return line


@pytest.fixture(scope="session")
def tally(request: pytest.FixtureRequest) -> Callable[[str, int], None]:
    """Return what counts compared cases, for the end of the run."""
    counts = request.config.stash[_TALLY]

    def add(what: str, number: int) -> None:
        counts[what] += number

    return add
