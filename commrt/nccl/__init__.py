# SPDX-License-Identifier: Apache-2.0
"""NCCL by a table of its own: found at run time, nothing of it needed to build."""

from __future__ import annotations

from commrt.nccl.abilities import Support, support
from commrt.nccl.comm import NcclComm, NcclConfig
from commrt.nccl.libnccl import Library, describe, library, taken, why_missing

__all__ = [
    "Library",
    "NcclComm",
    "NcclConfig",
    "Support",
    "describe",
    "library",
    "support",
    "taken",
    "why_missing",
]
