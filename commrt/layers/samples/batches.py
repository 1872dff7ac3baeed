# SPDX-License-Identifier: Apache-2.0
"""Batches of samples that ranks shuffle: as many on all ranks, and the next one ready.

Ranks may have different numbers of samples. They take equally many steps all the same,
since each rank spreads its samples over the steps. A step's samples of all ranks are
known to each rank, so gradients can be weighted by true numbers.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple

from commrt.errors import UsageError, shown
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
    and samples of the next epoch travel. Small batches are read several at once, up to
    256 KiB, and are then parts of the same arrays, each with memory of its own.

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

        def check() -> tuple[int, int, list[str]]:
            _check_count("batch_size", batch_size, 1)
            for name, value in (
                ("overlap_steps", overlap_steps),
                ("num_epochs", num_epochs),
            ):
                if value is not None:
                    _check_count(name, value, 0)
            texts = [f"batch_size={batch_size}", f"drop_last={bool(drop_last)}"]
            texts += [f"overlap_steps={overlap_steps}", f"num_epochs={num_epochs}"]
            return batch_size, 0, texts

        shuffle.compare("BatchLoader", check)
        self.shuffle = shuffle
        if drop_last:
            self.num_steps = min(shuffle.counts) // batch_size
        else:
            self.num_steps = -(-max(shuffle.counts) // batch_size)
        self._size = batch_size if drop_last else None
        nbytes = batch_size * shuffle.sample_nbytes
        self._block_steps = max(1, _BLOCK_NBYTES // max(1, nbytes))
        beside = self.num_steps if overlap_steps is None else overlap_steps
        self._start_step = max(0, self.num_steps - beside)
        self._num_epochs = num_epochs
        self._prefetch = prefetch
        self._next_step = 0
        self._resumes = False

    def __len__(self) -> int:
        """Return the number of steps of an epoch, the same on all ranks."""
        return self.num_steps

    def __iter__(self) -> Iterator[Batch]:
        """Begin the next epoch, and yield its batches; collective.

        After ``load_state_dict`` it yields the rest of the state's epoch.
        """
        shuffle = self.shuffle
        first, self._resumes = (self._next_step if self._resumes else 0), False
        if first == 0:
            shuffle.next_epoch()
        self._next_step = first
        epoch = shuffle.epoch
        prepares = self._num_epochs is None or epoch < self._num_epochs
        with self._blocks(first) as blocks:
            for batch in itertools.chain.from_iterable(blocks):
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
                shuffle.poll()

    @contextmanager
    def _blocks(self, first: int) -> Iterator[Iterator[list[Batch]]]:
        """Give the batches from a step on, as they are read: some at once."""
        steps = range(first, self.num_steps, self._block_steps)
        if not self._prefetch or not steps:
            yield map(self._read, steps)
            return
        with ThreadPoolExecutor(1, "commrt-batches") as thread:
            yield self._read_ahead(thread, steps)

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
        counts = self.shuffle.counts
        own = counts[self.shuffle.rank]
        last = min(first + self._block_steps, self.num_steps)
        begin = self._cut(own, first)
        samples = self.shuffle.read(slice(begin, self._cut(own, last)))
        batches, low = [], 0
        totals = [
            sum(self._cut(n, step) for n in counts) for step in range(first, last + 1)
        ]
        for step in range(first, last):
            high = self._cut(own, step + 1) - begin
            if isinstance(samples, dict):
                some: Any = {name: each[low:high] for name, each in samples.items()}
            else:
                some = samples[low:high]
            place = step - first
            total = totals[place + 1] - totals[place]
            batches.append(Batch(some, high - low, total, step))
            low = high
        return batches

    def _cut(self, num_samples: int, step: int) -> int:
        """Return the first sample of a step, of a rank with so many."""
        if self._size is not None:
            return step * self._size
        return step * num_samples // self.num_steps

    def state_dict(self) -> dict[str, Any]:
        """Return what a run needs to go on with the batch after the last one."""
        return {
            "shuffle": self.shuffle.state_dict(),
            "step": self._next_step,
            "num_steps": self.num_steps,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to the place of a state; collective, and repeats the shuffle's exchanges.

        The next iteration yields what is left of that epoch, or the next epoch where
        nothing is left. Raises UsageError on all ranks for a state that does not fit.
        """

        def check() -> tuple[int, int, list[str]]:
            own = self.state_dict()
            if not isinstance(state, Mapping) or {*state} != {*own}:
                raise UsageError(
                    f"BatchLoader.load_state_dict: {shown(state)} is no state; "
                    f"expected what state_dict() returns, with {', '.join(own)}"
                )
            if state["num_steps"] != self.num_steps:
                raise UsageError(
                    f"BatchLoader.load_state_dict: the state has {state['num_steps']} "
                    f"steps in an epoch, and this loader {self.num_steps}; use the "
                    f"same samples and batch_size"
                )
            step = state["step"]
            if not isinstance(step, int) or not 0 <= step <= self.num_steps:
                raise UsageError(
                    f"BatchLoader.load_state_dict: the state has step {shown(step)}; "
                    f"expected 0 to {self.num_steps}"
                )
            return step, 0, [f"a state of step {step}"]

        step, _ = self.shuffle.compare("BatchLoader.load_state_dict", check)
        self.shuffle.load_state_dict(state["shuffle"])
        self._next_step = step
        self._resumes = 0 < step < self.num_steps


def _check_count(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UsageError(
            f"BatchLoader: {name}={shown(value)}; expected an integer from {least}"
        )
