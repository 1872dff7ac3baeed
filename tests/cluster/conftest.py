# SPDX-License-Identifier: Apache-2.0
"""A cluster's command line for tests, where this user may make namespaces."""

from __future__ import annotations

from pathlib import Path

import pytest
from cluster_commands import ClusterCommands, why_no_cluster


@pytest.fixture
def cluster(tmp_path: Path) -> ClusterCommands:
    """Return the command line; skip the test where there can be no cluster."""
    reason = why_no_cluster()
    if reason is not None:
        pytest.skip(reason)
    return ClusterCommands(tmp_path)
