# SPDX-License-Identifier: Apache-2.0
"""Costs between nodes, measured by gloo's own sum: a late one is no failed one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pytest

from commrt.errors import BackendError
from commrt.job.links import measure_between_nodes


class Bootstrap:
    """The exchanges of a job of one rank, all of whom live."""

    def exchange(
        self, members: Sequence[int], key: str, said: bytes, timeout_s: float
    ) -> list[bytes]:
        del key, timeout_s
        return [said for _ in members]

    def gone(self, rank: int) -> str:
        del rank
        return ""


@dataclass
class OneRank:
    """A world, as the measuring sees it."""

    rank: int = 0
    size: int = 1
    timeout_s: float = 1000.0
    nodes: list[list[int]] = field(default_factory=lambda: [[0]])
    bootstrap: Bootstrap = field(default_factory=Bootstrap)


@dataclass
class LateWork:
    """A sum that ends as soon as somebody has given up waiting for it."""

    error: str | None
    is_over: bool = False

    def is_completed(self) -> bool:
        return self.is_over

    def wait(self, timeout: timedelta) -> bool:
        del timeout
        if not self.is_over:
            self.is_over = True
            raise RuntimeError("Operation timed out!")
        if self.error is not None:
            raise RuntimeError(self.error)
        return True


@dataclass
class LateGloo:
    """torch's group of gloo on a busy machine."""

    error: str | None = None

    def allreduce(self, tensors: list[Any]) -> LateWork:
        del tensors
        return LateWork(self.error)


def sends_nothing(x: Any, *, dest: int, out: Any, source: int) -> None:
    del x, dest, out, source


def test_a_sum_that_ends_just_after_a_wait_for_it_is_measured() -> None:
    world: Any = OneRank()
    found = measure_between_nodes(world, sends_nothing, LateGloo())
    assert found.native_us > 0


def test_a_sum_that_fails_after_a_wait_for_it_tells_its_own_error() -> None:
    world: Any = OneRank()
    with pytest.raises(BackendError, match="Connection closed by peer"):
        measure_between_nodes(
            world, sends_nothing, LateGloo("Connection closed by peer")
        )
