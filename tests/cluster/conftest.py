# SPDX-License-Identifier: Apache-2.0
"""A cluster's command line for tests, where this user may make namespaces."""

from __future__ import annotations

from pathlib import Path

import pytest
from cluster_commands import ClusterCommands, clusters_in


@pytest.fixture
def cluster(tmp_path: Path) -> ClusterCommands:
    return clusters_in(tmp_path)
