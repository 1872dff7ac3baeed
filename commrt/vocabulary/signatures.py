# SPDX-License-Identifier: Apache-2.0
"""Signatures and docstrings of the operations, for type checkers, help() and the docs.

The engine makes the methods from ``commrt.vocabulary.operations``. A unit test compares
the signatures here with that table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from commrt.vocabulary.operations import OpSpec
from commrt.vocabulary.wire_formats import WIRE_FORMATS

__all__ = ["Operations", "docstring", "signature"]

Params = Mapping[str, int | str] | None
Counts = Sequence[int] | NDArray[np.integer[Any]]


class Operations:
    """The collectives as a type checker sees them."""

    def allreduce(
        self, x: Any, op: Any = "sum", *, out: Any = None,
        factor: float | None = None, compress: str | None = None,
        residual: Any = None, nonblocking: bool = False,
        timeout_s: float | None = None, algorithm: str | None = None,
        backend: str | None = None, params: Params = None, name: str | None = None,
        stream: Any = None,
    ) -> Any: ...  # fmt: skip

    def reduce(
        self, x: Any, op: Any = "sum", root: int = 0, *, out: Any = None,
        factor: float | None = None, nonblocking: bool = False,
        timeout_s: float | None = None, algorithm: str | None = None,
        backend: str | None = None, params: Params = None, name: str | None = None,
        stream: Any = None,
    ) -> Any: ...  # fmt: skip

    def bcast(
        self, x: Any, root: int = 0, *, out: Any = None, nonblocking: bool = False,
        timeout_s: float | None = None, algorithm: str | None = None,
        backend: str | None = None, params: Params = None, name: str | None = None,
        stream: Any = None,
    ) -> Any: ...  # fmt: skip

    def allgather(
        self, x: Any, *, out: Any = None, nonblocking: bool = False,
        timeout_s: float | None = None, algorithm: str | None = None,
        backend: str | None = None, params: Params = None, name: str | None = None,
        stream: Any = None,
    ) -> Any: ...  # fmt: skip

    def reduce_scatter(
        self, x: Any, op: Any = "sum", *, out: Any = None,
        factor: float | None = None, nonblocking: bool = False,
        timeout_s: float | None = None, algorithm: str | None = None,
        backend: str | None = None, params: Params = None, name: str | None = None,
        stream: Any = None,
    ) -> Any: ...  # fmt: skip

    def alltoall(
        self, x: Any, *, out: Any = None, compress: str | None = None,
        residual: Any = None, nonblocking: bool = False,
        timeout_s: float | None = None, algorithm: str | None = None,
        backend: str | None = None, params: Params = None, name: str | None = None,
        stream: Any = None,
    ) -> Any: ...  # fmt: skip

    def gather(
        self, x: Any, root: int = 0, *, out: Any = None, nonblocking: bool = False,
        timeout_s: float | None = None, algorithm: str | None = None,
        backend: str | None = None, params: Params = None, name: str | None = None,
        stream: Any = None,
    ) -> Any: ...  # fmt: skip

    def scatter(
        self, x: Any, root: int = 0, *, out: Any = None, nonblocking: bool = False,
        timeout_s: float | None = None, algorithm: str | None = None,
        backend: str | None = None, params: Params = None, name: str | None = None,
        stream: Any = None,
    ) -> Any: ...  # fmt: skip

    def barrier(
        self, *, nonblocking: bool = False, timeout_s: float | None = None,
        algorithm: str | None = None, backend: str | None = None,
        params: Params = None, name: str | None = None, stream: Any = None,
    ) -> Any: ...  # fmt: skip

    def scan(
        self, x: Any, op: Any = "sum", *, out: Any = None,
        factor: float | None = None, nonblocking: bool = False,
        timeout_s: float | None = None, algorithm: str | None = None,
        backend: str | None = None, params: Params = None, name: str | None = None,
        stream: Any = None,
    ) -> Any: ...  # fmt: skip

    def exscan(
        self, x: Any, op: Any = "sum", *, out: Any = None,
        factor: float | None = None, nonblocking: bool = False,
        timeout_s: float | None = None, algorithm: str | None = None,
        backend: str | None = None, params: Params = None, name: str | None = None,
        stream: Any = None,
    ) -> Any: ...  # fmt: skip

    def allgatherv(
        self, x: Any, *, counts: Counts, out: Any = None, nonblocking: bool = False,
        timeout_s: float | None = None, algorithm: str | None = None,
        backend: str | None = None, params: Params = None, name: str | None = None,
        stream: Any = None,
    ) -> Any: ...  # fmt: skip

    def alltoallv(
        self, x: Any, *, send_counts: Counts, recv_counts: Counts | None = None,
        out: Any = None, compress: str | None = None, residual: Any = None,
        nonblocking: bool = False, timeout_s: float | None = None,
        algorithm: str | None = None, backend: str | None = None,
        params: Params = None, name: str | None = None, stream: Any = None,
    ) -> Any: ...  # fmt: skip

    def gatherv(
        self, x: Any, root: int = 0, *, counts: Counts, out: Any = None,
        nonblocking: bool = False, timeout_s: float | None = None,
        algorithm: str | None = None, backend: str | None = None,
        params: Params = None, name: str | None = None, stream: Any = None,
    ) -> Any: ...  # fmt: skip

    def scatterv(
        self, x: Any, root: int = 0, *, counts: Counts, out: Any = None,
        nonblocking: bool = False, timeout_s: float | None = None,
        algorithm: str | None = None, backend: str | None = None,
        params: Params = None, name: str | None = None, stream: Any = None,
    ) -> Any: ...  # fmt: skip

    def reduce_scatterv(
        self, x: Any, op: Any = "sum", *, counts: Counts, out: Any = None,
        factor: float | None = None, nonblocking: bool = False,
        timeout_s: float | None = None, algorithm: str | None = None,
        backend: str | None = None, params: Params = None, name: str | None = None,
        stream: Any = None,
    ) -> Any: ...  # fmt: skip


def signature(spec: OpSpec) -> str:
    """Return the call as documented, such as ``barrier(*, nonblocking=False, …)``."""
    defaults = {"op": 'op="sum"', "root": "root=0"}
    parts = [defaults.get(name, name) for name in spec.positional] + ["*"]
    parts += [] if spec.is_empty else [*_counts(spec), "out=None"]
    parts += ["factor=None"] if spec.reduces else []
    parts += ["compress=None", "residual=None"] if spec.compresses else []
    parts += ["nonblocking=False", "timeout_s=None", "algorithm=None", "backend=None"]
    parts += ["params=None", "name=None", "stream=None"]
    return f"{spec.name}({', '.join(parts)})"


def _counts(spec: OpSpec) -> list[str]:
    """Return the arguments with a number per rank; the first is always needed."""
    first, rest = spec.count_arguments[:1], spec.count_arguments[1:]
    return [*first, *(f"{argument}=None" for argument in rest)]


_X = {
    "same": "x: this rank's send buffer",
    "none": "",
}
_OUT = {
    "same": "as many elements as x; without it the call works in place and returns x",
    "times_size": "size times the elements of x; allocated with shape (size, *x.shape)",
    "div_size": "1/size of the elements of x; allocated without it",
}


_COUNTS = {
    "counts": "counts: elements of each rank's block; equal on all ranks.",
    "send_counts": "send_counts: elements of x for each rank, size numbers.",
    "recv_counts": "recv_counts: elements that each rank sends here; without them the"
    " ranks exchange their counts first, all or none of them.",
}
_OUT_OF_COUNTS = {
    "times_size": "sum(counts) elements; allocated without it, of rows like those of x",
    "same": "sum(recv_counts) elements, or x itself where both counts are equal;"
    " allocated without it",
    "div_size": "counts[rank] elements; allocated without it",
}


def _out(spec: OpSpec) -> str:
    if not spec.count_arguments:
        return _OUT[spec.out_count]
    else_none = "; where given, x may be None but on the root"
    return _OUT_OF_COUNTS[spec.out_count] + else_none * (spec.input_on == "root")


def _compression(spec: OpSpec) -> list[str]:
    """Return what ``compress=`` does, and how far results may be off."""
    formats = [f"  {one.name}: {one.doc}." for one in WIRE_FORMATS]
    if spec.reduces:
        bound = (
            "  With w(x) for that, an element of the result is off by at most w(x[r]),"
            " added up over all ranks r but one, plus w(sum of x[r]), plus what"
            " additions in float32 round; of avg the first over size, and w(mean)."
        )
    else:
        bound = "  What a rank sends itself is exact."
    return [
        "compress: float16, bfloat16 or int8, and so many bytes go over the wire; not"
        " exact. none: exact, even where a table compresses. x is float32 or float64.",
        *formats,
        bound,
        "residual: with compress, an array like x, zeros before the first call: it is"
        " added to x, and gets what was lost, so that the next call sends it.",
    ]


def docstring(spec: OpSpec) -> str:
    """Return the docstring of the method."""
    lines = [spec.doc, "", f"Call: {signature(spec)}", ""]
    lines.append(
        "Collective: all ranks call it in the same order with equal arguments."
    )
    if spec.x_count != "none":
        lines += ["", "Args:", f"    {_X['same']}; C-contiguous, any supported dtype."]
        lines += [f"    {_COUNTS[argument]}" for argument in spec.count_arguments]
        lines.append(f"    out: {_out(spec)}.")
    if spec.reduces:
        average = " avg," if not spec.combines_some else ""
        lines += [
            f"    op: sum, prod, min, max,{average} land, lor, lxor, band, bor, bxor,"
            " premul_sum; or what numpy, mpi4py or torch call it.",
            "    factor: of premul_sum: what this rank's x is multiplied by before the"
            " sum; ranks may differ.",
        ]
    if spec.has_root:
        place = "; a number in the place of op is the root" if spec.reduces else ""
        lines.append(
            f"    root: the rank that the operation starts from or ends at{place}."
        )
    if spec.compresses:
        lines += [f"    {line}" for line in _compression(spec)]
    lines += [
        "    nonblocking: return a Request at once; the buffers are the engine's until"
        " its wait() returns.",
        "    timeout_s: deadline; TimeoutError_ names the ranks that are missing.",
        "    algorithm, backend, params: instead of the automatic choice (explain()).",
        "    name: a label that check mode compares across ranks.",
        "    stream: of arrays on a device: what orders the call; None: their library's"
        " current one.",
        "",
        "Returns the output (None where this rank has none), or a Request.",
    ]
    return "\n".join(lines)
