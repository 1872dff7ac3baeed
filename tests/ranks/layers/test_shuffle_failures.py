# SPDX-License-Identifier: Apache-2.0
"""An error of one rank reaches all of them, and leaves a shuffle in a defined state."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from shuffle_cases import check_samples, exchanged, ids_of, samples_of

from commrt.comm import Communicator
from commrt.errors import ClosedError, CommError, RevokedError, TimeoutError_
from commrt.layers.samples import BatchLoader, PartialShuffle
from commrt.layers.samples import shuffle as module
from commrt.layers.samples.records import Records
from commrt.local import run

COUNTS = (5, 6)
SOON_S = 0.05


class Fault:
    """An error that one rank raises where a test has put it, once it is armed."""

    def __init__(self, error: BaseException) -> None:
        self.error = error
        self.rank = threading.local()

    def arm(self) -> None:
        """Let this thread raise the error from here on."""
        self.rank.fails = True

    def before(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function, which raises the error in an armed thread."""

        def call(*args: Any, **kwargs: Any) -> Any:
            if getattr(self.rank, "fails", False):
                raise self.error
            return function(*args, **kwargs)

        return call


@pytest.fixture
def released(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Check that each communicator that the shuffles made has been freed."""
    made: list[Any] = []
    dup = Communicator.dup

    def noted(self: Any, **how: Any) -> Any:
        made.append(dup(self, **how))
        return made[-1]

    monkeypatch.setattr(Communicator, "dup", noted)
    yield
    assert made
    for each in made:
        with pytest.raises(ClosedError):
            each.barrier()


PLACES = {
    "numbers": (module, "num_between"),
    "draws": (module, "drawn_of"),
    "order": (module, "order_of"),
    "records": (Records, "move_out"),
    "moves": (Records, "_copy"),
    "call": (Communicator, "alltoallv"),
}


@pytest.mark.usefixtures("released")
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("error", [MemoryError("full"), KeyboardInterrupt()])
@pytest.mark.parametrize("place", PLACES)
def test_an_error_while_an_exchange_starts_reaches_all_ranks(
    place: str, error: BaseException, ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, name = PLACES[place]
    fault, everyone = Fault(error), threading.Barrier(2)
    monkeypatch.setattr(owner, name, fault.before(getattr(owner, name)))

    def main(comm: Any) -> list[int]:
        own = samples_of(ids_of(COUNTS)[comm.rank])
        shuffle = PartialShuffle(own, comm, 1.0)
        shuffle.next_epoch()
        before = check_samples(shuffle.samples)
        kind: type[BaseException] = RevokedError
        if comm.rank == 1:
            fault.arm()
            kind = type(error)
        start = shuffle.start_next_epoch if ahead and comm.rank else shuffle.next_epoch
        with pytest.raises(kind) as raised:
            start()
        if comm.rank == 0:
            said = "interrupted" if kind is KeyboardInterrupt else "rank 1"
            assert said in str(raised.value)
        everyone.wait(300)  # else the end of one rank would wake the other
        # It says so, again and again, and stays in its epoch.
        for call in (shuffle.next_epoch, shuffle.start_next_epoch):
            with pytest.raises(RevokedError, match="an exchange failed in epoch 1"):
                call()
        with pytest.raises(RevokedError, match="an exchange failed in epoch 1"):
            BatchLoader(shuffle, 2)
        assert shuffle.epoch == 1
        assert not shuffle.is_exchanging
        if place == "moves" and comm.rank == 1:
            with pytest.raises(RevokedError, match="samples of this rank were lost"):
                shuffle.read(slice(0, 1))
        else:
            assert check_samples(shuffle.samples) == before
        shuffle.close()
        return before

    first = exchanged(ids_of(COUNTS), 1.0, 0, 1)
    assert run(2, main) == first


@pytest.mark.usefixtures("released")
def test_the_samples_of_a_failed_exchange_go_on_in_another_object(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fault, everyone = Fault(MemoryError("full")), threading.Barrier(2)
    alltoallv = fault.before(Communicator.alltoallv)
    monkeypatch.setattr(Communicator, "alltoallv", alltoallv)

    def main(comm: Any) -> list[int]:
        own = samples_of(ids_of(COUNTS)[comm.rank])
        shuffle = PartialShuffle(own, comm, 0.5)
        shuffle.next_epoch()
        if comm.rank == 1:
            fault.arm()
        with pytest.raises((MemoryError, RevokedError)):
            shuffle.next_epoch()
        everyone.wait(300)
        fault.rank.fails = False
        saved, epoch = shuffle.samples, shuffle.epoch
        shuffle.close()
        with PartialShuffle(saved, comm, 0.5, epoch=epoch) as another:
            another.next_epoch()
            return check_samples(another.samples)

    wanted = ids_of(COUNTS)
    for epoch in (1, 2):
        wanted = exchanged(wanted, 0.5, 0, epoch)
    assert run(2, main) == wanted


@pytest.mark.parametrize("size", [1, 2])
def test_an_error_where_nothing_is_sent_leaves_all_as_it_was(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = Fault(MemoryError("full"))
    monkeypatch.setattr(module, "order_of", fault.before(module.order_of))

    def main(comm: Any) -> None:
        with PartialShuffle(np.arange(9), comm, 0 if size > 1 else 1.0) as shuffle:
            if comm.rank == size - 1:
                fault.arm()
                with pytest.raises(MemoryError):
                    shuffle.next_epoch()
                fault.rank.fails = False
            assert shuffle.samples.tolist() == [*range(9)]
            shuffle.next_epoch()
            assert shuffle.epoch == 1

    run(size, main)


@pytest.mark.usefixtures("released")
def test_a_wait_that_timed_out_can_be_made_again() -> None:
    has_waited = threading.Event()

    def main(comm: Any) -> list[int]:
        own = samples_of(ids_of(COUNTS)[comm.rank])
        limit_s = comm.timeout_s
        comm.timeout_s = SOON_S if comm.rank == 0 else limit_s
        shuffle = PartialShuffle(own, comm, 0.5)
        before = check_samples(shuffle.samples)
        if comm.rank == 0:
            with pytest.raises(TimeoutError_):
                shuffle.next_epoch()
            assert (shuffle.epoch, shuffle.is_exchanging) == (0, True)
            assert check_samples(shuffle.samples) == before
            has_waited.set()
            while shuffle.epoch == 0:
                try:
                    shuffle.next_epoch()
                except TimeoutError_:
                    continue
        else:
            assert has_waited.wait(300)
            shuffle.next_epoch()
        found = check_samples(shuffle.samples)
        shuffle.close()
        return found

    assert run(2, main) == exchanged(ids_of(COUNTS), 0.5, 0, 1)


def twice(shuffle: PartialShuffle) -> None:
    for _ in range(2):
        shuffle.next_epoch()


@pytest.mark.usefixtures("released")
def test_close_releases_its_communicator_where_its_wait_fails() -> None:
    has_closed = threading.Event()

    def main(comm: Any) -> None:
        comm.timeout_s = SOON_S if comm.rank == 0 else comm.timeout_s
        shuffle = PartialShuffle(np.arange(4), comm, 1.0)
        if comm.rank == 0:
            shuffle.start_next_epoch()
            with pytest.raises(TimeoutError_):
                shuffle.close()
            shuffle.close()
            with pytest.raises(ClosedError):
                shuffle.next_epoch()
            has_closed.set()
        else:
            assert has_closed.wait(300)
            # It hears of the end once it needs more than what has come before, and
            # not at its own limit.
            with pytest.raises(RevokedError, match=r"close\(\) on rank 0"):
                twice(shuffle)
            shuffle.close()

    run(2, main)


@pytest.mark.usefixtures("released")
def test_an_error_in_the_block_of_one_rank_reaches_all_ranks() -> None:
    everyone = threading.Barrier(2)

    def block(comm: Any) -> None:
        with PartialShuffle(np.arange(4), comm, 1.0) as shuffle:
            shuffle.next_epoch()
            if comm.rank == 1:
                raise LookupError("no file")
            shuffle.next_epoch()

    def main(comm: Any) -> None:
        kind = LookupError if comm.rank == 1 else RevokedError
        says = "no file" if comm.rank == 1 else "on rank 1: LookupError in its block"
        with pytest.raises(kind, match=says):
            block(comm)
        everyone.wait(300)

    run(2, main)


@pytest.mark.usefixtures("released")
def test_a_rank_hears_of_the_end_while_it_makes_progress() -> None:
    has_started, everyone = threading.Event(), threading.Barrier(2)

    def hear(shuffle: PartialShuffle) -> None:
        while True:
            shuffle.poll()

    def main(comm: Any) -> None:
        shuffle = PartialShuffle(np.arange(4), comm, 1.0)
        if comm.rank == 0:
            shuffle.start_next_epoch()
            has_started.set()
            with pytest.raises(RevokedError, match="rank 1: no more data"):
                hear(shuffle)
        else:
            assert has_started.wait(300)
            shuffle.revoke("no more data")
        everyone.wait(300)
        with pytest.raises(RevokedError, match="an exchange failed in epoch 0"):
            shuffle.next_epoch()
        assert shuffle.samples.tolist() == [0, 1, 2, 3]
        shuffle.close()
        shuffle.revoke()

    run(2, main)


@pytest.mark.usefixtures("released")
@pytest.mark.parametrize("prefetch", [False, True])
def test_a_batch_that_one_rank_cannot_read_ends_the_epochs_of_all(
    prefetch: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    everyone = threading.Barrier(2)
    read = PartialShuffle.read_parts

    def failing(self: PartialShuffle, which: Any, ends: Any) -> Any:
        if self.rank == 1 and self.epoch == 2:
            raise MemoryError("full")
        return read(self, which, ends)

    monkeypatch.setattr(PartialShuffle, "read_parts", failing)

    def main(comm: Any) -> None:
        shuffle = PartialShuffle(np.arange(8), comm, 0.5)
        loader = BatchLoader(shuffle, 2, prefetch=prefetch, overlap_steps=0)
        steps = []
        kind: type[BaseException] = MemoryError if comm.rank == 1 else RevokedError
        with pytest.raises(kind, match="full" if comm.rank == 1 else "no batch"):
            steps += [batch.step for _ in range(3) for batch in loader]
        everyone.wait(300)
        assert shuffle.epoch == 2
        state = loader.state_dict()
        assert state["shuffle"]["epoch"] == 2
        # The epoch has begun, so the batch that was not read is the next one.
        assert state["step"] == (0 if comm.rank == 1 else 4)
        shuffle.close()

    run(2, main)


def test_a_shuffle_that_is_closed_beside_an_iteration_says_so() -> None:
    def main(comm: Any) -> None:
        shuffle = PartialShuffle(np.arange(8), comm, 0.5)
        epoch = iter(BatchLoader(shuffle, 2, prefetch=False))
        next(epoch)
        shuffle.close()
        with pytest.raises(CommError):
            next(epoch)

    run(2, main)
