# SPDX-License-Identifier: Apache-2.0
"""A number of what the ranks of a call must agree on, which its messages carry."""

from __future__ import annotations

from hashlib import blake2b

__all__ = ["number_of_facts"]

_NBYTES = 2
"""The engine has so many bytes for it (``native/engine/call_mark.hpp``)."""


def number_of_facts(*facts: object) -> int:
    """Return a number of facts, equal on ranks where their ``repr`` is."""
    digest = blake2b(repr(facts).encode(), digest_size=_NBYTES).digest()
    return int.from_bytes(digest, "little")
