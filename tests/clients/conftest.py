# SPDX-License-Identifier: Apache-2.0
"""Programs from PyPI on commrt, each in an environment of its own.

``make test-clients`` makes the environments and runs each test in the one that has its
program. The losses of all ranks are compared with those of one process, and what they
communicate with formulas; the end of a run says what was found, for
docs/internals/clients.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from client_calls import Calls, by_rank, nbytes_of
from mpi_ranks import mpirun
from torch_ranks import torchrun

__all__ = ["mpirun", "torchrun"]

_SAID = pytest.StashKey[list[str]]()
Compare = Callable[..., None]
Expected = Calls | Callable[[int], Calls]
"""The same on all ranks, or by rank."""
Account = Callable[[str, Path, Expected, Expected], None]


def pytest_configure(config: pytest.Config) -> None:
    """Begin the list of what was compared."""
    config.stash[_SAID] = []


@pytest.fixture
def compare(request: pytest.FixtureRequest) -> Compare:
    """Return what compares the losses of ranks with those of one process."""
    said = request.config.stash[_SAID]

    def compared(
        what: str,
        want: list[float],
        ranks: Sequence[list[float]],
        tolerance: float = 1e-5,
    ) -> None:
        got = [sum(step) / len(ranks) for step in zip(*ranks, strict=True)]
        pairs = list(zip(got, want, strict=True))
        apart = max(abs(a - b) / abs(b) for a, b in pairs)
        assert apart <= tolerance, f"{what}: {pairs}"
        # A model that learns nothing would have equal losses, too.
        assert want[-1] != want[0]
        said.append(
            f"{what}, {len(ranks)} ranks: {len(want)} steps, loss {got[0]:.6f} to "
            f"{got[-1]:.6f}, at most {apart:.1e} of it apart"
        )

    return compared


@pytest.fixture
def account(request: pytest.FixtureRequest) -> Account:
    """Return what holds the calls that ranks have logged to a formula."""
    said = request.config.stash[_SAID]

    def accounted(what: str, folder: Path, formula: Expected, beside: Expected) -> None:
        """Compare calls with those of the formula, and those beside it, of a rank."""
        found = by_rank(folder)
        for rank, mine in enumerate(found):
            want, more = _of(formula, rank), _of(beside, rank)
            assert not want.keys() & more.keys()
            assert want, "a formula of nothing holds for everything"
            where = f"{what}, rank {rank}"
            assert mine - (want + more) == {}, f"{where}: too many"
            assert (want + more) - mine == {}, f"{where}: missing"
        first, other = _of(formula, 0), _of(beside, 0)
        said.append(
            f"{what}, {len(found)} ranks: {first.total()} calls of {nbytes_of(first)} "
            f"B as the formula has it, {other.total()} of {nbytes_of(other)} B beside"
        )

    return accounted


def _of(expected: Expected, rank: int) -> Calls:
    return expected(rank) if callable(expected) else expected


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Say what was compared."""
    for line in config.stash[_SAID]:
        terminalreporter.write_line(line)
