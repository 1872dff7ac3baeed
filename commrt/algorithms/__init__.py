# SPDX-License-Identifier: Apache-2.0
"""The built-in algorithms, one file each, and the registry that others add to.

A file of this folder is an algorithm by being there, unless its name begins with an
underscore: it registers itself when this package imports it.
"""

from __future__ import annotations

from commrt.algorithms._nested import run as run_nested
from commrt.algorithms._registry import (
    Algorithm,
    algorithm,
    exists,
    get,
    import_files,
    names,
    offered_params,
    param_choices,
    schedule,
    simplest_first,
)

__all__ = [
    "Algorithm",
    "algorithm",
    "exists",
    "get",
    "names",
    "offered_params",
    "param_choices",
    "run_nested",
    "schedule",
    "simplest_first",
]

import_files(__name__, __path__)
