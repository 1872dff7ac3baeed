# SPDX-License-Identifier: Apache-2.0
"""Tensors that lie on a grid of processes, and torch's functions of them."""

from commrt.layers.tensors import (
    class_losses,
    convolution,
    elementwise,
    feature_norms,
    joining,
    losses,
    masks,
    normalization,
    products,
    reductions,
    shapes,
    spatial,
)
from commrt.layers.tensors.dist_tensor import DistTensor
from commrt.layers.tensors.placement import Placement, Sharded
from commrt.layers.tensors.products import ProductPlan, einsum, plan

__all__ = [
    "DistTensor",
    "Placement",
    "ProductPlan",
    "Sharded",
    "class_losses",
    "convolution",
    "einsum",
    "elementwise",
    "feature_norms",
    "joining",
    "losses",
    "masks",
    "normalization",
    "plan",
    "products",
    "reductions",
    "shapes",
    "spatial",
]
