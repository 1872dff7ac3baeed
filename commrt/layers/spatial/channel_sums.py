# SPDX-License-Identifier: Apache-2.0
"""Statistics and sums of channels of one rank's piece, and the gradient made of them.

The engine's own kernels take arrays in main memory, without gaps, of float32 or
float64, where torch has few threads: they read each array once from memory, and add in
float64. torch computes everything else.
"""

from __future__ import annotations

from typing import Any

import torch

from commrt import _native
from commrt.vocabulary.dtypes import dtype_by_name

__all__ = ["combined", "gradient_sums", "statistics"]

_MOST_THREADS = 2
"""With more threads torch, which uses all of them, is faster than one of the engine."""
_NAMES = {torch.float32: "float32", torch.float64: "float64"}


def statistics(x: Any) -> tuple[int, Any, Any]:
    """Return count, mean and sum of squared deviations of each channel.

    Args:
        x: batch, channels, then any dimensions. It may be empty: all are 0 then.

    The figures are float64 for float64, and float32 for other types.
    """
    channels = x.shape[1]
    count = x.numel() // channels if channels else 0
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    if count == 0:
        zeros = torch.zeros(channels, dtype=dtype, device=x.device)
        return 0, zeros, zeros.clone()
    if _is_for_engine(x):
        mean, deviation = _float64(channels), _float64(channels)
        _native.channel_norm.statistics(
            _code(x), x.data_ptr(), *_extents(x), mean.data_ptr(), deviation.data_ptr()
        )
        return count, mean.to(dtype), deviation.to(dtype)
    # Five times as fast as var_mean over all other dimensions.
    mean, variance = torch.batch_norm_update_stats(x.to(dtype), None, None, 0.0)
    return count, mean, variance * count


def gradient_sums(gradient: Any, x: Any, mean: Any) -> Any:
    """Return each channel's sums of the gradient, and of gradient * (x - mean).

    Both stand in one row, behind each other, in the type of ``mean``.
    """
    channels = x.shape[1]
    if x.numel() == 0:
        return mean.new_zeros(2 * channels)
    if _is_for_engine(x, gradient):
        sums, wide = _float64(2 * channels), mean.to(torch.float64)
        of_products = sums.data_ptr() + channels * sums.element_size()
        _native.channel_norm.sums(
            *(_code(x), gradient.data_ptr(), x.data_ptr(), wide.data_ptr()),
            *(*_extents(x), sums.data_ptr(), of_products),
        )
        return sums.to(mean.dtype)
    ones = torch.ones_like(mean)
    # With a variance of 1 and no epsilon the gradient of the weight is the second sum.
    _, of_products, of_gradient = torch.ops.aten.native_batch_norm_backward(
        *(gradient, x, ones, mean, ones, None, None, False, 0.0, (False, True, True))
    )
    return torch.cat([of_gradient, of_products])


def combined(gradient: Any, x: Any, mean: Any, a: Any, b: Any, c: Any) -> Any:
    """Return ``a * gradient + b * (x - mean) + c``, where the last four are by channel.

    The result has the type of ``x``.
    """
    if x.numel() == 0:
        return x.new_zeros(x.shape)
    if _is_for_engine(x, gradient):
        out = torch.empty_like(x)
        mean, a, b, c = (each.to(torch.float64) for each in (mean, a, b, c))
        _native.channel_norm.combine(
            *(_code(x), gradient.data_ptr(), x.data_ptr(), mean.data_ptr()),
            *(a.data_ptr(), b.data_ptr(), c.data_ptr(), *_extents(x), out.data_ptr()),
        )
        return out
    by_channel = (-1, *[1] * (x.dim() - 2))
    mean, a, b, c = (each.view(by_channel) for each in (mean, a, b, c))
    return torch.addcmul(c + a * gradient, x - mean, b).to(x.dtype)


def _is_for_engine(*tensors: Any) -> bool:
    """Return whether the engine's kernels can take such tensors, and are faster."""
    first = tensors[0].dtype
    return torch.get_num_threads() <= _MOST_THREADS and all(
        each.device.type == "cpu"
        and each.dtype == first
        and first in _NAMES
        and each.is_contiguous()
        and not each.is_neg()
        for each in tensors
    )


def _code(x: Any) -> int:
    return dtype_by_name(_NAMES[x.dtype]).code


def _extents(x: Any) -> tuple[int, int, int]:
    """Return samples, channels, and elements of a channel of a sample."""
    samples, channels = x.shape[:2]
    return samples, channels, x.numel() // (samples * channels)


def _float64(channels: int) -> Any:
    return torch.empty(channels, dtype=torch.float64)
