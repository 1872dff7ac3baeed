# SPDX-License-Identifier: Apache-2.0
"""Rates of links as people write them."""

from __future__ import annotations

import re

from commrt.errors import UsageError, shown

__all__ = ["check_rate", "parse_rate", "rate_text"]

_UNITS = {"kbit": 1_000, "mbit": 1_000_000, "gbit": 1_000_000_000}
_RATE = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,6})?)(kbit|mbit|gbit)")
_SLOWEST, _FASTEST = 1_000_000, 100_000_000_000
"""Bits a second. A slower link needs seconds for one large packet; a faster one is
beyond what one machine can copy."""


def parse_rate(text: str) -> int | None:
    """Return bits a second from a text such as ``500mbit``; None for ``unlimited``."""
    if text == "unlimited":
        return None
    found = _RATE.fullmatch(text)
    if found is None:
        raise UsageError(
            f"rate {shown(text)}: expected a number and kbit, mbit or gbit, as in "
            f"500mbit, or unlimited"
        )
    rate = round(float(found[1]) * _UNITS[found[2]])
    check_rate(rate, text)
    return rate


def check_rate(rate: int, text: str) -> None:
    """Raise UsageError for a rate, written as ``text``, that no link here can keep."""
    if not _SLOWEST <= rate <= _FASTEST:
        raise UsageError(
            f"rate {text} cannot be kept: choose one from {rate_text(_SLOWEST)} to "
            f"{rate_text(_FASTEST)}, or unlimited"
        )


def rate_text(rate: int | None) -> str:
    """Return a rate as ``parse_rate`` reads it."""
    if rate is None:
        return "unlimited"
    unit = next((u for u in ("gbit", "mbit") if rate >= _UNITS[u]), "kbit")
    return f"{rate / _UNITS[unit]:.6f}".rstrip("0").rstrip(".") + unit
