# SPDX-License-Identifier: Apache-2.0
"""Signatures and docstrings of the operations, for type checkers, help() and the docs.

The methods themselves are made natively from ``commrt.operations``; a unit test holds
the signatures here and that table together.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from commrt.operations import OpSpec

__all__ = ["Operations", "docstring", "signature"]

Params = Mapping[str, int | str] | None


class Operations:
    """The collectives as a type checker sees them."""

    def allreduce(
        self, x: Any, *, out: Any = None, op: str = "sum",
        factor: float | None = None, nonblocking: bool = False,
        timeout_s: float | None = None, algorithm: str | None = None,
        backend: str | None = None, params: Params = None, name: str | None = None,
    ) -> Any: ...  # fmt: skip

    def reduce(
        self, x: Any, *, out: Any = None, op: str = "sum",
        factor: float | None = None, root: int = 0, nonblocking: bool = False,
        timeout_s: float | None = None, algorithm: str | None = None,
        backend: str | None = None, params: Params = None, name: str | None = None,
    ) -> Any: ...  # fmt: skip

    def bcast(
        self, x: Any, *, out: Any = None, root: int = 0, nonblocking: bool = False,
        timeout_s: float | None = None, algorithm: str | None = None,
        backend: str | None = None, params: Params = None, name: str | None = None,
    ) -> Any: ...  # fmt: skip

    def allgather(
        self, x: Any, *, out: Any = None, nonblocking: bool = False,
        timeout_s: float | None = None, algorithm: str | None = None,
        backend: str | None = None, params: Params = None, name: str | None = None,
    ) -> Any: ...  # fmt: skip

    def reduce_scatter(
        self, x: Any, *, out: Any = None, op: str = "sum",
        factor: float | None = None, nonblocking: bool = False,
        timeout_s: float | None = None, algorithm: str | None = None,
        backend: str | None = None, params: Params = None, name: str | None = None,
    ) -> Any: ...  # fmt: skip

    def alltoall(
        self, x: Any, *, out: Any = None, nonblocking: bool = False,
        timeout_s: float | None = None, algorithm: str | None = None,
        backend: str | None = None, params: Params = None, name: str | None = None,
    ) -> Any: ...  # fmt: skip

    def gather(
        self, x: Any, *, out: Any = None, root: int = 0, nonblocking: bool = False,
        timeout_s: float | None = None, algorithm: str | None = None,
        backend: str | None = None, params: Params = None, name: str | None = None,
    ) -> Any: ...  # fmt: skip

    def scatter(
        self, x: Any, *, out: Any = None, root: int = 0, nonblocking: bool = False,
        timeout_s: float | None = None, algorithm: str | None = None,
        backend: str | None = None, params: Params = None, name: str | None = None,
    ) -> Any: ...  # fmt: skip

    def barrier(
        self, *, nonblocking: bool = False, timeout_s: float | None = None,
        algorithm: str | None = None, backend: str | None = None,
        params: Params = None, name: str | None = None,
    ) -> Any: ...  # fmt: skip

    def scan(
        self, x: Any, *, out: Any = None, op: str = "sum",
        factor: float | None = None, nonblocking: bool = False,
        timeout_s: float | None = None, algorithm: str | None = None,
        backend: str | None = None, params: Params = None, name: str | None = None,
    ) -> Any: ...  # fmt: skip

    def exscan(
        self, x: Any, *, out: Any = None, op: str = "sum",
        factor: float | None = None, nonblocking: bool = False,
        timeout_s: float | None = None, algorithm: str | None = None,
        backend: str | None = None, params: Params = None, name: str | None = None,
    ) -> Any: ...  # fmt: skip


def signature(spec: OpSpec) -> str:
    """Return the call as documented, such as ``barrier(*, nonblocking=False, …)``."""
    parts = ["x", "*", "out=None"] if spec.x_count != "none" else ["*"]
    parts += ['op="sum"', "factor=None"] if spec.reduces else []
    parts += ["root=0"] if spec.has_root else []
    parts += ["nonblocking=False", "timeout_s=None", "algorithm=None", "backend=None"]
    return f"{spec.name}({', '.join([*parts, 'params=None', 'name=None'])})"


_X = {
    "same": "x: this rank's send buffer",
    "none": "",
}
_OUT = {
    "same": "as many elements as x; without it the call works in place and returns x",
    "times_size": "size times the elements of x; allocated with shape (size, *x.shape)",
    "div_size": "1/size of the elements of x; allocated without it",
}


def docstring(spec: OpSpec) -> str:
    """Return the docstring of the method."""
    lines = [spec.doc, "", f"Call: {signature(spec)}", ""]
    lines.append(
        "Collective: all ranks call it in the same order with equal arguments."
    )
    if spec.x_count != "none":
        lines += ["", "Args:", f"    {_X['same']}; C-contiguous, any supported dtype."]
        lines.append(f"    out: {_OUT[spec.out_count]}.")
    if spec.reduces:
        average = " avg," if spec.prefix == "none" else ""
        lines += [
            f"    op: sum, prod, min, max,{average} land, lor, lxor, band, bor, bxor,"
            " premul_sum.",
            "    factor: of premul_sum: what this rank's x is multiplied by before the"
            " sum; ranks may differ.",
        ]
    if spec.has_root:
        lines.append("    root: the rank that the operation starts from or ends at.")
    lines += [
        "    nonblocking: return a Request at once; the buffers are the engine's until"
        " its wait() returns.",
        "    timeout_s: deadline; TimeoutError_ names the ranks that are missing.",
        "    algorithm, backend, params: instead of the automatic choice (explain()).",
        "    name: a label that check mode compares across ranks.",
        "",
        "Returns the output (None where this rank has none), or a Request.",
    ]
    return "\n".join(lines)
