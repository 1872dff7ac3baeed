# SPDX-License-Identifier: Apache-2.0
"""Data parallelism: gradients summed over all ranks while more are being computed.

``GradientReducer`` takes any framework's arrays. ``commrt.layers.data.ddp`` has the
same for DistributedDataParallel of PyTorch, as a communication hook.
"""

from commrt.layers.data.bucket_size import best_bucket_nbytes
from commrt.layers.data.reducer import GradientReducer
from commrt.layers.data.sparse_rows import dense_rows

__all__ = ["GradientReducer", "best_bucket_nbytes", "dense_rows"]
