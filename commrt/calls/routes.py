# SPDX-License-Identifier: Apache-2.0
"""Routes: the ways of a call that the dispatcher did not recognise at a glance."""

from __future__ import annotations

from typing import Any, Protocol

from commrt.calls.arguments import Bound, Call

__all__ = ["Route"]


class Route(Protocol):
    """One way to run calls. A communicator asks its routes in order."""

    def takes(self, call: Call, bound: Bound) -> bool:
        """Return whether a call goes this way; local, and the same on all ranks."""

    def run(self, call: Call, bound: Bound) -> Any:
        """Start the call, and return its output or its request.

        NotImplemented where the next route is to be asked after all. In check mode, a
        UsageError is raised on all ranks: so it must come before they are compared.
        """
