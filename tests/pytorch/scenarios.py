# SPDX-License-Identifier: Apache-2.0
"""Scenarios of process groups: what ``continuous_suite.py`` runs, by name.

A scenario is a function of a group of all ranks. It calls what a program calls, and
returns whatever it got, on every rank. It runs with a group of commrt and with one of
gloo, and both must give the same. Where gloo refuses what NCCL takes, the scenario says
why, and returns what it got beside what it should have got.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["BESIDE_GLOO", "WITHOUT_GLOO", "numbers", "raised", "scenario"]

Scenario = Callable[[Any], Any]
BESIDE_GLOO: dict[str, Scenario] = {}
WITHOUT_GLOO: dict[str, Scenario] = {}


def scenario(*, gloo_cannot: str = "") -> Callable[[Scenario], Scenario]:
    """Return what makes a function a scenario.

    Args:
        gloo_cannot: why there are no numbers of gloo; the function then returns pairs
            of what it got and what is right.
    """

    def added(function: Scenario) -> Scenario:
        where = WITHOUT_GLOO if gloo_cannot else BESIDE_GLOO
        assert function.__name__ not in {*BESIDE_GLOO, *WITHOUT_GLOO}
        where[function.__name__] = function
        return function

    return added


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
