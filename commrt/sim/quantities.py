# SPDX-License-Identifier: Apache-2.0
"""Rates, latencies and lengths as people and SimGrid's platform files write them."""

from __future__ import annotations

import math
import re

from commrt.errors import UsageError, shown

__all__ = ["nbytes_text", "parse_latency", "parse_nbytes", "parse_rate", "time_text"]

_FORM = re.compile(r"([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*([A-Za-z/]*)")
_STEPS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_TIMES_US = {"ps": 1e-6, "ns": 1e-3, "us": 1.0, "ms": 1e3, "s": 1e6}


def parse_rate(text: str, bare: str | None = None) -> float:
    """Return bytes per microsecond from ``100gbit``, ``12.5GB/s``, ``1GBps``.

    Args:
        text: a number and a unit; a small ``b`` is a bit, a capital one a byte.
            ``unlimited`` is infinite.
        bare: the unit of a number without one; None: it must have one.

    Raises:
        UsageError: it is none of these, or not above 0.
    """
    if text == "unlimited":
        return math.inf
    number, unit = _split(text, bare)
    name = unit[:-3] + "bps" if unit.lower().endswith("bit") else unit
    form = re.fullmatch(r"([kKmMgGtT]?)(i?)([bB])(ps|/s)", name)
    if number is None or form is None:
        raise UsageError(
            f"rate {shown(text)}: expected a number and a unit, such as 100gbit or "
            f"12.5GB/s"
        )
    scale = (1024.0 if form[2] else 1000.0) ** _STEPS[form[1].lower()]
    rate = number * scale / (8 if form[3] == "b" else 1) / 1e6
    if not 0 < rate < math.inf:
        raise UsageError(f"rate {shown(text)}: expected one above 0 that is finite")
    return rate


def parse_latency(text: str, bare: str | None = None) -> float:
    """Return microseconds from ``500ns`` or ``1.5us``; 0 for ``none``.

    Args:
        text: a number and a unit.
        bare: the unit of a number without one; None: it must have one.

    Raises:
        UsageError: it is none of these, or negative.
    """
    if text == "none":
        return 0.0
    number, unit = _split(text, bare)
    if number is None or unit not in _TIMES_US:
        raise UsageError(
            f"latency {shown(text)}: expected a number and ns, us, ms or s, such as "
            f"500ns"
        )
    latency_us = number * _TIMES_US[unit]
    if not 0 <= latency_us < math.inf:
        raise UsageError(f"latency {shown(text)}: expected one from 0 that is finite")
    return latency_us


def parse_nbytes(text: str) -> int:
    """Return bytes from ``4096``, ``64KiB`` or ``1MB``, or raise UsageError."""
    number, unit = _split(text, "B")
    form = re.fullmatch(r"([kKmMgGtT]?)(i?)B", unit)
    if number is not None and form is not None:
        value = number * (1024.0 if form[2] else 1000.0) ** _STEPS[form[1].lower()]
        if value == int(value) and 0 <= value < 2**62:
            return int(value)
    raise UsageError(
        f"length {shown(text)}: expected whole bytes, such as 4096, 64KiB or 256MiB"
    )


def _split(text: str, bare: str | None) -> tuple[float | None, str]:
    form = _FORM.fullmatch(text.strip()) if len(text) < 64 else None
    if form is None:
        return None, ""
    return float(form[1]), form[2] or (bare or "")


def nbytes_text(nbytes: int) -> str:
    """Return a length as ``parse_nbytes`` reads it: ``64KiB``."""
    for power, unit in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if nbytes and nbytes % 1024**power == 0:
            return f"{nbytes // 1024**power}{unit}"
    return f"{nbytes}B"


def time_text(time_us: float) -> str:
    """Return a time with six digits and a unit."""
    for limit, unit in ((1e3, "us"), (1e6, "ms"), (math.inf, "s")):
        if time_us < limit:
            return f"{time_us / (limit / 1e3 if limit < math.inf else 1e6):.6g} {unit}"
    raise AssertionError("infinity is the last limit")
