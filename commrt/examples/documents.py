# SPDX-License-Identifier: Apache-2.0
"""A text to learn from: commrt's own documents, as bytes."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import torch

__all__ = ["VOCABULARY", "load_documents", "windows"]

VOCABULARY = 256
"""Bytes."""


def load_documents() -> bytes:
    """Return all documents in one, in the order of their names.

    They are ``commrt/docs`` of the installed package; in a checkout ``docs/``.
    """
    found = _pages(resources.files("commrt") / "docs")
    if not found:
        found = _pages(Path(__file__).resolve().parents[2] / "docs")
    if not found:
        raise FileNotFoundError(
            "no documents: neither commrt/docs of the installed package nor docs/ "
            "of a checkout has any; install commrt from a wheel"
        )
    return b"\n".join(found)


def _pages(folder: Any) -> list[bytes]:
    if not folder.is_dir():
        return []
    pages = sorted(folder.iterdir(), key=lambda page: str(page.name))
    return [page.read_bytes() for page in pages if page.name.endswith(".md")]


def windows(text: bytes, count: int, length: int, step: int) -> torch.Tensor:
    """Return the windows of a step: (count, length + 1) bytes from drawn places.

    Drawn by the step's number, so that all ranks, and one process alone, draw alike.
    """
    rng = np.random.default_rng(step)
    starts = rng.integers(0, len(text) - length - 1, count)
    held = np.frombuffer(text, np.uint8)
    rows = np.stack([held[start : start + length + 1] for start in starts])
    return torch.from_numpy(rows.astype(np.int64))
