# SPDX-License-Identifier: Apache-2.0
"""Engines of calls on devices, each measured by itself: staged, NCCL, NCCL alone."""

from __future__ import annotations

from dataclasses import dataclass

from commrt.backends.catalog import offered
from commrt.bench.launch import Kind

__all__ = ["Engine", "submit_engines"]

_PREFERRED = ("recursive_doubling", "direct", "binomial", "ring")


@dataclass(frozen=True)
class Engine:
    """One way in which a call gets to its device."""

    name: str
    """Name for people."""
    kind: Kind
    """Worker that drives it."""
    candidate: str = ""
    """The value of ``COMMRT_ALGORITHM``; empty: not set."""


def submit_engines(coll: str, device: str) -> list[Engine]:
    """Return the engines whose calls are timed without their end.

    The host's work for a staged call does not matter to its caller: it comes later.
    NCCL and its own C functions need a GPU.
    """
    names = offered("staged", coll)
    host = next((each for each in _PREFERRED if each in names), min(names))
    engines = [Engine("staged", "commrt", f"staged/{host}")]
    if device == "cuda":
        engines.append(Engine("nccl", "commrt", "nccl/native"))
        engines.append(Engine("NCCL itself", "nccl"))
    return engines
