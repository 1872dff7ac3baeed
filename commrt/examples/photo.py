# SPDX-License-Identifier: Apache-2.0
"""One photograph: 427 rows of 640 pixels in three colours.

It is "China", a photograph of the Summer Palace in Beijing by danielbuechele
(https://www.flickr.com/photos/danielbuechele/6061409035), licensed under CC BY 2.0
(https://creativecommons.org/licenses/by/2.0/), as scikit-learn has it
(``load_sample_image("china.jpg")``). It was decoded, and the lowest three of the eight
bits of each colour were set to zero; nothing else was changed.
"""

from __future__ import annotations

from importlib import resources
from typing import Any

import numpy as np

__all__ = ["load_photo"]


def load_photo() -> Any:
    """Return the pixels (427, 640, 3), rows from the top, as bytes."""
    path = resources.files("commrt.examples") / "photo.npz"
    with path.open("rb") as file, np.load(file) as held:
        return held["pixels"]
