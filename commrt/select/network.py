# SPDX-License-Identifier: Apache-2.0
"""The network between nodes: a key of selection tables.

Two MPI libraries need different rules on the same machines, and so do two networks. Its
measured values never come out twice the same, so they are compared with tolerance.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

__all__ = ["NO_LIBRARY", "Network", "library_of"]

NO_LIBRARY = "none"
"""Stands for the library where no MPI has started the ranks."""
_RATE_FACTOR, _LATENCY_FACTOR = 2.0, 5.0
"""Networks whose values differ by less are alike. Latencies vary with the load."""
_DIGITS = 3
_VERSION = re.compile(r"(\S.*?) v?([0-9]+)")


@dataclass(frozen=True)
class Network:
    """The library and the network between nodes, as ranks saw them when they met."""

    library: str
    """Name and first version number of the MPI library, or ``none``."""
    gbps: float
    """Rate of a long message while one comes back, in Gbit/s."""
    latency_us: float
    """Time of a short message."""

    @classmethod
    def measured(cls, library: str, alpha_us: float, beta_us: float) -> Network:
        """Return the network of messages that take so long, and so long per byte."""
        gbps = 8e-3 / max(beta_us, 1e-9)
        return cls(library, _rounded(gbps), _rounded(max(alpha_us, 1e-3)))

    def distance(self, other: Network) -> float:
        """Return how far the other is: 0 is equal, below 1 is alike, inf is not."""
        if self.library != other.library:
            return math.inf
        rate = abs(math.log(self.gbps / other.gbps, _RATE_FACTOR))
        latency = abs(math.log(self.latency_us / other.latency_us, _LATENCY_FACTOR))
        farthest = max(rate, latency)
        return farthest if farthest < 1 else math.inf

    def is_like(self, other: Network) -> bool:
        """Return whether rules for the other hold on this one."""
        return self.distance(other) < 1

    def __str__(self) -> str:
        by = "no MPI" if self.library == NO_LIBRARY else self.library
        return f"{by}, {self.gbps:g} Gbit/s, {self.latency_us:g} µs"


def library_of(text: str) -> str:
    """Return a library's name and first version number, as ``Open MPI 5``.

    Args:
        text: as in ``Open MPI v5.0.11`` or ``MPICH 4.3.2``; empty without a library.
    """
    if not text:
        return NO_LIBRARY
    found = _VERSION.match(text)
    return text if found is None else f"{found[1]} {found[2]}"


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")
