# SPDX-License-Identifier: Apache-2.0
"""Elevations around the Jacksboro fault in Tennessee: 344 rows of 403 whole metres.

They are a part of the Shuttle Radar Topography Mission's model of the Earth, which is
in the public domain: 36.45 to 36.73 degrees north, 84.41 to 84.08 degrees west, with
three arc seconds between samples. These are about 93 m from north to south and 75 m
from west to east. matplotlib has the same numbers (``jacksboro_fault_dem.npz``, added
by J. Kington in 2014); nothing was changed.
"""

from __future__ import annotations

from importlib import resources
from typing import Any

import numpy as np

__all__ = ["load_elevations"]


def load_elevations() -> Any:
    """Return metres above the sea (344, 403), rows from the north, as int16."""
    path = resources.files("commrt.examples") / "elevations.npz"
    with path.open("rb") as file, np.load(file) as held:
        return held["metres"]
