# SPDX-License-Identifier: Apache-2.0
"""Latencies of links as people write them."""

from __future__ import annotations

import re

from commrt.errors import UsageError, shown
from commrt.vocabulary.link_rates import rate_text

__all__ = ["FASTEST", "check_latency", "latency_text", "parse_latency"]

_UNITS = {"us": 1, "ms": 1000}
_LATENCY = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,3})?)(us|ms)")
_SHORTEST_US, _LONGEST_US = 50, 100_000
"""A relay that wakes up adds some 20 us itself. It holds what comes meanwhile."""
FASTEST = 1_000_000_000
"""Bits a second that a relay passes on while cores stay idle."""


def parse_latency(text: str) -> int:
    """Return microseconds from a text such as ``200us`` or ``1.5ms``; 0 for ``none``.

    Raises:
        UsageError: it is no latency, or no link here can have it.
    """
    if text == "none":
        return 0
    found = _LATENCY.fullmatch(text)
    if found is None:
        raise UsageError(
            f"latency {shown(text)}: expected a number and us or ms, as in 200us, or "
            f"none"
        )
    latency_us = round(float(found[1]) * _UNITS[found[2]])
    if not _SHORTEST_US <= latency_us <= _LONGEST_US:
        raise UsageError(
            f"latency {text} cannot be kept: choose one from "
            f"{latency_text(_SHORTEST_US)} to {latency_text(_LONGEST_US)}, or none"
        )
    return latency_us


def check_latency(latency_us: int, rate: int | None, name: str) -> None:
    """Raise UsageError for a link that a relay cannot keep up with."""
    if latency_us and (rate is None or rate > FASTEST):
        raise UsageError(
            f"link {name} has a latency and the rate {rate_text(rate)}: a process "
            f"delays its packets, so give it a rate of at most {rate_text(FASTEST)}"
        )


def latency_text(latency_us: int) -> str:
    """Return a latency as ``parse_latency`` reads it."""
    if latency_us == 0:
        return "none"
    if latency_us % 1000 == 0:
        return f"{latency_us // 1000}ms"
    return f"{latency_us}us"
