# SPDX-License-Identifier: Apache-2.0
"""Methods of a communicator that a service of it carries out."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

__all__ = ["forwarded"]

P = ParamSpec("P")
R = TypeVar("R")


def forwarded(
    method: Callable[Concatenate[Any, P], R], service: str
) -> Callable[Concatenate[Any, P], R]:
    """Return a method that calls ``method`` of the object's attribute ``service``.

    It has the signature and the docstring of the service's method.
    """

    def forward(self: Any, *args: P.args, **kwargs: P.kwargs) -> R:
        return method(getattr(self, service), *args, **kwargs)

    # The type that wraps() declares binds no instance: this cast corrects it.
    return cast(Callable[Concatenate[Any, P], R], wraps(method)(forward))
