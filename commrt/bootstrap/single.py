# SPDX-License-Identifier: Apache-2.0
"""A world of one: plain ``python``, without MPI or torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from commrt.bootstrap.base import Keys

__all__ = ["SingleBootstrap"]


class SingleBootstrap:
    """The bootstrap of a world of one rank."""

    def __init__(self) -> None:
        self.rank = 0
        self.size = 1
        self.idle: Callable[[], object] | None = None
        self.gone: Callable[[int], str] | None = None
        self._keys = Keys(0, 1)

    def exchange(
        self,
        members: Sequence[int],
        key: str,
        blob: bytes,
        timeout_s: float,
        heed: Callable[[], object] | None = None,
    ) -> list[bytes]:
        """Return ``[blob]``."""
        with self._keys.turn(members, key, timeout_s):
            return [bytes(blob)]

    def regroup(
        self, members: Sequence[int], key: str, blob: bytes, timeout_s: float
    ) -> tuple[SingleBootstrap, dict[int, bytes]]:
        """Return another one, and ``blob``."""
        with self._keys.turn(members, key, timeout_s):
            return SingleBootstrap(), {0: bytes(blob)}

    def leave_word(self, key: str, blob: bytes) -> None:
        """Tell nobody: there are no others."""

    def words(self, key: str, ranks: Sequence[int]) -> dict[int, bytes]:
        """Return no words: there are no others."""
        return {}

    def forget(self, key: str) -> None:
        """Keep nothing of exchanges, and so drop nothing."""

    def close(self) -> None:
        """Hold nothing, release nothing."""
