# SPDX-License-Identifier: Apache-2.0
"""Scenarios of process groups: what ``continuous_suite.py`` runs, by name.

A scenario is a function of a group of all ranks. It calls what a program calls, and
returns whatever it got, on every rank. It runs with a group of commrt and with one of
gloo, and both must give the same. Where gloo refuses what NCCL takes, or has not what
commrt has, the scenario says why, and returns what it got beside what it should have.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from process_groups import unequal

__all__ = ["differences", "names", "numbers", "raised", "scenario"]

Scenario = Callable[[Any], Any]
BESIDE_GLOO: dict[str, Scenario] = {}
WITHOUT_GLOO: dict[str, Scenario] = {}
LEAST_RANKS: dict[str, int] = {}
TOLERANCE = 1e-6


def scenario(
    *, gloo_cannot: str = "", ranks: int = 1
) -> Callable[[Scenario], Scenario]:
    """Return what makes a function a scenario.

    Args:
        gloo_cannot: why there are no numbers of gloo; the function then returns pairs
            of what it got and what is right.
        ranks: how many it takes at least.
    """

    def added(function: Scenario) -> Scenario:
        where = WITHOUT_GLOO if gloo_cannot else BESIDE_GLOO
        assert function.__name__ not in LEAST_RANKS
        where[function.__name__] = function
        LEAST_RANKS[function.__name__] = ranks
        return function

    return added


def names(size: int) -> list[str]:
    """Return the names of all scenarios for so many ranks."""
    return [name for name, least in LEAST_RANKS.items() if size >= least]


def differences(name: str, group: Any, gloo: Any) -> list[str]:
    """Run a scenario; return what is not as it should be.

    Args:
        name: of the scenario.
        group: commrt's, of all ranks.
        gloo: gloo's, of the same ranks.
    """
    if name in WITHOUT_GLOO:
        pairs = WITHOUT_GLOO[name](group)
        return [
            text for got, want in pairs for text in unequal(want, got, TOLERANCE, name)
        ]
    results = []
    for each in (gloo, group):
        torch.manual_seed(1234)
        results.append(BESIDE_GLOO[name](each))
    return unequal(*results, TOLERANCE, name)


def numbers(group: Any, count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return small numbers of this rank: sums and products of some are exact."""
    found = (torch.arange(count) * 7 + dist.get_rank(group) * 3) % 5 + 1
    if dtype.is_complex:
        return torch.complex(found.double(), found.double() - 2).to(dtype)
    return found % 2 == 0 if dtype is torch.bool else found.to(dtype)


def raised(call: Callable[[], Any]) -> str:
    """Return whose base class a program may catch what a call raises by."""
    try:
        call()
    except ValueError:
        return "ValueError"
    except RuntimeError:
        return "RuntimeError"
    return "nothing"
