# SPDX-License-Identifier: Apache-2.0
"""What torch asks of "the backend of a device" where the group is everything itself."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from commrt.torch.process_group import CommrtProcessGroup

__all__ = ["BackendView"]


class BackendView:
    """A group, as torch's code sees a Backend."""

    supports_splitting = False
    supports_time_estimate = False
    supports_coalescing = True

    def __init__(self, group: CommrtProcessGroup) -> None:
        self._group = group

    def rank(self) -> int:
        """Return this process's rank in the group."""
        return int(self._group.rank())

    def size(self) -> int:
        """Return the ranks of the group."""
        return int(self._group.size())

    def name(self) -> str:
        """Return the backend's name."""
        return self._group.getBackendName()

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """Whether tensors from ``allocate_tensor`` save copies."""
        return device.type == "cpu" and self._group._memory.is_of_use

    def allocate_tensor(
        self, size: int, *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return a tensor of ``size`` elements in memory that the ranks share.

        The first call on a group is collective; later ones are local.
        """
        if not self.supports_tensor_alloc(device):
            return torch.empty(size, dtype=dtype, device=device)
        return self._group._memory.allocate(size, dtype)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the limit of the group's calls."""
        self._group.set_timeout(timeout)

    _set_default_timeout = set_timeout

    def abort(self) -> None:
        """End the group, and fail what is under way."""
        self._group.abort()

    def shutdown(self) -> None:
        """End the group on this rank."""
        self._group.shutdown()

    def _set_sequence_number_for_group(self) -> None:
        """Nothing to do: commrt counts by itself."""

    def _get_sequence_number_for_group(self) -> int:
        return self._group._get_sequence_number_for_group()

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"the backend {self.name()!r} has no {name!r}; ask the process group, or "
            f"its communicator"
        )
