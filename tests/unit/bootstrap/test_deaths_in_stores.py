# SPDX-License-Identifier: Apache-2.0
"""A rank may die at any operation of the store in which ranks meet: nobody hangs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from dict_store import DictStore

from commrt.bootstrap.store import StoreBootstrap
from commrt.errors import PeerFailedError

MOST = 40
"""More operations than a rank makes in what is tried here."""


class _Killed(BaseException):
    """Ends a rank as SIGKILL does: its handlers do nothing more to the store."""


class MortalStore:
    """A rank's view of a store; the rank dies before one of its operations."""

    def __init__(self, store: DictStore, number: int) -> None:
        self._store, self._left = store, number
        self.is_dead = False

    def __getattr__(self, name: str) -> Callable[..., Any]:
        operation: Callable[..., Any] = getattr(self._store, name)

        def called(*args: Any) -> Any:
            # A rank that waits checks any number of times.
            self._left -= name != "check"
            if self._left < 0:
                self.is_dead = True
                raise _Killed
            return operation(*args)

        return called


def exchanges(peers: StoreBootstrap, rank: int) -> list[bytes]:
    said: list[bytes] = []
    for turn in range(3):
        said += peers.exchange(range(3), f"key {turn}", b"%d" % rank, 200)
    return said


def regroups(peers: StoreBootstrap, rank: int) -> list[bytes]:
    _, said = peers.regroup(range(3), "who lives", b"%d" % rank, 200)
    return [*said.values()]


@pytest.mark.parametrize("meets", [exchanges, regroups])
@pytest.mark.parametrize("dies", [0, 2])
def test_others_hear_of_it_whenever_it_dies(
    meets: Callable[[StoreBootstrap, int], list[bytes]],
    dies: int,
    run_threads: Callable[..., list[Any]],
) -> None:
    everybody = {b"0", b"1", b"2"}
    died = 0
    for number in range(1, MOST):
        store = DictStore()
        mortal = MortalStore(store, number)

        def rank_main(
            rank: int, store: DictStore = store, mortal: MortalStore = mortal
        ) -> set[bytes] | str:
            peers = StoreBootstrap(mortal if rank == dies else store, rank, 3)

            def gone(other: int) -> str:
                return "it has ended" if other == dies and mortal.is_dead else ""

            peers.gone = gone
            try:
                return {*meets(peers, rank)}
            except PeerFailedError as error:
                return str(error)
            except _Killed:
                return "killed"

        found = run_threads(3, rank_main)
        died += mortal.is_dead
        for rank, end in enumerate(found):
            if end == "killed":
                assert rank == dies
            elif isinstance(end, str):
                assert f"rank {dies}" in end
                assert "it has ended" in end
            else:
                assert end in (everybody, everybody - {b"%d" % dies})
    # Some operations were its last ones, and then there were no more.
    assert 2 < died < MOST - 2
