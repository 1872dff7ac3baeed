# SPDX-License-Identifier: Apache-2.0
"""Compression of gradients on their way, with Horovod's two classes."""

from __future__ import annotations

from typing import Any, Protocol, TypeAlias

import torch

__all__ = ["Compression", "Compressor", "FP16Compressor", "NoneCompressor"]

Tensor: TypeAlias = torch.Tensor


class Compressor(Protocol):
    """The interface of compressions; a program may pass one of its own."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """Return the tensor to send, and what ``decompress`` needs."""
        ...

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        """Return the tensor that has come, in its first type."""
        ...


class NoneCompressor:
    """No compression: tensors go as they are."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """Return the tensor itself."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        """Return the tensor itself."""
        del ctx
        return tensor


class FP16Compressor:
    """Floating-point tensors go as float16; others as they are."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """Return the tensor in float16, and its type."""
        dtype = tensor.dtype
        return (tensor.half() if dtype.is_floating_point else tensor), dtype

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        """Return the tensor in its first type."""
        return tensor.to(ctx)


class Compression:
    """The compressions to choose from."""

    none = NoneCompressor
    fp16 = FP16Compressor
