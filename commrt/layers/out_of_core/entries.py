# SPDX-License-Identifier: Apache-2.0
"""Storages that autograd has saved, and the tensors that lie in them."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch

from commrt.errors import UsageError
from commrt.layers.out_of_core.far import Transfer

__all__ = ["Entry", "Use", "can_leave", "storage_key", "version_of"]

Tensor: TypeAlias = torch.Tensor


def storage_key(tensor: Tensor) -> int | None:
    """Return a number of the tensor's storage while it lives; None: it has none."""
    if tensor.layout != torch.strided or tensor.device.type == "meta":
        return None
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return None  # subclasses that wrap several tensors


def version_of(tensor: torch.Tensor) -> int:
    """Return how often the tensor was changed in place."""
    return int(tensor._version)


def can_leave(tensor: Tensor) -> bool:
    """Return whether the tensor can be made again from its storage's bytes."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout == torch.strided
        and not tensor.is_quantized
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


class Use:
    """A tensor that is saved, by itself or by its place in a storage."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor: Tensor | None = tensor.detach()  # no cycle with its graph
        self._saved_version = version_of(tensor)
        self._is_stale = False
        self.dtype, self.device = tensor.dtype, tensor.device
        self.shape = tuple(tensor.shape)
        self.can_leave = can_leave(tensor)
        if self.can_leave:
            self._stride, self._offset = tensor.stride(), tensor.storage_offset()

    def leave(self) -> None:
        """Let the tensor go, once its storage's bytes are far."""
        if self._tensor is not None:
            self._is_stale = version_of(self._tensor) != self._saved_version
            self._tensor = None

    def value(self, storage: Any) -> Tensor:
        """Return the tensor.

        Args:
            storage: that has come back; None: the first one is near.

        Raises UsageError, as autograd does, if it was written to since it was saved.
        """
        tensor = self._tensor
        is_changed = tensor is not None and version_of(tensor) != self._saved_version
        if self._is_stale or is_changed:
            raise UsageError(
                f"OutOfCore: a tensor of shape {self.shape} and type {self.dtype} that "
                f"is saved for the backward pass was changed in place since; take a "
                f"copy first, or set inplace=False"
            )
        if tensor is not None:
            return tensor
        assert storage is not None
        made = torch.empty(0, dtype=self.dtype, device=self.device)
        return made.set_(storage, self._offset, self.shape, self._stride)

    def bytes(self) -> Tensor:
        """Return the whole storage as a vector of bytes."""
        assert self._tensor is not None
        made = torch.empty(0, dtype=torch.uint8, device=self.device)
        return made.set_(self._tensor.untyped_storage())


class Entry:
    """A storage that is near, far, or on its way."""

    def __init__(self, nbytes: int, owner: int) -> None:
        self.nbytes = nbytes
        self.owner = owner
        """The last block that uses it: the first to need it in the backward pass."""
        self.uses: list[Use] = []
        self.is_near = True
        self.is_pinned = False
        """True while a block computes with it."""
        self.leaving: Transfer | None = None
        self.stays = False
        """True: it is wanted again while it leaves."""
        self.coming: Transfer | None = None
        self.slot: Any = None
        """Its place in far memory, which keeps its bytes."""
        self.storage: Any = None
        """That came back; None: the first one, or none."""
        self.is_dead = False

    @property
    def can_leave(self) -> bool:
        """True if all of its tensors can be made again."""
        return self.nbytes > 0 and all(use.can_leave for use in self.uses)

    def bytes(self) -> Tensor:
        """Return its bytes, which are near."""
        return self.uses[0].bytes()

    def device(self) -> torch.device:
        """Return where it is near."""
        return self.uses[0].device
