# SPDX-License-Identifier: Apache-2.0
"""Pairs of engines that a newly written table may still call tested together.

Somebody has tried that two engines may be at work at the same time on a device, with
the versions that a table names. No measurement tries it. So a pair stays only under two
conditions. Every table that goes into the new one says it. All other measurements used
the versions of one of these tables. Otherwise the pair goes, and a line says why: apart
the engines are slower, together they may hang.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from commrt.select.table import Table

__all__ = ["Kept", "keep_pairs"]

Versions = Mapping[str, object]


@dataclass(frozen=True)
class Kept:
    """The pairs of the tables that stay."""

    pairs: tuple[tuple[str, ...], ...] = ()
    """Pairs for ``Table.tested_together``."""
    software: Versions = field(default_factory=dict)
    """The versions that these were tested with, as far as the tables name them."""
    lines: tuple[str, ...] = ()
    """Lines that name the pairs that go, and the reasons."""


def keep_pairs(
    tables: Sequence[tuple[str, Table]], measured: Sequence[tuple[str, Versions]]
) -> Kept:
    """Return the pairs of the tables that stay beside the measurements.

    Args:
        tables: each with its name, for the lines.
        measured: the software of each recording, with the recording's name.
    """
    said = {pair for _, table in tables for pair in table.tested_together}
    pairs: list[tuple[str, ...]] = []
    lines: list[str] = []
    for pair in sorted(said):
        why = _why_not(pair, tables, measured)
        if why:
            lines.append(
                f"{' and '.join(pair)} are kept apart on devices from here on: {why}. "
                f"Test them together, and write tested_together again"
            )
        else:
            pairs.append(pair)
    engines = {engine for pair in pairs for engine in pair}
    software = {
        engine: table.software[engine]
        for _, table in tables
        for engine in sorted(engines)
        if engine in table.software
    }
    return Kept(tuple(pairs), software, tuple(lines))


def _why_not(
    pair: tuple[str, ...],
    tables: Sequence[tuple[str, Table]],
    measured: Sequence[tuple[str, Versions]],
) -> str:
    """Return why a pair goes; empty where it stays."""
    for name, table in tables:
        if pair not in table.tested_together:
            return f"{name} does not say that they were tested together"
    tested = [{key: table.software.get(key) for key in pair} for _, table in tables]
    for name, software in measured:
        seen = {key: software[key] for key in pair if key in software}
        if not any(all(one[key] == seen[key] for key in seen) for one in tested):
            versions = ", ".join(f"{key} {value}" for key, value in seen.items())
            return f"{name} was measured with {versions}, and they were not tested so"
    return ""
