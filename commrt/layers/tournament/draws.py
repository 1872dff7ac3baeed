# SPDX-License-Identifier: Apache-2.0
"""Random choices of a round, which all ranks make alike without a message."""

from __future__ import annotations

import random
from hashlib import blake2b
from typing import NamedTuple

__all__ = ["Draws"]


class Draws(NamedTuple):
    """Random choices of one round.

    They depend on the seed and the round alone, on no generator that goes on. So a run
    that begins again at a round makes the same choices, with any version of Python.
    """

    seed: int
    """Of the tournament."""
    round_number: int
    """From 0 on."""

    def shuffled(self, num_trainers: int) -> list[int]:
        """Return the trainers in random order."""

        def key(trainer: int) -> bytes:
            text = f"{self.seed}/{self.round_number}/{trainer}"
            return blake2b(text.encode(), digest_size=16).digest()

        return sorted(range(num_trainers), key=key)

    def pairs(self, num_trainers: int) -> list[tuple[int, int]]:
        """Return random pairs of trainers; of an odd number one is left out."""
        order = self.shuffled(num_trainers)
        return list(zip(order[::2], order[1::2], strict=False))

    def generator(self, trainer: int) -> random.Random:
        """Return a generator of one trainer, the same on all of its ranks."""
        return random.Random(f"{self.seed}/{self.round_number}/of {trainer}")
