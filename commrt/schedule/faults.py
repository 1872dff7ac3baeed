# SPDX-License-Identifier: Apache-2.0
"""What the native checks found wrong, in words."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["of_contents"]

Held = tuple[int, Sequence[int]]
"""A part of the operation's data, or -1 for nothing, and whose contributions."""


def of_contents(kind: str, numbers: Sequence[int], contents: Sequence[Held]) -> str:
    """Return what is wrong with the contents of blocks.

    Args:
        kind: of the fault.
        numbers: those behind the place of the fault.
        contents: what the blocks hold.
    """
    if kind == "nothing":
        return f"it reads block {numbers[0]}, which holds nothing yet; write it first"
    if kind == "empty slot":
        return f"it reads slot {numbers[0]}, which holds nothing yet; write it first"
    if kind == "no reduction":
        return "it reduces, but the operation has no reduction; copy or receive instead"
    told = [_describe(one) for one in contents]
    if kind == "parts":
        return f"it reduces {told[0]} with {told[1]}; expected the same part of both"
    if kind == "twice":
        return f"it reduces {told[0]} a second time; each rank may count once"
    if kind == "order":
        return f"out of rank order: {told[0]}, then {told[1]}"
    assert kind == "ends", kind
    rank, block = numbers
    return f"rank {rank} block out[{block}] ends with {told[0]}, expected {told[1]}"


def _describe(content: Held) -> str:
    part, ranks = content
    if part < 0:
        return "nothing"
    names = [str(rank) for rank in ranks]
    shown = ", ".join(names) if len(names) <= 8 else f"{', '.join(names[:7])}, …"
    return f"part {part} from rank{'s' if len(names) > 1 else ''} {shown}"
