# SPDX-License-Identifier: Apache-2.0
"""Signature of an operation: what a rank tells the others of a tensor it has submitted.

The ranks exchange signatures as JSON, so nothing that comes from another rank is run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["KINDS", "Kind", "Signature", "differences", "ranks_text"]


@dataclass(frozen=True)
class Kind:
    """Facts about one kind of operation."""

    name: str
    rows_differ: bool = False
    """True if ranks may have different numbers of rows."""
    takes_zeros: bool = False
    """True if a rank that has joined takes part with zeros."""
    is_fused: bool = True
    """True if several tensors may share one collective."""
    has_root: bool = False
    """True if its root is a rank that all ranks must name alike."""


KINDS = {
    each.name: each
    for each in (
        Kind("allreduce", takes_zeros=True),
        Kind("allgather", rows_differ=True),
        Kind("broadcast", has_root=True),
        Kind("alltoall", rows_differ=True, is_fused=False),
        Kind("reducescatter"),
        Kind("barrier", takes_zeros=True, is_fused=False),
        Kind("meeting", is_fused=False),
    )
}

Tensors = tuple[tuple[str, tuple[int, ...]], ...]


@dataclass(frozen=True)
class Signature:
    """One rank's operation, without its name and its values."""

    kind: str
    """A key of ``KINDS``."""
    tensors: Tensors = ()
    """Element type and shape of each tensor; several of a grouped operation."""
    device: str = "cpu"
    """Type of the tensors' device."""
    op: str = ""
    """Reduction, empty where there is none."""
    root: int = -1
    """Root among the ranks of the process set; -1 where there is none."""
    prescale: float = 1.0
    postscale: float = 1.0
    splits: tuple[int, ...] = ()
    """Rows for each rank, of an alltoall."""
    refusal: str = ""
    """Reason why this rank has refused its call; empty where it has not."""
    pieces: str = ""
    """The places of cut parameters whose gradients these are; empty where all ranks
    have the same parameters."""

    def as_json(self) -> list[Any]:
        """Return what ``json`` takes."""
        tensors = [[dtype, list(shape)] for dtype, shape in self.tensors]
        scales = [self.prescale.hex(), self.postscale.hex()]
        head = [self.kind, tensors, self.device, self.op, self.root]
        return [*head, scales, list(self.splits), self.refusal, self.pieces]

    @classmethod
    def of_json(cls, told: list[Any]) -> Signature:
        """Return the signature that another rank has told."""
        kind, tensors, device, op, root, scales, splits, refusal, pieces = told
        return cls(
            kind,
            tuple((dtype, tuple(shape)) for dtype, shape in tensors),
            device,
            op,
            root,
            float.fromhex(scales[0]),
            float.fromhex(scales[1]),
            tuple(splits),
            refusal,
            pieces,
        )

    def facts(self) -> dict[str, str]:
        """Return what must be equal on all ranks, as messages show it."""
        kind = KINDS[self.kind]
        found = {"operation": self.kind, "tensors": str(len(self.tensors))}
        for number, (dtype, shape) in enumerate(self.tensors):
            which = f" of tensor {number}" if len(self.tensors) > 1 else ""
            found[f"type{which}"] = dtype
            if kind.rows_differ:
                found[f"shape beyond the rows{which}"] = str(shape[1:])
            else:
                found[f"shape{which}"] = str(shape)
        if self.tensors:
            found["device"] = self.device
        if self.op:
            found["op"] = self.op
        if self.pieces:
            found["pieces of cut parameters"] = self.pieces
        if kind.has_root:
            found["root_rank"] = str(self.root)
        if (self.prescale, self.postscale) != (1.0, 1.0):
            found["factors"] = f"{self.prescale!r} before, {self.postscale!r} after"
        return found


def differences(signatures: Mapping[int, Signature]) -> str:
    """Return where ranks' signatures differ, a line for each fact; empty: nowhere.

    Args:
        signatures: by rank, as messages name ranks.
    """
    told = {rank: signature.facts() for rank, signature in signatures.items()}
    names = list(dict.fromkeys(name for facts in told.values() for name in facts))
    lines = []
    for name in names:
        ranks: dict[str, list[int]] = {}
        for rank, facts in told.items():
            ranks.setdefault(facts.get(name, "none"), []).append(rank)
        if len(ranks) > 1:
            parts = [f"{value} on {ranks_text(who)}" for value, who in ranks.items()]
            lines.append(f"  {name}: {'; '.join(parts)}")
        if name == "operation" and lines:
            break  # all else differs with it
    return "\n".join(lines)


def ranks_text(ranks: Iterable[int]) -> str:
    """Return ranks for a message: ``rank 3``, or ``ranks 0, 2 and 5 more``."""
    listed = sorted(ranks)
    shown = ", ".join(map(str, listed[:8]))
    more = f" and {len(listed) - 8} more" if len(listed) > 8 else ""
    return f"rank{'s' if len(listed) > 1 else ''} {shown}{more}"
