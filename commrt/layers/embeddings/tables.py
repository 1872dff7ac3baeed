# SPDX-License-Identifier: Apache-2.0
"""Tables of embeddings, as all ranks describe them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from commrt.errors import UsageError, shown

__all__ = ["MODES", "SHARDINGS", "EmbeddingTable", "checked_tables"]

MODES = ("sum", "mean")
"""Ways in which the rows of a bag become one."""

SHARDINGS = ("table", "row", "column")
"""Ways in which a table may lie on ranks: whole on one, or cut by rows or columns."""


@dataclass(frozen=True)
class EmbeddingTable:
    """One table of embeddings, and how programs look rows up in it.

    Raises UsageError for values that do not fit.
    """

    name: str
    """Its name in states: the serial parameter is ``NAME.weight``; without dots."""
    num_embeddings: int
    """Rows."""
    embedding_dim: int
    """Columns."""
    mode: str = "sum"
    """"sum" or "mean": how the rows of a bag become one."""
    padding_idx: int | None = None
    """A row that counts in no bag, and gets no gradient; None: there is none."""
    is_weighted: bool = False
    """True: bags bring a weight for each index; with "sum" only."""
    sharding: str | None = None
    """"table", "row" or "column"; None: ``place`` chooses "table" or "row"."""
    lookups: float = 1.0
    """Indices of a sample that are expected on average; ``place`` reads it."""
    init_std: float = 1.0
    """Standard deviation of the first values."""

    def __post_init__(self) -> None:
        what = f"EmbeddingTable {shown(self.name)}"
        if not isinstance(self.name, str) or not self.name or "." in self.name:
            raise UsageError(f"{what}: the name must be a word without dots")
        for field, least in (("num_embeddings", 0), ("embedding_dim", 1)):
            number = getattr(self, field)
            if type(number) is not int or number < least:
                raise UsageError(
                    f"{what}: {field}={shown(number)} must be an integer of at least "
                    f"{least}"
                )
        if self.mode not in MODES:
            raise UsageError(
                f"{what}: mode={shown(self.mode)} must be one of {', '.join(MODES)}"
            )
        if self.sharding is not None and self.sharding not in SHARDINGS:
            raise UsageError(
                f"{what}: sharding={shown(self.sharding)} must be None or one of "
                f"{', '.join(SHARDINGS)}"
            )
        padding = self.padding_idx
        if padding is not None and (
            type(padding) is not int or not 0 <= padding < self.num_embeddings
        ):
            raise UsageError(
                f"{what}: padding_idx={shown(padding)} must be None or a row of 0 to "
                f"{self.num_embeddings - 1}"
            )
        if self.is_weighted and self.mode != "sum":
            raise UsageError(
                f'{what}: weights go with mode="sum" only, as torch\'s EmbeddingBag '
                f"has them; this table has mode={self.mode!r}"
            )
        for field in ("lookups", "init_std"):
            number = getattr(self, field)
            is_number = isinstance(number, int | float) and not isinstance(number, bool)
            if not is_number or not math.isfinite(number) or number < 0:
                raise UsageError(
                    f"{what}: {field}={shown(number)} must be a number of at least 0"
                )

    def facts(self) -> tuple[object, ...]:
        """Return its fields, those of equal tables with one ``repr``."""
        return (
            *(str(self.name), self.num_embeddings, self.embedding_dim, str(self.mode)),
            *(self.padding_idx, bool(self.is_weighted), self.sharding),
            *(float(self.lookups), float(self.init_std)),
        )

    def nbytes(self, itemsize: int) -> int:
        """Return the bytes of the whole table, for elements of ``itemsize`` bytes."""
        return self.num_embeddings * self.embedding_dim * itemsize


def checked_tables(
    what: str, tables: Sequence[EmbeddingTable]
) -> tuple[EmbeddingTable, ...]:
    """Return the tables; UsageError for other things, none, or one name twice."""
    found = tuple(tables) if isinstance(tables, list | tuple) else ()
    if not found or not all(isinstance(each, EmbeddingTable) for each in found):
        raise UsageError(
            f"{what}: tables={shown(tables)} must be a list of EmbeddingTable, with "
            f"one at least"
        )
    names = [each.name for each in found]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"{what}: two tables have the name {name!r}")
    return found
