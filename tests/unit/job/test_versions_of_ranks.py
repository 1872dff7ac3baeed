# SPDX-License-Identifier: Apache-2.0
"""Ranks that run different versions of commrt say so when they meet."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

import pytest

from commrt.backends.catalog import catalog
from commrt.bootstrap.single import SingleBootstrap
from commrt.errors import BackendError
from commrt.job.world import connect_world
from commrt.launch.detect import LaunchInfo
from commrt.version import __version__


class BesideAnother(SingleBootstrap):
    """Rank 0 or 1 of two, whose peer says the same as it does, but for its version."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank, self.size = rank, 2

    def exchange(
        self,
        members: Sequence[int],
        key: str,
        blob: bytes,
        timeout_s: float,
        heed: Callable[[], object] | None = None,
    ) -> list[bytes]:
        """Return what both say."""
        other = json.dumps({**json.loads(blob), "version": "9.9.9"}).encode()
        return [blob, other] if self.rank == 0 else [other, blob]


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_of_two_versions_are_refused(rank: int) -> None:
    found = ["9.9.9", __version__] if rank == 0 else [__version__, "9.9.9"]
    launch = LaunchInfo("run", rank, 2, "python -m commrt.run")
    words = f"rank 1 runs commrt {found[0]}, rank 0 {found[1]}: install one version"
    with pytest.raises(BackendError) as raised:
        connect_world(BesideAnother(rank), launch, catalog())
    assert words in str(raised.value)
