# SPDX-License-Identifier: Apache-2.0
"""Every test of this folder runs in every run: none of them is sampled.

They read the sources of the whole project. A sample would let a new upward import pass
by chance.
"""

from __future__ import annotations

from pathlib import Path

import pytest

FOLDER = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)  # before the samples are drawn
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark this folder's tests as whole."""
    for item in items:
        if FOLDER in item.path.parents:
            item.add_marker(pytest.mark.whole)
