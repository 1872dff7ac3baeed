# SPDX-License-Identifier: Apache-2.0
"""The learner of store kinds (native/engine/store_choice.hpp), on invented times."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

NATIVE = Path(__file__).parents[3] / "commrt" / "native"
HARNESS = """
#include "engine/store_choice.hpp"
using namespace commrt;
extern "C" {
void* make(int first, int open) {
  auto* choice = new StoreChoice;
  choice->start_with(static_cast<Store>(first), static_cast<Store>(open));
  return choice;
}
using Choice = StoreChoice*;
int next(void* c) { return static_cast<int>(static_cast<Choice>(c)->next()); }
void report(void* c, uint64_t t, bool only_writes) {
  static_cast<Choice>(c)->report(t, only_writes);
}
void hear(void* c, bool streams) { static_cast<Choice>(c)->hear(streams); }
bool has_tried(void* c) { return static_cast<Choice>(c)->has_tried(); }
int current(void* c) { return static_cast<int>(static_cast<Choice>(c)->current()); }
void drop(void* c) { delete static_cast<Choice>(c); }
}
"""
PLAIN, STREAM, STREAM_SLOTS, STREAM_BOTH = range(4)
Time = Callable[[int, int], int]
"""Of run and kind: its ticks."""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("store_choice")
    (folder / "harness.cpp").write_text(HARNESS)
    command = ["g++", "-std=c++17", "-O1", "-shared", "-fPIC", f"-I{NATIVE}"]
    built = folder / "harness.so"
    subprocess.run([*command, folder / "harness.cpp", "-o", built], check=True)
    loaded = ctypes.CDLL(str(built))
    loaded.make.restype = ctypes.c_void_p
    loaded.has_tried.restype = ctypes.c_bool
    return loaded


class Learner:
    """One plan's choice, run after run."""

    def __init__(
        self, library: ctypes.CDLL, first: int, opened: int, only_writes: bool = False
    ) -> None:
        self._library = library
        self._choice = ctypes.c_void_p(library.make(first, opened))
        self._only_writes = only_writes
        self._run = 0

    @property
    def current(self) -> int:
        return int(self._library.current(self._choice))

    @property
    def has_tried(self) -> bool:
        return bool(self._library.has_tried(self._choice))

    def kinds(self, runs: int, time: Time) -> Iterator[int]:
        """Yield the kind of each of the next runs, which take ``time(run, kind)``."""
        for _ in range(runs):
            kind = int(self._library.next(self._choice))
            ticks = ctypes.c_uint64(time(self._run, kind))
            self._library.report(self._choice, ticks, self._only_writes)
            self._run += 1
            yield kind

    def settle(self, runs: int, time: Time) -> int:
        """Return what it uses after so many runs."""
        assert len(list(self.kinds(runs, time))) == runs
        return self.current

    def hear(self, streams_slots: bool) -> None:
        self._library.hear(self._choice, streams_slots)

    def close(self) -> None:
        self._library.drop(self._choice)


@pytest.fixture
def learner(library: ctypes.CDLL) -> Iterator[Callable[..., Learner]]:
    made: list[Learner] = []

    def make(first: int, opened: int, only_writes: bool = False) -> Learner:
        made.append(Learner(library, first, opened, only_writes))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.mark.parametrize("best", [PLAIN, STREAM, STREAM_SLOTS, STREAM_BOTH])
@pytest.mark.parametrize("first", [PLAIN, STREAM, STREAM_SLOTS, STREAM_BOTH])
def test_the_fastest_kind_is_found(
    learner: Callable[[int, int], Learner], first: int, best: int
) -> None:
    one = learner(first, STREAM_BOTH)
    assert one.settle(100, lambda run, kind: 600 if kind == best else 1000) == best


def test_it_knows_after_a_trial_and_its_probation(
    learner: Callable[[int, int], Learner],
) -> None:
    one = learner(PLAIN, STREAM_SLOTS)
    seen = []
    for _ in one.kinds(40, lambda run, kind: 600 if kind == STREAM_SLOTS else 1000):
        seen.append(one.has_tried)
    assert not any(seen[:13])
    assert all(seen[14:])


def test_what_is_not_open_stays(learner: Callable[[int, int], Learner]) -> None:
    one = learner(STREAM, STREAM_SLOTS)
    kinds = set(one.kinds(3000, lambda run, kind: 1000 - 300 * (kind == PLAIN)))
    assert kinds == {STREAM, STREAM_BOTH}
    fixed = learner(STREAM, PLAIN)
    assert set(fixed.kinds(3000, lambda run, kind: 1000)) == {STREAM}


