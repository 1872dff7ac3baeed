# SPDX-License-Identifier: Apache-2.0
"""Table of torch's functions that take distributed tensors.

Each module of such functions adds its own with ``takes``, so a new one touches only
its module.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["FUNCTIONS", "METHODS", "takes"]

Rule = Callable[..., Any]
R = TypeVar("R", bound=Rule)

FUNCTIONS: dict[Any, Rule] = {}
"""By torch's function."""
METHODS: dict[str, Rule] = {}
"""By the name of a tensor's method."""


def takes(*functions: Any, method: str | None = None) -> Callable[[R], R]:
    """Return a decorator: the function does what these do, and is a method, too."""

    def enter(rule: R) -> R:
        for function in functions:
            FUNCTIONS[function] = rule
        if method is not None:
            METHODS[method] = rule
        return rule

    return enter
