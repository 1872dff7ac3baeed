# SPDX-License-Identifier: Apache-2.0
"""Batches of samples that ranks shuffle: as many on all ranks, and the next one ready.

Ranks may have different numbers of samples. They take equally many steps all the same,
since each rank spreads its samples over the steps. A step's samples of all ranks are
known to each rank, so gradients can be weighted by true numbers.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from commrt.errors import UsageError, shown
from commrt.layers.samples.draws import Ints
from commrt.layers.samples.shuffle import PartialShuffle

__all__ = ["Batch", "BatchLoader"]

_BLOCK_NBYTES = 1 << 18
"""Read at once, if batches are smaller: many small reads, and many handings over from
a thread, take longer than the copies themselves."""


class Batch(NamedTuple):
    """Samples of one step."""

    samples: Any
    """In the form that the shuffle has them: an array, a tensor, or a dict of these."""
    num_samples: int
    """Of this rank; it may be 0."""
    total: int
    """Samples of all ranks in this step, at least 1."""
    step: int
    """Number of the step in its epoch, from 0."""


class BatchLoader:
    """Batches of each epoch of a shuffle.

        loader = BatchLoader(shuffle, batch_size=32)
        for epoch in range(10):
            for batch in loader:
                loss = losses_of(batch.samples).sum() / batch.total
                ...                      # and gradients are summed over all ranks

    Each iteration is an epoch: it begins with ``shuffle.next_epoch()``. All ranks take
    the same number of steps. While a program uses a batch, a thread reads the next one,
    and samples of the next epoch travel. The loader reads small batches together, up to
    256 KiB. Batches share no samples, so a program may change each in place. Arrays of
    numpy are then views of the array that was read; tensors are no views.

    With ``drop_last=False`` there are ceil(n / batch_size) steps, for the n samples of
    the rank that has most. A rank with m samples has those from step * m // steps on in
    a step. So its batches differ by one sample at most, none is larger than
    ``batch_size``, and a rank with few samples has empty ones. With ``drop_last=True``
    all batches have ``batch_size`` samples. There are n // batch_size steps, for the
    rank that has least, and the rest of the samples waits for another epoch.

    Gradients that equal those of one process: divide the sum of a batch's losses by
    ``batch.total``, and sum gradients over ranks. Where they are averaged, as by
    torch's DDP, multiply by the number of ranks, too.

    Args:
        shuffle: of all ranks; it stays the caller's.
        batch_size: samples of a batch of each rank, at most.
        drop_last: see above.
        overlap_steps: the last steps of an epoch beside which the samples of the next
            one travel; None: all steps; 0: they travel between epochs.
        num_epochs: after this epoch none is prepared, counted as ``shuffle.epoch`` is;
            None: one always is.
        prefetch: False: no thread; batches are read when they are asked for.

    Collective when it is made: an ``allgather`` of 24 bytes for each rank. Raises
    UsageError on all ranks for wrong arguments, and for arguments that differ.

    Where a rank cannot read a batch, for want of memory, it raises the error and
    revokes the shuffle. The others hear of it when they next exchange samples. A
    collective of the program's own, as for gradients, waits for that rank until then.
    """

    def __init__(
        self,
        shuffle: PartialShuffle,
        batch_size: int,
        *,
        drop_last: bool = False,
        overlap_steps: int | None = None,
        num_epochs: int | None = None,
        prefetch: bool = True,
    ) -> None:
        if not isinstance(shuffle, PartialShuffle):
            raise UsageError(
                f"BatchLoader: shuffle={shown(shuffle)}; expected a PartialShuffle"
            )

        def check() -> tuple[Ints, int, list[str]]:
            _check_count("batch_size", batch_size, 1)
            for name, value in (
                ("overlap_steps", overlap_steps),
                ("num_epochs", num_epochs),
            ):
                if value is not None:
                    _check_count(name, value, 0)
            texts = [f"batch_size={batch_size}", f"drop_last={bool(drop_last)}"]
            texts += [f"overlap_steps={overlap_steps}", f"num_epochs={num_epochs}"]
            return _totals(shuffle.counts, batch_size, drop_last), 0, texts

        self._totals, _ = shuffle.compare("BatchLoader", check)
        self.shuffle = shuffle
        self.batch_size, self.drop_last = batch_size, bool(drop_last)
        self.num_steps = len(self._totals)
        nbytes = batch_size * shuffle.sample_nbytes
        self._block_steps = max(1, _BLOCK_NBYTES // max(1, nbytes))
        beside = self.num_steps if overlap_steps is None else overlap_steps
        self._start_step = max(0, self.num_steps - beside)
        self._num_epochs = num_epochs
        self._prefetch = prefetch
        self._next_step = self.num_steps
        """Of the epoch ``_epoch``; ``num_steps``: the next one begins a new epoch."""
        self._epoch = shuffle.epoch
        self._resumes = False
        self._iteration: object = None
        """Stands for the iteration that goes on; another one takes its place."""

    def __len__(self) -> int:
        """Return the number of steps of an epoch, the same on all ranks."""
        return self.num_steps

    def __iter__(self) -> Iterator[Batch]:
        """Begin the next epoch, and yield its batches; collective.

        After ``load_state_dict`` it yields the rest of the state's epoch, unless
        another call has ended that epoch meanwhile.
        """
        shuffle = self.shuffle
        first, resumes = self._place(), self._resumes
        if not resumes or first == self.num_steps:
            shuffle.next_epoch()
            first = 0
        self._resumes = False
        self._next_step, self._epoch = first, shuffle.epoch
        epoch = shuffle.epoch
        self._iteration = iteration = object()
        prepares = self._num_epochs is None or epoch < self._num_epochs
        with self._blocks(first) as blocks:
            for batch in itertools.chain.from_iterable(self._or_revoked(blocks)):
                if prepares and batch.step >= self._start_step:
                    shuffle.start_next_epoch()
                self._next_step = batch.step + 1
                yield batch
                if shuffle.epoch != epoch:
                    raise UsageError(
                        f"BatchLoader: the shuffle went from epoch {epoch} to "
                        f"{shuffle.epoch} while batches of the first were used; end an "
                        f"iteration before another one begins"
                    )
                if self._iteration is not iteration:
                    raise UsageError(
                        "BatchLoader: another iteration began, or a state was loaded, "
                        "while batches of this one were used; end it before that"
                    )
                shuffle.poll()

    def _place(self) -> int:
        """Return the next step of the shuffle's epoch; ``num_steps``: there is none."""
        return self._next_step if self._epoch == self.shuffle.epoch else self.num_steps

    def _or_revoked(self, blocks: Iterator[list[Batch]]) -> Iterator[list[Batch]]:
        """Pass blocks on; where one cannot be read, tell the other ranks."""
        try:
            yield from blocks
        except Exception as error:
            self.shuffle.revoke(f"no batch could be read ({type(error).__name__})")
            raise

    @contextmanager
    def _blocks(self, first: int) -> Iterator[Iterator[list[Batch]]]:
        """Give the batches from a step on, as they are read: some at once."""
        steps = range(first, self.num_steps, self._block_steps)
        if not self._prefetch or not steps:
            yield map(self._read, steps)
            return
        thread, waits = ThreadPoolExecutor(1, "commrt-batches"), True
        try:
            yield self._read_ahead(thread, steps)
        except GeneratorExit:
            # The garbage collector may end an iteration anywhere: in the thread itself,
            # or within the shuffle, whose lock the thread waits for.
            waits = False
            raise
        finally:
            thread.shutdown(wait=waits, cancel_futures=True)

    def _read_ahead(
        self, thread: ThreadPoolExecutor, steps: range
    ) -> Iterator[list[Batch]]:
        coming = thread.submit(self._read, steps[0])
        for step in steps[1:]:
            block = coming.result()
            coming = thread.submit(self._read, step)
            yield block
        yield coming.result()

    def _read(self, first: int) -> list[Batch]:
        """Return the batches of a block, which begins with a step."""
        last = min(first + self._block_steps, self.num_steps)
        begin = self._cut(first)
        ends = [self._cut(step) - begin for step in range(first + 1, last + 1)]
        parts = self.shuffle.read_parts(slice(begin, begin + ends[-1]), ends)
        totals = self._totals[first:last].tolist()
        batches, low = [], 0
        for place, (some, high) in enumerate(zip(parts, ends, strict=True)):
            batches.append(Batch(some, high - low, totals[place], first + place))
            low = high
        return batches

    def _cut(self, step: int) -> int:
        """Return the first sample of a step, among this rank's."""
        if self.drop_last:
            return step * self.batch_size
        return step * len(self.shuffle) // self.num_steps

    def state_dict(self) -> dict[str, Any]:
        """Return what a run needs to go on with the batch after the last one.

        It has the state of the ``shuffle``, and all that decides which batches follow:
        the ``batch_size``, ``drop_last``, the number of steps in an epoch
        (``num_steps``), and the next ``step`` of the shuffle's epoch. That is
        ``num_steps`` where the next iteration begins a new epoch.
        """
        return {
            "shuffle": self.shuffle.state_dict(),
            "step": self._place(),
            "num_steps": self.num_steps,
            "batch_size": self.batch_size,
            "drop_last": self.drop_last,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to the place of a state; collective, and repeats the shuffle's exchanges.

        The next iteration yields what is left of that epoch, or the next epoch where
        nothing is left. Bytes: two ``allgather`` of 24 for each rank, and those of the
        exchanges. Raises UsageError on all ranks for a state that does not fit.
        """

        def check() -> tuple[int, int, list[str]]:
            own = self.state_dict()
            if not isinstance(state, Mapping) or {*state} != {*own}:
                raise UsageError(
                    f"BatchLoader.load_state_dict: {shown(state)} is no state; "
                    f"expected what state_dict() returns, with {', '.join(own)}"
                )
            for name in ("batch_size", "drop_last", "num_steps"):
                if state[name] != own[name]:
                    raise UsageError(
                        f"BatchLoader.load_state_dict: the state has {name} "
                        f"{shown(state[name])}, and this loader {own[name]}; use the "
                        f"same samples and the state's settings"
                    )
            step = state["step"]
            is_integer = isinstance(step, int) and not isinstance(step, bool)
            if not is_integer or not 0 <= step <= self.num_steps:
                raise UsageError(
                    f"BatchLoader.load_state_dict: the state has step {shown(step)}; "
                    f"expected 0 to {self.num_steps}"
                )
            return step, 0, [f"a state of step {step}"]

        step, _ = self.shuffle.compare("BatchLoader.load_state_dict", check)
        self.shuffle.load_state_dict(state["shuffle"])
        self._next_step, self._epoch = step, self.shuffle.epoch
        self._resumes = True
        self._iteration = None


def _totals(counts: Sequence[int], batch_size: int, drop_last: bool) -> Ints:
    """Return the samples of all ranks in each step of an epoch."""
    if drop_last:
        return np.full(min(counts) // batch_size, batch_size * len(counts), np.int64)
    num_steps = -(-max(counts) // batch_size)
    steps, firsts = np.arange(num_steps + 1), np.zeros(num_steps + 1, np.int64)
    for count, num_ranks in Counter(counts).items():
        # step * count itself may need more than 64 bits.
        whole, rest = divmod(count, max(1, num_steps))
        firsts += num_ranks * (whole * steps + rest * steps // max(1, num_steps))
    return np.diff(firsts)


def _check_count(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UsageError(
            f"BatchLoader: {name}={shown(value)}; expected an integer from {least}"
        )
