# SPDX-License-Identifier: Apache-2.0
"""The name that torch.distributed knows commrt by."""

from __future__ import annotations

__all__ = ["BACKEND"]


BACKEND = "commrt"
