# SPDX-License-Identifier: Apache-2.0
"""Bytes of factors and inverses on one rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch

from commrt.layers.kfac.state import averages_in, inverted_in

__all__ = ["Memory"]

Tensor: TypeAlias = torch.Tensor


class Memory(NamedTuple):
    """Bytes that K-FAC holds on one rank, beside momentum."""

    factors_nbytes: int
    """Of the averages, as triangles."""
    inverted_nbytes: int
    """Of the averages that the inverses are of, where they have changed since."""
    inverses_nbytes: int
    """Of the inverses that this rank keeps, as whole matrices."""

    @classmethod
    def of(
        cls, states: Sequence[Mapping[str, Any]], inverses: Iterable[Sequence[Tensor]]
    ) -> Memory:
        """Return the bytes in states of layers, and in pairs of inverses."""
        current: dict[int, int] = {}
        older: dict[int, int] = {}
        for state in states:
            averages, inverted = averages_in(state), inverted_in(state)
            for each in () if averages is None else averages.factors:
                current[each.data_ptr()] = each.nbytes
            for each in () if inverted is None else inverted.factors:
                older[each.data_ptr()] = each.nbytes
        changed = sum(older[each] for each in {*older} - {*current})
        kept = sum(each.nbytes for pair in inverses for each in pair)
        return cls(sum(current.values()), changed, kept)
