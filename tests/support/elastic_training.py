# SPDX-License-Identifier: Apache-2.0
"""A small training of numpy's for tests of faults: all of it is seeded by numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from commrt import elastic

__all__ = ["WIDTH", "Ranks", "Rounded", "Training"]

WIDTH = 6


class Ranks(Protocol):
    """The calls of a communicator that a step makes."""

    @property
    def rank(self) -> int:
        """The number of this rank."""

    @property
    def size(self) -> int:
        """The number of ranks."""

    def allreduce(self, x: Any, /) -> Any:
        """Return the sum over all ranks."""


class Rounded:
    """Ranks whose sums are exact: no order of the additions changes a bit.

    Each summand is rounded to a multiple of 2**-20, and float64 adds those exactly.
    """

    def __init__(self, rank: int, size: int, total: Callable[[Any], Any]) -> None:
        self.rank, self.size, self._total = rank, size, total

    def allreduce(self, x: Any, /) -> Any:
        """Return the sum over all ranks."""
        return self._total(np.rint(x * 2.0**20) * 2.0**-20)


class Training:
    """A linear model with momentum, and noise of each rank's own."""

    def __init__(self, first: int) -> None:
        self.weights = np.zeros(WIDTH)
        self.velocity = np.zeros(WIDTH)
        self.counter = np.zeros(1, np.int64)
        """Steps taken."""
        self.noise = np.random.default_rng(first)
        self.state = elastic.State(
            counter=self.counter,
            weights=self.weights,
            velocity=self.velocity,
            local={"noise": self},
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the noise."""
        found: dict[str, Any] = self.noise.bit_generator.state
        return found

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Return to that state."""
        self.noise.bit_generator.state = state

    def step(self, comm: Ranks, number: int) -> None:
        """Take the next step, with a collective in the middle of the update."""
        assert self.counter[0] == number, (self.counter, number)
        self.counter += 1
        rows = np.random.default_rng(number).normal(size=(8 * comm.size, WIDTH))
        rows = rows[comm.rank :: comm.size]
        error = rows @ (self.weights - np.arange(WIDTH)) + self.noise.normal(size=8)
        gradient = comm.allreduce(rows.T @ error) / (8 * comm.size)
        self.velocity[...] = 0.9 * self.velocity + gradient
        half = self.velocity.size // 2
        self.weights[:half] -= 0.05 * self.velocity[:half]
        norm = comm.allreduce(self.velocity[:1].copy())
        self.weights[half:] -= 0.05 * self.velocity[half:] + 0 * norm[0]

    def hexadecimal(self) -> list[str]:
        """Return all bits of the model."""
        return [float(x).hex() for x in (*self.weights, *self.velocity)]

    def dump(self) -> dict[str, Any]:
        """Return all that a step changes."""
        return {
            "counter": self.counter.tolist(),
            "weights": self.weights.tolist(),
            "velocity": self.velocity.tolist(),
            "noise": self.state_dict(),
        }

    @classmethod
    def from_dump(cls, dump: dict[str, Any]) -> Training:
        """Return one in that state."""
        made = cls(99)
        made.counter[...] = dump["counter"]
        made.weights[...] = dump["weights"]
        made.velocity[...] = dump["velocity"]
        made.load_state_dict(dump["noise"])
        return made
