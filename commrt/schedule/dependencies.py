# SPDX-License-Identifier: Apache-2.0
"""Places of blocks: which of them are the same memory.

Block i of ``in`` counts as block i of ``out`` where the two may be the same memory: so
a program is right in place and out of place. Who must wait for whom follows from the
places that steps touch. ``native/schedules/steps.cpp`` finds it out, for the builder,
the verifier and the lowering.
"""

from __future__ import annotations

from collections.abc import Sequence

from commrt.schedule.ir import Space

__all__ = ["locations"]


def locations(spaces: Sequence[Space]) -> list[int]:
    """Return the number of the first block of each space; aliased spaces share it."""
    first: list[int] = []
    by_name: dict[str, int] = {}
    following = 0
    for space in spaces:
        aliased = by_name.get(space.alias or "")
        shared = aliased is not None and spaces[aliased].nblk == space.nblk
        first.append(first[aliased] if aliased is not None and shared else following)
        by_name[space.name] = len(first) - 1
        following += space.nblk
    return first
