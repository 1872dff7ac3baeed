# SPDX-License-Identifier: Apache-2.0
"""Candidates for a policy, with costs and rules that a test states as functions.

Policy(facts, None, StatedOffers([RING, DIRECT], lambda query, one: 1.0))
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from commrt.select.facts import Candidate, Query
from commrt.select.policy import Offers

__all__ = ["StatedOffers"]


class StatedOffers(Offers):
    """Offers the same candidates for every query; ``methods`` replace its own."""

    def __init__(
        self,
        found: Sequence[Candidate],
        predicted_us: Callable[[Query, Candidate], float],
        **methods: Callable[..., Any],
    ) -> None:
        self._found = found
        self._predicted_us = predicted_us
        for name, method in methods.items():
            assert hasattr(self, name), name
            setattr(self, name, method)

    def runnable(self, query: Query) -> Sequence[Candidate]:
        return self._found

    def predicted_us(self, query: Query, candidate: Candidate) -> float:
        return self._predicted_us(query, candidate)
