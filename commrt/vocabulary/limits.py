# SPDX-License-Identifier: Apache-2.0
"""Limits of waits: from what programs write to seconds, and from these to a deadline.

Programs that want no limit write ``inf``, ``1e300``, ``timedelta.max``, 2**31 or 300
years. All of these become ``NO_LIMIT_S``, which every clock and lock can count.
"""

from __future__ import annotations

import math
import time
from datetime import timedelta
from typing import Any

import numpy as np

from commrt.errors import UsageError, shown

__all__ = [
    "NO_LIMIT_S",
    "as_timedelta",
    "capped",
    "check_timeout",
    "deadline_after",
    "parse_seconds",
    "socket_seconds",
    "timedelta_seconds",
]

NO_LIMIT_S = 1e9
"""Seconds, 31 years, that stand for no limit: longer limits overflow locks, which count
nanoseconds in 63 bits."""
_LONGEST_POLL_S = 2_147_483.0
"""Seconds, 24 days, that a poll of sockets can wait: it counts milliseconds in 31 bits,
and torch's stores are given no more than it can count."""


def capped(seconds: float) -> float:
    """Return a limit; ``NO_LIMIT_S`` instead of a longer one."""
    return min(float(seconds), NO_LIMIT_S)


def check_timeout(what: str, timeout_s: Any) -> float:
    """Return a number of seconds above 0, or raise UsageError; also of a timedelta."""
    if isinstance(timeout_s, timedelta):
        timeout_s = timeout_s.total_seconds()
    number = isinstance(timeout_s, int | float | np.integer | np.floating)
    if not number or isinstance(timeout_s, bool) or not timeout_s > 0:
        raise UsageError(
            f"{what}: timeout_s={shown(timeout_s)} must be a number of seconds above 0"
        )
    try:
        return capped(timeout_s)
    except OverflowError:  # an integer that no float can hold
        return NO_LIMIT_S


def parse_seconds(text: str) -> float:
    """Return a limit that was written as text; ValueError where it is none.

    ``inf`` and ``none`` mean no limit.
    """
    if text.strip().lower() == "none":
        return NO_LIMIT_S
    try:
        seconds = float(text)
    except ValueError:
        raise ValueError("not a number of seconds") from None
    if math.isnan(seconds) or seconds <= 0:
        raise ValueError("must be a number of seconds above 0")
    return capped(seconds)


def timedelta_seconds(limit: timedelta) -> float:
    """Return the seconds of torch's limits.

    torch counts microseconds in 63 bits: the longest timedelta comes back from it as a
    large negative one.
    """
    seconds = limit.total_seconds()
    return NO_LIMIT_S if seconds < -NO_LIMIT_S else capped(seconds)


def as_timedelta(limit_s: float) -> timedelta:
    """Return a limit as torch's stores and groups take it."""
    return timedelta(seconds=socket_seconds(limit_s))


def socket_seconds(limit_s: float) -> float:
    """Return a limit that a socket can wait for."""
    return min(limit_s, _LONGEST_POLL_S)


def deadline_after(limit_s: float) -> float:
    """Return the time, by ``time.monotonic``, at which a limit that begins now ends."""
    return time.monotonic() + limit_s
