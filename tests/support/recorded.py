# SPDX-License-Identifier: Apache-2.0
"""Logs of ranks that must not be empty, so that a comparison compares something."""

from __future__ import annotations

from typing import Any

__all__ = ["logs_of"]


def logs_of(recording: Any) -> list[Any]:
    """Return the log of each rank; AssertionError unless each has operations."""
    logs = list(recording.logs())
    assert logs, "nothing was recorded"
    for log in logs:
        assert log.operations, f"rank {log.rank} recorded no operation"
    return logs
