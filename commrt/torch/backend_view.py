# SPDX-License-Identifier: Apache-2.0
"""A stand-in for "the backend of a device", which torch 2.13 cannot make in Python."""

from __future__ import annotations

from typing import Any

from commrt.torch.joined_group import AsBackend, JoinedGroup

__all__ = ["BackendView"]


class BackendView(AsBackend):
    """A group, as torch's code sees a Backend."""

    def __init__(self, joined: JoinedGroup) -> None:
        self._joined = joined

    def rank(self) -> int:
        """Return this process's rank in the group."""
        return self._joined.comm.rank

    def size(self) -> int:
        """Return the ranks of the group."""
        return self._joined.comm.size

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"the backend {self.name()!r} has no {name!r}; ask the process group, or "
            f"its communicator"
        )
