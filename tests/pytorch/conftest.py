# SPDX-License-Identifier: Apache-2.0
"""Tests that need torch: ranks that torchrun starts, in an environment of their own.

``make test-torch`` runs them. The folder is not called torch: for tests that lie beside
it, ``import torch`` would find it.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
from mpi_ranks import mpirun
from torch_ranks import torchrun

__all__ = ["mpirun", "torchrun"]


class WithoutTorch(pytest.Module):
    """A file of tests that is skipped before anything in it imports torch."""

    def collect(self) -> Iterator[pytest.Item]:
        """Say why there are no tests."""
        pytest.skip("torch is not installed: make test-torch makes an environment")


def pytest_pycollect_makemodule(
    module_path: Path, parent: pytest.Collector
) -> pytest.Module | None:
    """Take the files of this folder as they are only where torch can be imported."""
    if importlib.util.find_spec("torch") is not None:
        return None
    return WithoutTorch.from_parent(parent, path=module_path)
