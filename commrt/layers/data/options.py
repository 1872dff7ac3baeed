# SPDX-License-Identifier: Apache-2.0
"""Options of a gradient reducer, checked."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from commrt.errors import UsageError, shown, suggest
from commrt.layers.data.gradients import Parameter
from commrt.layers.data.transfers import Bucket
from commrt.vocabulary.wire_formats import COMPRESSED_DTYPES, EXACT, check_compress

__all__ = ["Options"]

_WHAT = "GradientReducer"
_OPS = ("avg", "sum")


@dataclass(frozen=True)
class Options:
    """A reducer's arguments."""

    op: str
    compress: str | None
    density: float | None
    error_feedback: bool
    sparse: frozenset[int]
    priority: bool

    @property
    def packs(self) -> bool:
        """True if gradients are copied into vectors, which have one type."""
        return self.density is not None or self.compress is not None

    def facts(self) -> list[Any]:
        """Return the facts that must be equal on all ranks."""
        kept = self.error_feedback
        named = self.op, self.compress, self.density, kept, self.priority
        return [*named, sorted(map(int, self.sparse))]

    def check(self, parameters: Sequence[Parameter], bucket_nbytes: Any) -> None:
        """Raise UsageError for what cannot be."""
        if self.op not in _OPS:
            raise UsageError(f"{_WHAT}: op={shown(self.op)}{suggest(self.op, _OPS)}")
        if bucket_nbytes is not None and not _is_positive(bucket_nbytes):
            raise UsageError(
                f"{_WHAT}: bucket_nbytes={shown(bucket_nbytes)}: expected a number of "
                f"bytes, an integer from 1, or None"
            )
        if self.compress is not None and check_compress(self.compress) == EXACT:
            raise UsageError(
                f"{_WHAT}: compress={EXACT!r}: leave it out to send exact sums"
            )
        if self.density is not None and not 0 < self.density <= 1:
            raise UsageError(
                f"{_WHAT}: density={shown(self.density)}: expected a part of the "
                "elements, above 0 and at most 1"
            )
        if self.density is not None and self.compress is not None:
            raise UsageError(
                f"{_WHAT}: compress={shown(self.compress)} and "
                f"density={shown(self.density)}: give one of them"
            )
        wrong = [i for i in self.sparse if i not in range(len(parameters))]
        if wrong:
            raise UsageError(
                f"{_WHAT}: sparse={sorted(self.sparse)}: there is no parameter "
                f"{shown(wrong[0])}; expected 0 to {len(parameters) - 1}"
            )
        for parameter in parameters:
            self._check_one(parameter)

    def _check_one(self, parameter: Parameter) -> None:
        is_sparse = parameter.index in self.sparse
        if parameter.on_device and (is_sparse or self.packs):
            raise UsageError(
                f"{_WHAT}: parameter {parameter.index} is on a device: sparse "
                f"gradients, compress and density are for host memory"
            )
        if is_sparse and not parameter.shape:
            raise UsageError(
                f"{_WHAT}: parameter {parameter.index} has no axes, so no rows either; "
                f"leave it out of sparse="
            )
        floats = COMPRESSED_DTYPES
        if self.packs and not is_sparse and parameter.dtype not in floats:
            raise UsageError(
                f"{_WHAT}: parameter {parameter.index} is of {parameter.dtype}: "
                f"compress and density are for {' and '.join(floats)}"
            )

    def bucket(self, parameters: Sequence[Parameter]) -> Bucket:
        """Return a bucket of these parameters, which owes nothing yet."""
        made = Bucket(parameters, self.op)
        if parameters[0].index in self.sparse:
            made.sparse = True
            return made
        if not self.packs:
            return made
        if self.density is not None:
            made.largest = min(made.count, max(1, round(self.density * made.count)))
        else:
            made.compress = self.compress
        if self.error_feedback:
            made.residual = np.zeros(made.count, parameters[0].dtype)
        return made


def _is_positive(value: Any) -> bool:
    try:
        return operator.index(value) >= 1
    except TypeError:
        return False
