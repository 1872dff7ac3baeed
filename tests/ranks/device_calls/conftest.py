# SPDX-License-Identifier: Apache-2.0
"""Fixtures of calls on devices without hardware."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from device_carriers import CARRIERS, Run, carrier_here


@pytest.fixture(params=CARRIERS)
def carrier(request: pytest.FixtureRequest) -> Iterator[tuple[str, Run]]:
    """Yield the name of what carries calls, and what runs a function on ranks."""
    with carrier_here(request.param) as run:
        yield request.param, run
