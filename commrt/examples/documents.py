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
    """Return all documents in one, in the order of their paths.

    They are ``commrt/docs`` of the installed package; in a checkout ``docs/``.
    """
    pages = _pages(resources.files("commrt") / "docs")
    if not pages:
        pages = _pages(Path(__file__).resolve().parents[2] / "docs")
    if not pages:
        raise FileNotFoundError(
            "no documents: neither commrt/docs of the installed package nor docs/ "
            "of a checkout has any; install commrt from a wheel"
        )
    return b"\n".join(pages[path] for path in sorted(pages))


def _pages(folder: Any, above: str = "") -> dict[str, bytes]:
    """Return the pages in a folder and in the folders below it, by path."""
    if not folder.is_dir():
        return {}
    pages: dict[str, bytes] = {}
    for entry in folder.iterdir():
        path = f"{above}{entry.name}"
        if entry.is_dir():
            pages |= _pages(entry, f"{path}/")
        elif path.endswith(".md"):
            pages[path] = entry.read_bytes()
    return pages


def windows(text: bytes, count: int, length: int, step: int) -> torch.Tensor:
    """Return the windows of a step: (count, length + 1) bytes from drawn places.

    Drawn by the step's number, so that all ranks, and one process alone, draw alike.
    """
    rng = np.random.default_rng(step)
    starts = rng.integers(0, len(text) - length - 1, count)
    held = np.frombuffer(text, np.uint8)
    rows = np.stack([held[start : start + length + 1] for start in starts])
    return torch.from_numpy(rows.astype(np.int64))
