# SPDX-License-Identifier: Apache-2.0
"""What a benchmark's job is given where its figures do not count."""

from __future__ import annotations

from typing import Any

QUICK: dict[str, Any] = {
    "iterations": 4,
    "min_iterations": 2,
    "min_s": 0.0,
    "floor_us": 1.0,
    "budget_s": 0.01,
    "warmup": 1,
    "device": "thread",
}
