# SPDX-License-Identifier: Apache-2.0
"""Which tests run: all with ``--full``, else a sample that changes with every run.

``@pytest.mark.full`` is left out of an ordinary run. ``@pytest.mark.full(sample=3)``
keeps three of the test's cases, drawn with the run's seed, so that many ordinary runs
cover what a full one covers. ``--share 0.3`` keeps that part of every test's cases, at
least one of each, and ``--functions 0.3`` that part of the tests. The seed is printed;
``--seed`` repeats a run.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

_NOTE = pytest.StashKey[str]()


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
        "--plain-kernels",
        action="store_true",
        help="reduce with the least instruction set, the one that sanitizers see",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Choose the kernels before any test."""
    if config.getoption("--plain-kernels"):
        from commrt._native import kernels

        assert kernels.use_isa(kernels.isas()[0])


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Take tests out that an ordinary run leaves out."""
    seed = config.getoption("--seed")
    if config.getoption("--full"):
        return
    left_out = set(_left_out(items, seed))
    rest = [item for item in items if item not in left_out]
    shares = config.getoption("--share"), config.getoption("--functions")
    left_out |= set(_beyond(*shares, rest, seed))
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


def _all_but(
    number: int, cases: list[pytest.Item], drawn_by: str
) -> Iterator[pytest.Item]:
    kept = set(random.Random(drawn_by).sample(range(len(cases)), number))
    yield from (case for at, case in enumerate(cases) if at not in kept)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Say how to repeat the run.

    Workers of pytest-xdist get their options, and so the seed, from this process.
    """
    seed, left_out = config.getoption("--seed"), config.stash.get(_NOTE, "")
    terminalreporter.write_line(
        f"seed: {seed} (pytest --seed {seed} draws the same){left_out}"
    )


@pytest.fixture(scope="session")
def seed(request: pytest.FixtureRequest) -> int:
    """The run's seed, for tests that draw their own samples."""
    value: int = request.config.getoption("--seed")
    return value
