# SPDX-License-Identifier: Apache-2.0
"""Simulates schedules on networks that nobody here has: ``python -m commrt.sim``."""

from __future__ import annotations

from commrt.sim.costs import Costs
from commrt.sim.placements import place
from commrt.sim.simulate import Simulated, simulate

__all__ = ["Costs", "Simulated", "place", "simulate"]
