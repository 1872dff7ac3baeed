# SPDX-License-Identifier: Apache-2.0
"""Exchanges through a folder keep the promises of every bootstrap."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from bootstrap_contract import *  # noqa: F403  the tests of every kind
from bootstrap_contract import Maker

from commrt.bootstrap.directory import DirectoryStore
from commrt.bootstrap.store import StoreBootstrap
from commrt.errors import BackendError


@pytest.fixture
def make(tmp_path: Path) -> Maker:
    """Return ranks of which each has the folder, as under commrt.run."""

    def of(size: int):
        return lambda rank: StoreBootstrap(DirectoryStore(tmp_path, size), rank, size)

    return of


def test_values_keys_and_their_end(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path, 2)
    names = ["a", "a/b", "../a", "\N{SNOWMAN} %", "b@1#2"]
    assert not store.check(names[:1])
    for number, name in enumerate(names):
        store.set(name, bytes([number]))
        assert DirectoryStore(tmp_path, 2).get(name) == bytes([number])
    store.set("a", b"")
    assert store.check(names)
    assert store.get("a") == b""
    store.delete_key("a")
    store.delete_key("never")
    assert not store.check(names)
    assert store.check(names[1:])
    outside = [path for path in tmp_path.parent.iterdir() if path != tmp_path]
    assert not [path for path in outside if path.name.startswith("key-")]


def test_many_count_at_once(tmp_path: Path) -> None:
    def count() -> None:
        mine = DirectoryStore(tmp_path, 4)
        seen.extend(mine.add("counter", 1) for _ in range(50))

    seen: list[int] = []
    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert sorted(seen) == list(range(1, 201))


def test_a_folder_that_is_gone_is_named(tmp_path: Path) -> None:
    with pytest.raises(BackendError, match=r"COMMRT_MEETING=.*gone is no folder"):
        DirectoryStore(tmp_path / "gone", 2)
