# SPDX-License-Identifier: Apache-2.0
"""Backward passes that have no gradient of their own, and say so.

torch's ``once_differentiable`` raises only where the gradient that comes in needs one
itself. Of a loss that is linear in the output it does not, and torch would leave out
the second derivatives of what comes before, without a word.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeAlias

import torch

from commrt.errors import UsageError

__all__ = ["differentiable_once"]


_Backward: TypeAlias = Callable[..., Any]


def differentiable_once(layer: str) -> Callable[[_Backward], _Backward]:
    """Return a decorator of backward passes: UsageError under ``create_graph``.

    Args:
        layer: its name for the message, with an article.
    """

    def decorated(backward: _Backward) -> _Backward:
        @wraps(backward)
        def checked(ctx: Any, *gradients: Any) -> Any:
            if torch.is_grad_enabled():
                raise UsageError(
                    f"{layer}: gradients of gradients (create_graph=True) are not to "
                    f"be had; leave create_graph out, or leave the layer out of what "
                    f"is differentiated twice"
                )
            return backward(ctx, *gradients)

        return checked

    return decorated
