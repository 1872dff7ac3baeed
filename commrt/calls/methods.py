# SPDX-License-Identifier: Apache-2.0
"""The operations as method descriptors in C++, one per row of the table."""

from __future__ import annotations

from typing import Any

from commrt import _native
from commrt.vocabulary.operations import OpSpec, operation
from commrt.vocabulary.signatures import docstring

__all__ = ["if_cached", "method_of"]


def method_of(spec: OpSpec, *, only_cached: bool = False) -> Any:
    """Return an operation as a method of communicators."""
    return _native.make_operation(
        spec.name,
        docstring(spec),
        spec.code,
        spec.x_count != "none",
        spec.has_root,
        spec.reduces,
        spec.in_place,
        spec.has_root and spec.out_count == "div_size",
        spec.fuses,
        len(spec.count_arguments),
        only_cached,
    )


def if_cached(name: str) -> Any:
    """Return an operation that runs only calls whose plan the dispatcher has.

    ``if_cached("allreduce")(comm, x, op="max")`` runs the call if ``comm.allreduce``
    would run it in C++ alone. Otherwise it returns NotImplemented, without an error.
    """
    return method_of(operation(name), only_cached=True)
