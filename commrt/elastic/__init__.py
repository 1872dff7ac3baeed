# SPDX-License-Identifier: Apache-2.0
"""Training that goes on when ranks die, without restart, checkpoint or server."""

from __future__ import annotations

from commrt.elastic.loop import run
from commrt.elastic.state import State

__all__ = ["State", "run"]
