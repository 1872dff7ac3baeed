# SPDX-License-Identifier: Apache-2.0
"""The token bucket that keeps the rate of a link."""

from __future__ import annotations

__all__ = ["BURST_S", "bucket"]

BURST_S = 0.001
"""A bucket holds what the link carries in this time, so that a late timer costs no
rate."""
_LEAST_BURST_NBYTES = 68_000
"""The largest packet that the kernel sends in one piece, with its headers."""
_QUEUE_S = 0.05


def bucket(rate: int, burst_nbytes: int | None = None) -> str:
    """Return the arguments of ``tc`` for a token bucket of that rate.

    ``burst_nbytes``: what passes at once after a rest; None: as much as the rate allows
    in ``BURST_S``, and the largest packet at least. With less, the kernel cuts large
    packets, which costs time of the cores.
    """
    burst = burst_nbytes or max(_LEAST_BURST_NBYTES, round(rate / 8 * BURST_S))
    limit = burst + round(rate / 8 * _QUEUE_S)
    return f"tbf rate {rate}bit burst {burst} limit {limit}"
