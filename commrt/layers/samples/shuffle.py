# SPDX-License-Identifier: Apache-2.0
"""Samples that ranks exchange in part before each epoch, and shuffle."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, NamedTuple, TypeVar

import numpy as np

from commrt.comm import Communicator
from commrt.errors import ClosedError, UsageError, shown
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
            tensor of torch in the host's memory, or a mapping of such. They are copied,
            so the caller may let them go.
        comm: the ranks; with a ``ProcessGrid`` that of its axis, as ``grid["data"]``.
        fraction: Q, the part of its samples that a rank draws for an exchange.
        seed: with the epoch it decides everything that is random.
        epoch: exchanges that these samples have had before. With the samples of an
            earlier object, in its order, it goes on as that one would.

    In an exchange, rank r draws d = floor(Q * n) of its n samples. All drawn samples
    change places at random, so s of them come back to where they were: d² over the
    samples that all ranks draw, on average. Bytes: one ``alltoallv`` of (d - s) * b for
    samples of b bytes, all arrays included. Memory: n + d samples, and 8 bytes for the
    place of each; twice that during an exchange.

    Collective when it is made: an ``allgather`` of 24 bytes for each rank. It has a
    communicator of its own, so other operations may be under way beside an exchange.
    Raises UsageError on all ranks where one rank's arguments are wrong, and where
    names, types or shapes of arrays, or other arguments, differ.
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

        def check() -> tuple[Records, int, list[str]]:
            _check_numbers(fraction, seed, epoch)
            columns, number, arrays = Columns.of(samples)
            room = num_drawn(fraction, number) if comm.size > 1 else 0
            texts = [str(columns), f"fraction={float(fraction)}", f"seed={int(seed)}"]
            texts += [f"epoch={int(epoch)}", f"numpy {np.__version__}"]
            return Records(columns, arrays, number, room), number, texts

        self._records, self.counts = agreed("PartialShuffle", comm, check)
        self.fraction, self.seed, self.epoch = float(fraction), int(seed), int(epoch)
        self._drawn = tuple(num_drawn(fraction, number) for number in self.counts)
        if sum(self._drawn) > MOST_DRAWN:
            raise UsageError(
                f"PartialShuffle: ranks draw {sum(self._drawn)} samples for an "
                f"exchange; at most {MOST_DRAWN} can be: choose a smaller fraction, or "
                f"let a sample be several"
            )
        self._comm = comm.dup(name=f"{comm.name}.samples")
        self._places: Ints = np.arange(self._records.num_samples)
        self._exchange: _Exchange | None = None
        self._is_closed = False
        # A loader's thread reads while the program may call next_epoch().
        self._lock = threading.Lock()

    # -- epochs ------------------------------------------------------------------------

    def next_epoch(self) -> None:
        """Exchange samples and shuffle them; collective.

        It ends an exchange that ``start_next_epoch`` has started, and else does all.
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
            exchange.request.test()

    @property
    def is_exchanging(self) -> bool:
        """True between ``start_next_epoch`` and ``next_epoch``."""
        return self._exchange is not None

    def _start(self) -> None:
        self._check_open()
        if self._exchange is not None:
            return
        rank, number, epoch = self._comm.rank, len(self), self.epoch + 1
        if self._comm.size == 1 or not any(self._drawn):
            arrived, request = self._places, None
        else:
            sends, recvs = num_between(self._drawn, rank, self.seed, epoch)
            drawn = drawn_of(number, self._drawn[rank], rank, self.seed, epoch)
            first = int(sends[:rank].sum())
            # Samples that stay would lie between those for the ranks around this one.
            leaving = np.delete(drawn, slice(first, first + int(sends[rank])))
            sends[rank] = recvs[rank] = 0
            arrived, request = self._send(leaving, sends, recvs)
        order = order_of(number, rank, self.seed, epoch)
        self._exchange = _Exchange(request, arrived[order])

    def _send(
        self, leaving: Ints, sends: Ints, recvs: Ints
    ) -> tuple[Ints, Request | None]:
        """Start to send; return the places of what stays and of what comes.

        Args:
            leaving: places in the order of this epoch, by the rank that they go to.
            sends, recvs: samples for each rank, and from each.
        """
        each = self.sample_nbytes
        new_places, message, into = self._records.move_out(self._places[leaving])
        self._places = new_places[self._places]
        request: Request = self._comm.alltoallv(
            message,
            send_counts=tuple((sends * each).tolist()),
            recv_counts=tuple((recvs * each).tolist()),
            out=into,
            nonblocking=True,
        )
        number = len(self)
        staying = self._places[self._places < number]
        coming = np.arange(number - len(leaving), number)
        return np.concatenate([staying, coming]), request

    def _finish(self) -> None:
        exchange = self._exchange
        assert exchange is not None
        if exchange.request is not None:
            exchange.request.wait()
        self._places, self._exchange = exchange.places, None
        self.epoch += 1

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
        with self._lock:
            self._check_open()
            try:
                places = self._places[which]
            except IndexError as error:
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
            found = self._records.read(places)
        if self._records.columns.is_mapping:
            return found
        return next(iter(found.values()))

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
        self._check_open()
        return agreed(what, self._comm, check)

    # -- state and end -----------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return what a run needs to come to this epoch again from the same samples."""
        return {"epoch": self.epoch, "seed": self.seed, "fraction": self.fraction}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Repeat exchanges up to the epoch of a state; collective.

        The object has the samples that the first one had, on as many ranks. Bytes:
        those of each exchange. To send nothing, pass the saved ``samples`` and
        ``epoch`` when the object is made.

        Raises UsageError on all ranks for a state of other arguments, or of an epoch
        that is over.
        """

        def check() -> tuple[int, int, list[str]]:
            own = self.state_dict()
            if not isinstance(state, Mapping) or {*state} != {*own}:
                raise UsageError(
                    f"PartialShuffle.load_state_dict: {shown(state)} is no state; "
                    f"expected what state_dict() returns, with {', '.join(own)}"
                )
            for name in ("seed", "fraction"):
                if state[name] != own[name]:
                    raise UsageError(
                        f"PartialShuffle.load_state_dict: the state has {name} "
                        f"{shown(state[name])}, and this object {own[name]}; make the "
                        f"object with the state's"
                    )
            wanted = state["epoch"]
            if not isinstance(wanted, int) or wanted < self.epoch:
                raise UsageError(
                    f"PartialShuffle.load_state_dict: the state is of epoch "
                    f"{shown(wanted)}, and this object is in epoch {self.epoch}, from "
                    f"which none leads back; load it into a new object"
                )
            return wanted, 0, [f"a state of epoch {wanted}"]

        what = "PartialShuffle.load_state_dict"
        wanted, _ = self.compare(what, check)
        while self.epoch < wanted:
            self.next_epoch()

    def close(self) -> None:
        """Wait for an exchange under way, and release the communicator.

        All ranks call it. A second call does nothing.
        """
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            exchange, self._exchange = self._exchange, None
            if exchange is not None and exchange.request is not None:
                exchange.request.wait()
            self._comm.free()

    def __enter__(self) -> PartialShuffle:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # After an error other ranks may not come to the end of an exchange.
        if error is None:
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
