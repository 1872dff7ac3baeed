# SPDX-License-Identifier: Apache-2.0
"""Optimizers whose state and work are divided among ranks that train one model.

docs/reference/sharded-update.md says how to use them.
"""

from commrt.layers.sharded_update.optimizer import ShardedOptimizer
from commrt.layers.sharded_update.scaler import GradScaler

__all__ = ["GradScaler", "ShardedOptimizer"]
