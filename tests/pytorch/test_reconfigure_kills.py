# SPDX-License-Identifier: Apache-2.0
"""Ranks are killed at random moments of a training, and the others reconfigure."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from chaos_peers import campaign, systems

from commrt.torch.backend import can_be_made

pytestmark = pytest.mark.skipif(
    not can_be_made(), reason="torch has reconfiguration from 2.14 on"
)


@pytest.mark.parametrize("name", ["commrt-word", "commrt-error"])
def test_the_others_train_on(name: str, pytestconfig: pytest.Config) -> None:
    system = systems(Path(sys.executable))[name]
    drawn = int(pytestconfig.getoption("seed") or 0)
    found = [each for job in campaign(system, 3, drawn) for each in job]
    assert [each.outcome for each in found] == ["right"] * 3, found
