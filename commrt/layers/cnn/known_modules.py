# SPDX-License-Identifier: Apache-2.0
"""Which of torch's modules a parallel network can have, and what to use for others."""

from __future__ import annotations

from typing import Any

from torch import nn

from commrt.errors import UsageError

__all__ = ["check_modules", "takes_channels"]

TRANSPOSED = nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d
PRODUCTS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear, *TRANSPOSED)
"""Products over channels."""
WITH_BATCH_STATISTICS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
KNOWN = (
    *PRODUCTS,
    *WITH_BATCH_STATISTICS,
    *(nn.GroupNorm, nn.Identity, nn.Flatten, nn.Unflatten),
    *(nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d),
    *(nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d),
    *(nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d),
    *(nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d),
    *(nn.Upsample, nn.UpsamplingNearest2d, nn.UpsamplingBilinear2d),
    *(nn.ConstantPad1d, nn.ConstantPad2d, nn.ConstantPad3d),
    *(nn.ZeroPad1d, nn.ZeroPad2d, nn.ZeroPad3d),
    *(nn.ReflectionPad1d, nn.ReflectionPad2d, nn.ReflectionPad3d),
    *(nn.ReplicationPad1d, nn.ReplicationPad2d, nn.ReplicationPad3d),
    *(nn.CircularPad1d, nn.CircularPad2d, nn.CircularPad3d),
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d),
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU),
    *(nn.Mish, nn.Sigmoid, nn.Tanh, nn.Softplus, nn.LogSigmoid),
    *(nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid),
    *(nn.Sequential, nn.ModuleList, nn.ModuleDict),
)
INSTEAD = {
    nn.SyncBatchNorm: "use BatchNorm2d: it takes the statistics of the whole batch",
    nn.LazyConv2d: "run the model once on a small input, so that it has its weights",
    nn.InstanceNorm2d: "use GroupNorm with as many groups as channels",
    nn.InstanceNorm3d: "use GroupNorm with as many groups as channels",
    nn.AlphaDropout: "use Dropout",
    nn.PixelShuffle: "use Upsample or ConvTranspose2d",
    nn.PReLU: "use LeakyReLU",
    nn.LayerNorm: "use GroupNorm with 1 group",
}


def takes_channels(module: Any) -> bool:
    """Return whether a module is a product over channels."""
    return isinstance(module, PRODUCTS)


def check_modules(model: Any, grid_size: int) -> None:
    """Raise UsageError that names each module of torch that cannot be cut.

    Modules of others' classes pass: they are what the functions that they call are.
    """
    found = []
    for path, module in model.named_modules():
        kind = type(module)
        if not kind.__module__.startswith("torch.nn"):
            continue
        where = f"{path or 'the model'} ({kind.__name__})"
        if kind not in KNOWN:
            instead = INSTEAD.get(
                kind, "compute it on a whole tensor outside the model"
            )
            found.append(f"{where}: {instead}")
        elif getattr(module, "return_indices", False):
            found.append(f"{where}: return_indices=True: indices of a cut tensor")
    if found and grid_size > 1:
        raise UsageError(
            f"parallelize_cnn: these modules cannot be cut over ranks: "
            f"{'; '.join(found)}"
        )
