# SPDX-License-Identifier: Apache-2.0
"""Fixtures for every test: a leak guard, and ranks as threads."""

from __future__ import annotations

import gc
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol, TypeVar

import pytest
from hypothesis import HealthCheck, settings
from sampling import (
    case_line,
    full,
    num_cases,
    pytest_addoption,
    pytest_collection_modifyitems,
    pytest_configure,
    pytest_configure_node,
    pytest_terminal_summary,
    seed,
    tally,
)

__all__ = [
    "case_line",
    "full",
    "num_cases",
    "pytest_addoption",
    "pytest_collection_modifyitems",
    "pytest_configure",
    "pytest_configure_node",
    "pytest_terminal_summary",
    "seed",
    "tally",
]

T = TypeVar("T")

# With it a line is written in two pieces, and ranks that share a pipe come between.
os.environ.pop("PYTHONUNBUFFERED", None)

# The user's tables choose other algorithms than the model does, which tests expect.
_CONFIG = tempfile.TemporaryDirectory(prefix="commrt-tests-")
os.environ["XDG_CONFIG_HOME"] = _CONFIG.name
os.environ.pop("COMMRT_TABLE", None)

# Limits on the time of an example, or of drawing it, would make busy machines fail.
settings.register_profile(
    "untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("untimed")

# What a communication library leaks: sockets, pipes, anonymous and shared memory.
_OWNED_TARGETS = ("socket:", "pipe:", "anon_inode:", "/memfd:", "/dev/shm/")
# Far away: only a leak waits so long. What another worker of pytest-xdist holds in
# /dev/shm looks like ours until then.
_GRACE_S = 60.0


def pytest_unconfigure() -> None:
    """Let the system end a process that does not end by itself after its tests.

    What waits then is native code, after Python has ended; only a signal ends it.
    """
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(int(_GRACE_S))


class RunThreads(Protocol):
    """Type of the ``run_threads`` fixture."""

    def __call__(
        self, nranks: int, fn: Callable[[int], T], deadline_s: float = 300.0
    ) -> list[T]: ...


def _live_threads() -> set[str]:
    return {f"thread {t.name} ({t.ident})" for t in threading.enumerate()}


def _open_files() -> set[str]:
    found = set()
    for entry in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{entry}")
        except OSError:
            continue  # the descriptor of this listing itself
        if target.startswith(_OWNED_TARGETS):
            found.add(f"file descriptor {entry} -> {target}")
    return found


def _shared_memory() -> set[str]:
    if not os.path.isdir("/dev/shm"):
        return set()
    names = (name for name in os.listdir("/dev/shm") if name.startswith("commrt"))
    return {f"/dev/shm/{name}" for name in names}


def _children() -> set[str]:
    text = Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text()
    return {f"child process {pid}" for pid in text.split()}


def _held() -> set[str]:
    return _live_threads() | _open_files() | _shared_memory() | _children()


@pytest.fixture(scope="session", autouse=True)
def _patient_ranks() -> Iterator[None]:
    """Give ranks of ``local.run`` as long as other ranks have, unless a test says less.

    Its default of a minute is a program's: a busy machine may take longer.
    """
    from commrt import local

    before = local.run.__kwdefaults__
    local.run.__kwdefaults__ = {**(before or {}), "timeout_s": 300.0}
    yield
    local.run.__kwdefaults__ = before


@pytest.fixture(autouse=True)
def leak_guard() -> Iterator[None]:
    """Fail a test that leaves threads, processes, descriptors or shared memory."""
    before = _held()
    yield
    deadline = time.monotonic() + _GRACE_S
    collected = False
    while left := _held() - before:
        if not collected:
            gc.collect()  # requests and communicators that only a cycle keeps alive
            collected = True
        elif time.monotonic() > deadline:
            pytest.fail("left behind: " + ", ".join(sorted(left)))
        else:
            threading.Event().wait(0.01)


@pytest.fixture
def run_threads() -> RunThreads:
    """Return ``run(nranks, fn, deadline_s)``: ``fn(rank)`` on one thread per rank.

    Returns the results in rank order and re-raises the error that came first. After
    the deadline the test fails with the stack of every rank that is still running.
    """
    return _run_threads


def _run_threads(
    nranks: int, fn: Callable[[int], T], deadline_s: float = 300.0
) -> list[T]:
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    def body(rank: int) -> None:
        try:
            results[rank] = fn(rank)
        except BaseException as error:  # noqa: BLE001  handed to the test below
            errors.append(error)

    threads = [
        threading.Thread(target=body, args=(rank,), name=f"rank {rank}", daemon=True)
        for rank in range(nranks)
    ]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + deadline_s
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    stuck = [thread for thread in threads if thread.is_alive()]
    if errors:
        raise errors[0]
    if stuck:
        pytest.fail(f"still running after {deadline_s} s:\n{_stacks(stuck)}")
    return [results[rank] for rank in range(nranks)]


def _stacks(threads: list[threading.Thread]) -> str:
    frames: dict[int, Any] = sys._current_frames()
    return "\n".join(
        f"{thread.name}:\n{''.join(traceback.format_stack(frames[thread.ident]))}"
        for thread in threads
        if thread.ident in frames
    )
