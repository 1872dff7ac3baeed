# SPDX-License-Identifier: Apache-2.0
"""Samples that ranks exchange in part before each epoch, and shuffle."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from types import TracebackType
from typing import Any, NamedTuple, TypeVar

import numpy as np

from commrt.comm import Communicator
from commrt.errors import (
    ClosedError,
    CommError,
    RevokedError,
    TimeoutError_,
    UsageError,
    shown,
)
from commrt.layers.samples.agreement import agreed
from commrt.layers.samples.columns import Columns
from commrt.layers.samples.draws import (
    MOST_DRAWN,
    Ints,
    drawn_of,
    num_between,
    num_drawn,
    order_of,
)
from commrt.layers.samples.records import Records
from commrt.request import Request

__all__ = ["PartialShuffle"]

T = TypeVar("T")

_NUMPY = ".".join(np.__version__.split(".")[:2])
"""Only a new one of these may draw other numbers by a seed (NEP 19)."""


class _Exchange(NamedTuple):
    """An exchange under way."""

    request: Request | None
    """None: no rank sends anything."""
    places: Ints
    """Of this rank's samples afterwards, in the order of the next epoch."""


class PartialShuffle:
    """Samples of all ranks, of which a fraction changes ranks before each epoch.

        shuffle = PartialShuffle({"image": images, "label": labels}, comm, 0.3)
        for epoch in range(10):
            shuffle.next_epoch()
            batch = shuffle.read(slice(0, 32))     # {"image": ..., "label": ...}

    Each rank passes samples of its own, any number, also none, and always has as many.
    After each exchange every sample is on exactly one rank. ``fraction=0`` shuffles on
    each rank alone, and sends nothing. ``fraction=1`` shuffles globally: every order of
    all samples is equally likely.

    Args:
        samples: this rank's, one to each index of the first dimension: an array, a
            tensor of torch in the host's memory, or a mapping of such. They are copied:
            later changes of the caller's arrays have no effect.
        comm: the ranks; with a ``ProcessGrid`` that of its axis, as ``grid["data"]``.
        fraction: Q, the part of its samples that a rank draws for an exchange.
        seed: with the epoch it decides everything that is random.
        epoch: exchanges that these samples have had before. With the samples of an
            earlier object, in its order, it goes on as that one would.

    In an exchange, rank r draws d = floor(Q * n) of its n samples. All drawn samples
    change places at random, so s of them come back to where they were: d² over the
    samples that all ranks draw, on average. Bytes: one ``alltoallv`` of (d - s) * b for
    samples of b bytes, all arrays included. Memory: n + d samples, and 8 bytes for the
    place of each of the n. While samples travel, a place takes 16 bytes; while the
    exchange is started, up to 48.

    Collective when it is made: an ``allgather`` of 24 bytes for each rank. It has a
    communicator of its own, so other operations may be under way beside an exchange.
    Raises UsageError on all ranks where one rank's arguments are wrong, and where
    names, types or shapes of arrays, or other arguments, differ.

    An exchange that fails on one rank, for want of memory or by a dead peer, fails on
    all: the others raise RevokedError. Then no exchange is possible any more. The
    samples of this rank's epoch can still be read. Where all ranks are in the same
    epoch, a new object of these samples, with ``epoch=``, goes on.
    """

    def __init__(
        self,
        samples: Any,
        comm: Communicator,
        fraction: float = 0.3,
        seed: int = 0,
        *,
        epoch: int = 0,
    ) -> None:
        if not isinstance(comm, Communicator):
            raise UsageError(
                f"PartialShuffle: comm={shown(comm)} must be a communicator, as "
                f"commrt.init() returns it; with a ProcessGrid pass grid['data']"
            )

        def check() -> tuple[tuple[Records, Ints], int, list[str]]:
            _check_numbers(fraction, seed, epoch)
            columns, number, arrays = Columns.of(samples)
            room = num_drawn(fraction, number) if comm.size > 1 else 0
            texts = [str(columns), f"fraction={float(fraction)}", f"seed={int(seed)}"]
            texts += [f"epoch={int(epoch)}", f"numpy {np.__version__}"]
            records = Records(columns, arrays, number, room)
            return (records, np.arange(number)), number, texts

        made, self.counts = agreed("PartialShuffle", comm, check)
        self._records: Records = made[0]
        self._places: Ints = made[1]
        self.fraction, self.seed, self.epoch = float(fraction), int(seed), int(epoch)
        self._drawn = tuple(num_drawn(fraction, number) for number in self.counts)
        if comm.size > 1 and sum(self._drawn) > MOST_DRAWN:
            raise UsageError(
                f"PartialShuffle: ranks draw {sum(self._drawn)} samples for an "
                f"exchange; at most {MOST_DRAWN} can be: choose a smaller fraction, or "
                f"let a sample be several"
            )
        self._comm = comm.dup(name=f"{comm.name}.samples")
        self._exchange: _Exchange | None = None
        self._failure: str | None = None
        self._is_closed = False
        # A loader's thread reads while the program may call next_epoch().
        self._lock = threading.Lock()

    # -- epochs ------------------------------------------------------------------------

    def next_epoch(self) -> None:
        """Exchange samples and shuffle them; collective.

        It ends an exchange that ``start_next_epoch`` has started, and else does all.
        After a TimeoutError_ the exchange is still under way, and another call waits
        for it again. After any other error of an exchange, see the class.
        """
        with self._lock:
            self._start()
            self._finish()

    def start_next_epoch(self) -> None:
        """Start the exchange of ``next_epoch``; collective, and waits for nobody.

        Until ``next_epoch`` the samples of this epoch can be read as before. A second
        call does nothing.
        """
        with self._lock:
            self._start()

    def poll(self) -> None:
        """Make a little progress with an exchange that is under way."""
        exchange = self._exchange
        if exchange is not None and exchange.request is not None:
            with self._ends_all_ranks():
                exchange.request.test()

    @property
    def is_exchanging(self) -> bool:
        """True between ``start_next_epoch`` and ``next_epoch``."""
        is_over = self._is_closed or self._failure is not None
        return self._exchange is not None and not is_over

    def _start(self) -> None:
        self._check_usable()
        if self._exchange is not None:
            return
        number, epoch = len(self), self.epoch + 1
        if self._comm.size > 1 and any(self._drawn):
            with self._ends_all_ranks():
                self._exchange = self._sent(number, epoch)
            return
        # Nobody waits for this rank: after an error the call can be made again.
        order = order_of(number, self.rank, self.seed, epoch)
        self._exchange = _Exchange(None, self._places[order])

    def _sent(self, number: int, epoch: int) -> _Exchange:
        """Start to send; the order is drawn before, since memory may be missing."""
        rank = self.rank
        sends, recvs = num_between(self._drawn, rank, self.seed, epoch)
        drawn = drawn_of(number, self._drawn[rank], rank, self.seed, epoch)
        first = int(sends[:rank].sum())
        # Samples that stay would lie between those for the ranks around this one.
        leaving = np.delete(drawn, slice(first, first + int(sends[rank])))
        sends[rank] = recvs[rank] = 0
        new_places, message, into = self._records.move_out(self._places[leaving])
        self._places = new_places[self._places]
        self._records.is_whole = True
        del new_places
        staying = self._places[self._places < number]
        coming = np.arange(number - len(leaving), number)
        arrived = np.concatenate([staying, coming])
        del staying, coming
        places = arrived[order_of(number, rank, self.seed, epoch)]
        each = self.sample_nbytes
        request: Request = self._comm.alltoallv(
            message,
            send_counts=tuple((sends * each).tolist()),
            recv_counts=tuple((recvs * each).tolist()),
            out=into,
            nonblocking=True,
        )
        return _Exchange(request, places)

    def _finish(self) -> None:
        exchange = self._exchange
        assert exchange is not None
        if exchange.request is not None:
            with self._ends_all_ranks():
                exchange.request.wait()
        self._places, self._exchange = exchange.places, None
        self.epoch += 1

    # -- errors of one rank ------------------------------------------------------------

    def revoke(self, why: str = "") -> None:
        """End exchanges on all ranks, as one of them sees fit; local.

        For errors of this rank that the others would wait for: their exchanges raise
        RevokedError, those under way and all later ones. ``with`` calls it, too, where
        an error leaves the block, and so does a loader that cannot read a batch.
        Where nothing is exchanged (``fraction=0``) the others do not hear of it.
        """
        if self._is_closed:
            return
        said = f"revoke() was called on rank {self.rank}"
        self._fail(f"{said}: {why}" if why else said)

    @contextlib.contextmanager
    def _ends_all_ranks(self) -> Iterator[None]:
        """Let the other ranks hear of an error, who wait for this one in an exchange.

        After a timeout, as after Ctrl-C in a wait, an exchange is still under way.
        """
        try:
            yield
        except TimeoutError_:
            raise
        except Exception as error:
            self._fail(f"on rank {self.rank}: {type(error).__name__}: {error}")
            raise
        except BaseException:
            if self._exchange is None:  # it was being started
                self._fail(f"rank {self.rank} was interrupted")
            raise

    def _fail(self, why: str) -> None:
        if self._failure is None:
            self._failure = why
        with contextlib.suppress(CommError):  # it has failed by itself, as a rule
            self._comm.revoke(f"PartialShuffle: {why}")

    # -- samples -----------------------------------------------------------------------

    def __len__(self) -> int:
        """Return the number of this rank's samples."""
        return self._records.num_samples

    def read(self, which: slice | Ints) -> Any:
        """Return new arrays of some samples, in the form in which they were passed.

        Args:
            which: their numbers in the order of this epoch.

        Raises UsageError for numbers that no sample has.
        """
        return self._read(which, None)[0]

    def read_parts(self, which: slice | Ints, ends: Sequence[int]) -> list[Any]:
        """Return the same in parts: each has the samples up to one of ``ends``.

        Args:
            which: as for ``read``.
            ends: numbers of samples, in ascending order; the last is that of all.

        Parts of an array are views of one array. Parts of a tensor are tensors that
        share no memory, so that one may be changed in place and another one saved.
        """
        return self._read(which, ends)

    def _read(self, which: slice | Ints, ends: Sequence[int] | None) -> list[Any]:
        with self._lock:
            self._check_open()
            if not self._records.is_whole:
                raise RevokedError(
                    f"PartialShuffle.read: samples of this rank were lost when an "
                    f"exchange failed ({self._failure}); begin again from a saved state"
                )
            try:
                places = self._places[which]
            except (IndexError, TypeError, ValueError) as error:
                raise UsageError(
                    f"PartialShuffle.read: {shown(which)} is no choice of this rank's "
                    f"{len(self)} samples; pass a slice, or an array of numbers"
                ) from error
            if places.ndim != 1:
                raise UsageError(
                    f"PartialShuffle.read: {shown(which)} is one number, or has "
                    f"several dimensions; pass a slice, or an array (samples,) of "
                    f"numbers"
                )
            number = len(places)
            ends = (number,) if ends is None else ends
            is_rising = all(low <= high for low, high in pairwise((0, *ends)))
            if not is_rising or len(ends) == 0 or ends[-1] != number:
                raise UsageError(
                    f"PartialShuffle.read_parts: ends={shown(ends)}; expected "
                    f"ascending numbers, the last of them {number}, for all samples"
                )
            found = self._records.read_parts(places, ends)
        if self._records.columns.is_mapping:
            return found
        return [next(iter(part.values())) for part in found]

    @property
    def samples(self) -> Any:
        """Copies of all samples of this rank, in the order of this epoch."""
        return self.read(slice(None))

    @property
    def sample_nbytes(self) -> int:
        """Bytes of a sample, all arrays included."""
        return self._records.columns.nbytes

    @property
    def stored_nbytes(self) -> int:
        """Bytes of the samples and of the room for an exchange."""
        return self._records.nbytes

    @property
    def rank(self) -> int:
        """This rank, of those that exchange samples."""
        return self._comm.rank

    def compare(
        self, what: str, check: Callable[[], tuple[T, int, Sequence[str]]]
    ) -> tuple[T, tuple[int, ...]]:
        """Compare arguments of all ranks, as ``agreed`` does; collective."""
        self._check_usable()
        return agreed(what, self._comm, check)

    # -- state and end -----------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return all that decides how the first samples come to this epoch.

        It has the ``epoch``, the ``seed`` and the ``fraction``, the ``counts`` of
        samples on all ranks, and the release of ``numpy``, which draws the numbers.
        """
        return {
            "epoch": self.epoch,
            "seed": self.seed,
            "fraction": self.fraction,
            "counts": [*self.counts],
            "numpy": _NUMPY,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Repeat exchanges up to the epoch of a state; collective.

        The object has the samples that the first one had, on the same ranks. Bytes: an
        ``allgather`` of 24 for each rank, and those of each exchange. To repeat no
        exchange, pass the saved ``samples`` and ``epoch`` when the object is made.

        Raises UsageError on all ranks for a state of other arguments, of other numbers
        of samples, or of an epoch that is over; and for one of another release of
        numpy, where exchanges must be repeated.
        """

        def check() -> tuple[int, int, list[str]]:
            own = self.state_dict()
            if not isinstance(state, Mapping) or {*state} != {*own}:
                raise UsageError(
                    f"PartialShuffle.load_state_dict: {shown(state)} is no state; "
                    f"expected what state_dict() returns, with {', '.join(own)}"
                )
            for name in ("seed", "fraction", "counts"):
                if state[name] != own[name]:
                    raise UsageError(
                        f"PartialShuffle.load_state_dict: the state has {name} "
                        f"{shown(state[name])}, and this object {shown(own[name])}; "
                        f"make the object with the state's"
                    )
            wanted = state["epoch"]
            is_integer = isinstance(wanted, int) and not isinstance(wanted, bool)
            if not is_integer or wanted < self.epoch:
                raise UsageError(
                    f"PartialShuffle.load_state_dict: the state is of epoch "
                    f"{shown(wanted)}, and this object is in epoch {self.epoch}, from "
                    f"which none leads back; load it into a new object"
                )
            if wanted > self.epoch and state["numpy"] != _NUMPY:
                raise UsageError(
                    f"PartialShuffle.load_state_dict: the state is of numpy "
                    f"{shown(state['numpy'])}, and this is {_NUMPY}, which may draw "
                    f"other numbers; use that numpy, or pass saved samples and epoch="
                )
            return wanted, 0, [f"a state of epoch {wanted}"]

        what = "PartialShuffle.load_state_dict"
        wanted, _ = self.compare(what, check)
        while self.epoch < wanted:
            self.next_epoch()

    def close(self) -> None:
        """Wait for an exchange under way, and release the communicator.

        All ranks call it. A second call does nothing. Where the wait raises an error,
        also a TimeoutError_, the exchange ends on all ranks, and the communicator is
        released all the same. After an exchange that failed, there is no wait.
        """
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            request = None if self._exchange is None else self._exchange.request
            try:
                if request is not None and self._failure is None:
                    request.wait()
            except BaseException as error:
                self._fail(f"close() on rank {self.rank}: {type(error).__name__}")
                raise
            finally:
                if request is not None and self._failure is not None:
                    # It has ended by now; a request that nobody waits for is a leak.
                    with contextlib.suppress(CommError):
                        request.wait()
                self._comm.free()

    def __enter__(self) -> PartialShuffle:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None:
            # Other ranks may wait for this one in an exchange that it never starts.
            self.revoke(f"{type(error).__name__} in its block")
        self.close()

    def __repr__(self) -> str:
        return (
            f"<PartialShuffle: {len(self)} of {sum(self.counts)} samples, "
            f"{self.sample_nbytes} B each, fraction {self.fraction}, "
            f"epoch {self.epoch}>"
        )

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedError("PartialShuffle: it was closed; make another one")

    def _check_usable(self) -> None:
        self._check_open()
        if self._failure is not None:
            raise RevokedError(
                f"PartialShuffle: an exchange failed in epoch {self.epoch} "
                f"({self._failure}), and none is possible any more; make another "
                f"object: of the samples of this epoch, with epoch={self.epoch}, or of "
                f"the first ones"
            )


def _check_numbers(fraction: float, seed: int, epoch: int) -> None:
    if isinstance(fraction, bool) or not isinstance(fraction, int | float):
        raise UsageError(
            f"PartialShuffle: fraction={shown(fraction)}; expected a number from 0 to 1"
        )
    if not 0 <= fraction <= 1:
        raise UsageError(
            f"PartialShuffle: fraction={fraction}; expected a number from 0, which "
            f"exchanges nothing, to 1, which shuffles globally"
        )
    for name, value in (("seed", seed), ("epoch", epoch)):
        is_integer = isinstance(value, int | np.integer) and not isinstance(value, bool)
        if not is_integer or value < 0:
            raise UsageError(
                f"PartialShuffle: {name}={shown(value)}; expected an integer from 0"
            )
