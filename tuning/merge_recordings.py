# SPDX-License-Identifier: Apache-2.0
"""Several recordings as one: all launches side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from commrt.select.facts import Candidate
from commrt.select.table import Catalog
from commrt.tuning.samples import Recording

__all__ = ["join"]


def join(
    recordings: Sequence[tuple[str, Recording]], known: Catalog
) -> tuple[Recording, list[str]]:
    """Return one recording of all, and what was left out of it.

    Args:
        recordings: with their names.
        known: the algorithms that exist: a table cannot name others.
    """
    joined, lines = Recording(), []
    earlier: list[tuple[str, Recording]] = []
    for name, recording in recordings:
        twin = next((one for one, seen in earlier if _equal(seen, recording)), None)
        if twin is not None:
            # Counted twice, its launches would look like more evidence than there is.
            lines.append(f"{name} holds the same measurements as {twin}: used once")
            continue
        earlier.append((name, recording))
        lines += _add(joined, name, recording, known)
    return joined, lines


def _equal(first: Recording, second: Recording) -> bool:
    return first.samples == second.samples and first.launches == second.launches


def _add(
    joined: Recording, name: str, recording: Recording, known: Catalog
) -> list[str]:
    """Add one recording; return what of it this commrt no longer has."""
    first = len(joined.launches)
    numbers = {index: first + at for at, index in enumerate(recording.launches)}
    for index, launch in recording.launches.items():
        joined.begin(replace(launch, index=numbers[index]))
    gone: dict[str, None] = {}
    for sample in recording.samples:
        ranks = recording.launches[sample.launch].facts.size
        if _exists(known, sample.op, sample.candidate, ranks):
            moved = replace(sample, launch=numbers[sample.launch])
            joined.samples.append(moved)
        else:
            gone[f"{name}: {sample.candidate} for {sample.op} is left out, as this "
                 f"commrt has no such candidate"] = None  # fmt: skip
    joined.failures += recording.failures
    joined.unfinished.update(recording.unfinished)
    for cell, candidate in recording.unasked.items():
        ranks, _, op, _ = cell
        if _exists(known, op, candidate, ranks):
            joined.unasked[cell] = candidate
    for op, candidates in recording.orders.items():
        order = joined.orders.setdefault(op, [])
        order += [one for one in candidates if one not in order]
    joined.software.update(recording.software)
    return list(gone)


def _exists(known: Catalog, op: str, candidate: Candidate, ranks: int) -> bool:
    """Return whether a table of this commrt may name the candidate."""
    backend, algorithm = candidate.backend, candidate.algorithm
    if backend not in known.algorithms or algorithm not in known.names(backend, op):
        return False
    if not candidate.params or known.parameters is None:
        return True
    allowed = known.parameters(op, backend, algorithm, ranks)
    return allowed is None or all(
        name in allowed and allowed[name](value) is None
        for name, value in candidate.params.items()
    )
