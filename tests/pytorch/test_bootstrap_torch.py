# SPDX-License-Identifier: Apache-2.0
"""Exchanges through torch's stores keep the promises of every bootstrap."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest
import torch.distributed as dist
from bootstrap_contract import *  # noqa: F403  the tests of every kind
from bootstrap_contract import Maker

from commrt.bootstrap import Bootstrap
from commrt.bootstrap.store import StoreBootstrap, torchrun_store
from commrt.errors import BackendError


@pytest.fixture(scope="session", autouse=True)
def _pipe_of_libuv() -> None:
    """Make the first server: libuv opens a pipe with it, once for the process."""
    dist.TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False)


def _hash_store(size: int) -> Callable[[int], Bootstrap]:
    store = dist.HashStore()
    return lambda rank: StoreBootstrap(store, rank, size)


def _tcp_store(size: int) -> Callable[[int], Bootstrap]:
    """Return ranks of which each has a client of its own, as under torchrun."""
    limit = timedelta(seconds=300)
    server = dist.TCPStore("127.0.0.1", 0, size, True, limit, wait_for_workers=False)

    def join(rank: int) -> Bootstrap:
        client = dist.TCPStore(
            "127.0.0.1", server.port, size, False, limit, wait_for_workers=False
        )
        return StoreBootstrap(client, rank, size)

    return join


@pytest.fixture(params=[_hash_store, _tcp_store])
def make(request: pytest.FixtureRequest) -> Maker:
    """Return each kind of torch's stores."""
    kind: Maker = request.param
    return kind


def test_a_store_that_nobody_hosts_is_named() -> None:
    environ = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "9",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    with pytest.raises(BackendError, match=r"rank 1 of 2: no torch store at 127\.0"):
        torchrun_store(1, 2, 0.5, environ)
