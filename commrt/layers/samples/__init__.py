# SPDX-License-Identifier: Apache-2.0
"""Samples that lie on different ranks: shuffling over ranks, and loading in batches.

docs/reference/samples.md says how to use them. numpy alone is needed; samples may be
tensors of torch.
"""

from commrt.layers.samples.batches import Batch, BatchLoader
from commrt.layers.samples.shuffle import PartialShuffle

__all__ = ["Batch", "BatchLoader", "PartialShuffle"]
