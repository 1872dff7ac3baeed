# SPDX-License-Identifier: Apache-2.0
"""A process that joins a job is ready before it asks for a place."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from commrt import growing
from commrt.errors import TimeoutError_
from commrt.launch.detect import LaunchInfo

LATE = "torch._dynamo"
LAUNCH = LaunchInfo("run", 0, 2, "a test")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Return what notes, as a process asks, whether torch's late part is loaded."""
    found: list[bool] = []

    def ask(*_: Any) -> None:
        found.append(LATE in sys.modules)
        raise TimeoutError_("nobody grows")

    monkeypatch.setattr(growing, "ask_for_place", ask)
    for name in ("torch", LATE):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return found


def join() -> None:
    with pytest.raises(TimeoutError_, match="nobody grows"):
        growing.join(LAUNCH, None, lambda: None, None)  # type: ignore[type-var]


@pytest.mark.parametrize("is_whole", [True, False])
def test_a_newcomer_has_loaded_what_torch_loads_late(
    is_whole: bool, asked: list[bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = ModuleType("torch")
    torch.__path__ = [str(tmp_path)]
    monkeypatch.setitem(sys.modules, "torch", torch)
    if is_whole:
        (tmp_path / "_dynamo.py").touch()
    join()
    monkeypatch.delitem(sys.modules, LATE, raising=False)
    assert asked == [is_whole]


def test_a_program_without_torch_loads_nothing_of_it(asked: list[bool]) -> None:
    join()
    assert asked == [False]