def test_equals_are_not_exchanged(learner: Callable[[int, int], Learner]) -> None:
    one = learner(PLAIN, STREAM_BOTH)
    assert one.settle(5000, lambda run, kind: 1000 + run * 7919 % 100) == PLAIN


def test_a_trial_that_met_a_better_moment_is_taken_back(
    learner: Callable[[int, int], Learner],
) -> None:
    def time(run: int, kind: int) -> int:
        slower = 1400 if kind == STREAM_SLOTS else 1000
        return 500 if 7 <= run < 10 else slower

    one = learner(PLAIN, STREAM_SLOTS)
    kinds = list(one.kinds(40, time))
    assert kinds[7:10] == [STREAM_SLOTS] * 3
    assert kinds[10] == STREAM_SLOTS, "it has won its trial"
    assert kinds[20:] == [PLAIN] * 20


@pytest.mark.parametrize("moment", [50, 500, *range(1026, 1031)])
def test_a_change_of_state_is_answered_within_a_few_runs(
    learner: Callable[[int, int], Learner], moment: int
) -> None:
    def time(run: int, kind: int) -> int:
        if run < moment:
            return 1000 if kind == PLAIN else 1500
        return 4000 if kind == PLAIN else 1600

    one = learner(PLAIN, STREAM_SLOTS)
    kinds = list(one.kinds(moment + 40, time))
    assert kinds[moment - 1] == PLAIN
    assert kinds[moment + 20 :] == [STREAM_SLOTS] * 20


def test_in_the_long_run_trials_are_rare(
    learner: Callable[[int, int], Learner],
) -> None:
    one = learner(PLAIN, STREAM_BOTH)
    kinds = list(one.kinds(10_000, lambda run, kind: 1000 + 400 * (kind != PLAIN)))
    assert sum(kind != PLAIN for kind in kinds) <= 100


def test_who_has_not_run_begins_with_what_others_found(
    learner: Callable[..., Learner],
) -> None:
    one = learner(STREAM, STREAM_SLOTS)
    one.hear(True)
    assert one.current == STREAM_BOTH
    one.hear(False)
    assert one.current == STREAM
    closed = learner(STREAM, STREAM)
    closed.hear(True)
    assert closed.current == STREAM, "slots are not open"


def test_who_hears_of_a_change_tries_soon(learner: Callable[..., Learner]) -> None:
    one = learner(PLAIN, STREAM_SLOTS)
    one.settle(100, lambda run, kind: 1000 + 500 * kind)
    # A machine in which plain stores are slower by less than tells a run.
    one.hear(True)
    kinds = list(one.kinds(20, lambda run, kind: 1500 - 250 * kind))
    assert kinds[:4] == [PLAIN] * 4, "what its own kind takes by now"
    assert kinds[4:] == [STREAM_SLOTS] * 16


def test_who_tries_in_vain_listens_less_and_less(
    learner: Callable[..., Learner],
) -> None:
    one = learner(PLAIN, STREAM_SLOTS)
    one.settle(1, lambda run, kind: 1000)
    kinds: list[int] = []
    for _ in range(8192):
        one.hear(True)
        kinds.extend(one.kinds(1, lambda run, kind: 1000 + 3000 * kind))
    tried = [run for run, kind in enumerate(kinds) if kind != PLAIN]
    rounds = [run for run in tried if run - 1 not in tried]
    assert len(tried) == 3 * len(rounds)
    assert 100 <= rounds[2] - rounds[1] <= 200
    assert len([run for run in rounds if run > 4096]) <= 9


@pytest.mark.parametrize(("streamed", "expected"), [(400, PLAIN), (240, STREAM_SLOTS)])
def test_who_sees_only_its_writes_wants_more_of_streamed_ones(
    learner: Callable[..., Learner], streamed: int, expected: int
) -> None:
    def time(run: int, kind: int) -> int:
        return streamed if kind == STREAM_SLOTS else 1000

    assert learner(PLAIN, STREAM_SLOTS, True).settle(100, time) == expected
    assert learner(STREAM_SLOTS, STREAM_SLOTS, True).settle(100, time) == expected
    assert learner(PLAIN, STREAM_SLOTS).settle(100, time) == STREAM_SLOTS
