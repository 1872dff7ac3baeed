# SPDX-License-Identifier: Apache-2.0
"""Functions that all command lines share."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

__all__ = ["until_reader_leaves"]


def until_reader_leaves(command: Callable[[], int]) -> int:
    """Return the status of ``command``; 1 once nobody reads, as before ``| head``."""
    try:
        status = command()
        sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes again at exit, and would complain again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return status
