# SPDX-License-Identifier: Apache-2.0
"""Tests with real ranks that die, hang or leave: the fixture of ``mpi_ranks``."""

from __future__ import annotations

from pathlib import Path

import pytest
from mpi_ranks import mpirun, ulfm

__all__ = ["mpirun", "ulfm"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test here ``mpi``."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.mpi)
