# SPDX-License-Identifier: Apache-2.0
"""Wishes for single calls, for which torch's functions have no argument."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from commrt.errors import UsageError

__all__ = ["ASKED", "using"]

ASKED: ContextVar[dict[str, Any] | None] = ContextVar(
    "commrt.torch.using", default=None
)
"""Arguments for the collectives called in this context; None for none."""


@contextmanager
def using(
    algorithm: str | None = None,
    *,
    backend: str | None = None,
    params: Mapping[str, int | str] | None = None,
) -> Iterator[None]:
    """Let the collectives of commrt's groups that are called inside run so.

    It holds for this thread, for all groups, and comes before what groups, environment
    and table say. A call that cannot run so is an error on all ranks, and sends
    nothing. If contexts are nested, only the inner one holds. Sums of sparse tensors
    have algorithms of their own, and neither backends nor parameters. Between two ranks
    there is one way for messages, whatever stands here.

    Args:
        algorithm: ``NAME`` or ``BACKEND/NAME``, with ``{PARAM=VALUE}`` if need be.
        backend: only this one.
        params: parameters of the algorithm and of the transport.
    """
    given = {"algorithm": algorithm, "backend": backend, "params": params}
    asked = {name: value for name, value in given.items() if value is not None}
    for name in ("algorithm", "backend"):
        if not isinstance(asked.get(name, ""), str):
            raise UsageError(
                f"commrt.torch.using: {name}={asked[name]!r} must be a string"
            )
    if params is not None:
        asked["params"] = dict(params)
    token = ASKED.set(asked or None)
    try:
        yield
    finally:
        ASKED.reset(token)
