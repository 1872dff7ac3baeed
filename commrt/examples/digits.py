# SPDX-License-Identifier: Apache-2.0
"""Handwritten digits: 1,797 images of 8 x 8 pixels, values 0 to 16, and what they show.

They are the test set of "Optical Recognition of Handwritten Digits" by E. Alpaydin and
C. Kaynak (1998), UCI Machine Learning Repository, doi 10.24432/C50P49, licensed under
CC BY 4.0, in the order in which scikit-learn has them (``load_digits``). The images
are stored as bytes; nothing else was changed.
"""

from __future__ import annotations

from importlib import resources
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch

__all__ = ["load_digits", "load_tensors"]


def load_digits() -> tuple[Any, Any]:
    """Return images (1797, 8, 8) of bytes, and the digits that they show."""
    path = resources.files("commrt.examples") / "digits.npz"
    with path.open("rb") as file, np.load(file) as held:
        return held["images"], held["digits"]


def load_tensors() -> tuple[torch.Tensor, torch.Tensor]:
    """Return images (1797, 1, 8, 8) of floats in [0, 1], and the digits."""
    import torch  # programs without torch load the arrays

    images, digits = load_digits()
    pixels = torch.from_numpy(images.astype(np.float32) / 16.0)
    return pixels[:, None], torch.from_numpy(digits.astype(np.int64))
