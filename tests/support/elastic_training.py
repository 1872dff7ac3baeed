# SPDX-License-Identifier: Apache-2.0
"""A small training of numpy's for tests of faults: all of it is seeded by numbers."""

from __future__ import annotations

from typing import Any

import numpy as np

from commrt import elastic
from commrt.comm import Communicator

__all__ = ["WIDTH", "Training"]

WIDTH = 6


class Training:
    """A linear model with momentum, and noise of each rank's own."""

    def __init__(self, first: int) -> None:
        self.weights = np.zeros(WIDTH)
        self.velocity = np.zeros(WIDTH)
        self.noise = np.random.default_rng(first)
        self.state = elastic.State(
            weights=self.weights, velocity=self.velocity, local={"noise": self}
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the noise."""
        found: dict[str, Any] = self.noise.bit_generator.state
        return found

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Return to that state."""
        self.noise.bit_generator.state = state

    def step(self, comm: Communicator, number: int) -> None:
        """Take a step, with a collective in the middle of the update."""
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
            "weights": self.weights.tolist(),
            "velocity": self.velocity.tolist(),
            "noise": self.state_dict(),
        }

    @classmethod
    def from_dump(cls, dump: dict[str, Any]) -> Training:
        """Return one in that state."""
        made = cls(99)
        made.weights[...] = dump["weights"]
        made.velocity[...] = dump["velocity"]
        made.load_state_dict(dump["noise"])
        return made
