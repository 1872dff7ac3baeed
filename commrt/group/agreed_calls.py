# SPDX-License-Identifier: Apache-2.0
"""Agreement of ranks whose calls have to fit, by one sum of 8 bytes.

A fact is to be equal on some of the ranks. Each of them adds a number that stands for
the fact as it knows it, and the first of them subtracts its own as often as the others
add theirs. The sum over all ranks is 0 where every fact is equal, and another number
where one is not, but for one case in 2⁶⁴. So ranks with arguments that they have never
passed before know that they fit, and each may plan by itself. Only where they do not
fit do the ranks have to tell each other what they have passed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Protocol

import numpy as np

from commrt import _native

__all__ = ["AgreedCalls", "SharedFact", "Sums", "fact_number"]

_WORD = (1 << 64) - 1


class Sums(Protocol):
    """A set of ranks that sums arrays on the host."""

    def allreduce(self, x: Any, *, op: str, name: str, timeout_s: float) -> Any:
        """Replace ``x`` by the sum over all ranks."""
        ...


def fact_number(fact: Any, numbers: Sequence[int] = ()) -> int:
    """Return a number for a fact, equal on ranks where its ``repr`` is.

    ``numbers`` belong to the fact, too. ``fact`` may be such a number itself, of the
    part of it that many calls have in common: then it takes a tenth of the time.
    """
    if not isinstance(fact, int):
        digest = blake2b(repr(fact).encode(), digest_size=8).digest()
        fact = int.from_bytes(digest, "little")
    return _native.fact_number(fact, numbers) if numbers else fact


@dataclass(frozen=True, slots=True)
class SharedFact:
    """A fact that is to be equal on some of the ranks, this one among them."""

    seed: int
    """A number for the fact (``fact_number``), but for lengths that belong to it."""
    num_ranks: int
    """How many ranks share it."""
    is_first: bool
    """True on one of these ranks."""
    extents: Sequence[tuple[int, int]] | None = ()
    """Lengths that belong to it: array of the call, and dimension. None: the numbers
    of the call."""

    @property
    def factor(self) -> int:
        """How often this rank adds the fact's number, modulo 2⁶⁴."""
        return (1 - self.num_ranks) & _WORD if self.is_first else 1

    def term(self, shapes: Sequence[Sequence[int]], numbers: Sequence[int]) -> int:
        """Return the number that this rank adds, given the call's arrays or numbers."""
        if self.extents is not None:
            numbers = [shapes[array][dim] for array, dim in self.extents]
        return fact_number(self.seed, numbers) * self.factor


class AgreedCalls:
    """Asks the ranks of one communicator whether their calls fit."""

    def __init__(self, ranks: Sums) -> None:
        self._ranks = ranks

    def fit(
        self,
        what: str,
        facts: Iterable[SharedFact],
        limit_s: float,
        shapes: Sequence[Sequence[int]] = (),
        numbers: Sequence[int] = (),
    ) -> bool:
        """Return whether the facts of all ranks' calls fit; collective.

        Args:
            what: the operation.
            facts: those that this rank shares; at least one with each other rank.
            limit_s: seconds that the others may take to come.
            shapes: those of the call's arrays.
            numbers: those of the call.
        """
        mine = sum(each.term(shapes, numbers) for each in facts) & _WORD
        total = np.array([mine], np.uint64)
        self._ranks.allreduce(total, op="sum", name=what, timeout_s=limit_s)
        return not total[0]
