# SPDX-License-Identifier: Apache-2.0
"""The helper of tests that compare logs refuses logs without anything in them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from recorded import logs_of


def recording(*logs: Any) -> Any:
    return SimpleNamespace(logs=lambda: list(logs))


def test_logs_with_operations_are_returned() -> None:
    log = SimpleNamespace(rank=0, operations=["barrier"])
    assert logs_of(recording(log)) == [log]


def test_logs_without_operations_are_refused() -> None:
    with pytest.raises(AssertionError, match="nothing was recorded"):
        logs_of(recording())
    empty = SimpleNamespace(rank=3, operations=[])
    with pytest.raises(AssertionError, match="rank 3 recorded no operation"):
        logs_of(recording(empty))
