# SPDX-License-Identifier: Apache-2.0
"""A pipeline without a schedule: each rank does what has come, gradients first.

Singh and Bhatele 2022, "AxoNN: An asynchronous, message-driven parallel framework for
extreme-scale deep learning", arXiv 2110.13005, section III.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import nn

from commrt.comm import Communicator
from commrt.errors import CommError, UsageError, shown
from commrt.layers.pipeline.agreement import Numbers, gathered, meet, raise_told
from commrt.layers.pipeline.flow import Flow, Judge, Signatures, ToldError
from commrt.layers.pipeline.gradients import (
    GradientSums,
    KeptGradients,
    broadcast_from_first,
)
from commrt.layers.pipeline.lanes import Alarm, Links
from commrt.layers.pipeline.microbatches import (
    MicroBatches,
    facts_of_replica,
    facts_of_stage,
    listed,
)
from commrt.layers.pipeline.settings import (
    REDUCTIONS,
    check,
    check_alike,
    device_of,
)
from commrt.layers.process_grid import ProcessGrid
from commrt.vocabulary.checks import as_integer

__all__ = ["MessageDrivenPipeline"]

Tensor: TypeAlias = torch.Tensor
LossFn: TypeAlias = Callable[[Any, Any], Tensor]

_CLASS = "MessageDrivenPipeline"
_AXES = ("pipe", "data")
_TRAIN, _EVALUATE, _PREDICT = range(3)
_NAMES = ("step", "evaluate", "predict")
_MOST_KNOWN = 32
"""Kinds of steps whose messages a rank remembers."""


class _Start(NamedTuple):
    """Numbers that a rank tells the others before a step; each is one int64."""

    mode: int
    num_inputs: int
    """Micro-batches that it was given; -1: none were."""
    num_targets: int
    num_samples: int
    """Samples of all micro-batches on first ranks; 0 on others."""
    input_facts: int
    stage_facts: int


class _End(NamedTuple):
    """Numbers that a rank tells the others after a step."""

    has_error: int
    loss: int
    """Bits of a float."""
    seconds: int
    """Bits of a float."""
    has_summed: int
    """1 once sums over replicas are under way."""


class MessageDrivenPipeline:
    """A model whose stages lie on different ranks, and that trains in micro-batches.

        stage = split(model, placement.ranges, comm.rank)
        pipeline = MessageDrivenPipeline(stage, comm, nn.CrossEntropyLoss())
        optimizer = torch.optim.Adam(stage.parameters())
        for x, target in batches:
            optimizer.zero_grad()
            loss = pipeline.step(x.split(8), target.split(8))
            optimizer.step()

    Each rank runs its stage on what has come from its neighbours, gradients before
    activations. No schedule is fixed, so a rank waits only while nothing is there, also
    where stages take unequal time. Loss and gradients are those of one process, and
    have the same bits in each run: each rank adds gradients in the order of
    micro-batches.

    Args:
        stage: this rank's part of the model. It takes the tensors that the stage before
            returns, one argument for each, and returns a tensor or a tuple of them. It
            must not change a tensor after it has returned it.
        comm: the ranks, stage by stage; or a ``ProcessGrid`` with the axes "pipe" and
            "data". Ranks along "data" have the same stage, which starts with the values
            of the first of them, and other micro-batches; gradients are summed.
        loss_fn: ``loss_fn(output, target)`` returns a tensor with one number, for the
            output of a micro-batch. Other ranks than those of the last stage may pass
            None.
        reduction: "mean": ``loss_fn`` returns a mean over samples, and the loss of a
            step is the mean over the samples of all micro-batches and replicas; the
            first dimension of a micro-batch's first tensor counts them. "sum": losses
            are added up.
        in_flight: micro-batches that a rank may have begun and not ended, which bounds
            the memory for activations; None: twice as many as stages. As many as stages
            need the memory of 1F1B, and let ranks wait for gradients.
        fixed_shapes: True: ranks tell each other types and shapes in the first step,
            and remember them for inputs alike and modules in the same mode. False: in
            each step, for stages whose shapes depend on values.
        device: where this stage's tensors are. None: where its parameters and buffers
            are; a stage without any is on the host then.

    Collective. Raises UsageError on a rank whose arguments are wrong, and RefusedError
    on the others.

    Pattern of a step on p ranks, for a pipeline of s stages and m micro-batches:

    - an ``allgather`` of 56 p bytes before it, 80 p after it, and with "mean" a message
      of 8 m bytes from the first stage to the last;
    - at each boundary a message of each micro-batch's tensors, and one back of the
      gradients. Of several tensors, or empty ones, it has a byte more for each
      gradient; those that are None are left out;
    - the first step of a kind: a message of shapes for each of those forward, 8 bytes
      for each number: one, and for each tensor two and its number of dimensions;
    - over "data": an ``allreduce`` of the stage's gradients, and of an element for each
      parameter, in parts of about 32 MiB. It is under way while stages before this one
      drain.
    """

    def __init__(
        self,
        stage: nn.Module,
        comm: Communicator | ProcessGrid,
        loss_fn: LossFn | None,
        *,
        reduction: str = "mean",
        in_flight: int | None = None,
        fixed_shapes: bool = True,
        device: torch.device | str | None = None,
    ) -> None:
        if isinstance(comm, ProcessGrid):
            ranks, given = _columns(comm), comm.comm
        elif isinstance(comm, Communicator):
            ranks, given = [[*range(comm.size)]], comm
        else:
            raise UsageError(
                f"{_CLASS}: comm={shown(comm)} must be a communicator, as "
                f"commrt.init() returns it, or a ProcessGrid"
            )
        column = next(each for each in ranks if given.rank in each)
        self._stage_number = column.index(given.rank)
        limit = 2 * len(column) if in_flight is None else as_integer(in_flight)
        error: Exception | None = None
        settings: list[int] = [0, 0, 0, 0]
        own_device = torch.device("cpu")
        try:
            is_last = given.rank == column[-1]
            check(stage, loss_fn, is_last, reduction, limit, in_flight, fixed_shapes)
            own_device = device_of(stage, device)
            facts = facts_of_replica(stage, own_device) if len(ranks) > 1 else 0
            assert limit is not None  # it has been checked
            settings = [REDUCTIONS.index(reduction), limit, int(fixed_shapes), facts]
        except Exception as wrong:  # noqa: BLE001  the other ranks must hear of it
            error = wrong
        every = meet(given, _CLASS, error, settings)
        check_alike(every, ranks)
        self._stage, self._loss_fn = stage, loss_fn
        self._reduction, self._in_flight = reduction, settings[1]
        self._fixed_shapes = bool(fixed_shapes)
        self._ranks, self._column = ranks, column
        self._known: dict[tuple[int, ...], Signatures] = {}
        self._seconds: tuple[float, ...] | None = None
        self._most_in_flight = 0
        self._is_broken = False
        self._data: Communicator | None = None
        self._comm = given.dup(name=f"{given.name}.pipeline")
        self._links = Links(self._comm, column, self._stage_number, own_device)
        try:
            if isinstance(comm, ProcessGrid) and len(ranks) > 1:
                self._data = comm["data"].dup()
                error = broadcast_from_first(self._data, stage)
                meet(self._comm, _CLASS, error, ())
        except BaseException:
            self.free()
            raise

    # -- facts -------------------------------------------------------------------------

    @property
    def stage_number(self) -> int:
        """The number of this rank's stage."""
        return self._stage_number

    @property
    def num_stages(self) -> int:
        """Stages of the pipeline."""
        return len(self._column)

    @property
    def stage_seconds(self) -> tuple[float, ...] | None:
        """Seconds of computing that each stage took for a micro-batch in the last step.

        The same on all ranks; of several replicas the slowest. None before a step. It
        is what ``Shisha.observe`` takes. Times are the host's: of a device, what its
        calls took.
        """
        return self._seconds

    @property
    def most_in_flight(self) -> int:
        """Micro-batches that this rank has had in flight at once in the last step."""
        return self._most_in_flight

    # -- steps -------------------------------------------------------------------------

    def step(self, microbatches: Any = None, targets: Any = None) -> float:
        """Run micro-batches forward and back; return the loss, the same on all ranks.

        Args:
            microbatches: a list of tensors or tuples of tensors, which are arguments of
                the first stage. Ranks of other stages may pass None.
            targets: a list with one for each micro-batch, for ``loss_fn``. Ranks of
                other stages than the last may pass None.

        Collective. Gradients are added to those of before. Replicas may have other
        numbers and sizes of micro-batches, also none.

        A step adds gradients on all ranks or on none. Where one rank raises an error,
        such as its stage's, the others stop and raise RefusedError with its name and
        text, and the call may be made again. Buffers that stages change in a forward
        pass stay changed. Raises UsageError on all ranks where micro-batches and
        targets do not fit.
        """
        loss, _ = self._run(_TRAIN, microbatches, targets)
        return loss

    def evaluate(self, microbatches: Any = None, targets: Any = None) -> float:
        """Return the loss of micro-batches without gradients; as ``step`` else.

        It leaves modules in their mode: call ``stage.eval()`` before.
        """
        loss, _ = self._run(_EVALUATE, microbatches, targets)
        return loss

    def predict(self, microbatches: Any = None) -> list[Any] | None:
        """Return the outputs of micro-batches on the last stage, None on the others.

        Collective; without gradients.
        """
        _, outputs = self._run(_PREDICT, microbatches, None)
        return outputs if self._links.is_last else None

    def _run(
        self, mode: int, microbatches: Any, targets: Any
    ) -> tuple[float, list[Any]]:
        what = f"{_CLASS}.{_NAMES[mode]}"
        if self._is_broken:
            raise UsageError(
                f"{what}: an earlier call was interrupted, or lost its peers; make "
                f"another pipeline"
            )
        self._is_broken = True  # unless what follows ends on all ranks together
        error: Exception | None = None
        batches, wanted = MicroBatches(()), None
        start = _Start(mode, -1, -1, 0, 0, 0)
        try:
            if torch.is_inference_mode_enabled() and mode == _TRAIN:
                raise UsageError(f"{what}: torch.inference_mode() allows no gradients")
            batches, wanted, start = self._started(what, mode, microbatches, targets)
        except Exception as wrong:  # noqa: BLE001  the other ranks must hear of it
            error = wrong
        try:
            every = meet(self._comm, what, error, start)
            starts = [_Start(*row) for row in every.tolist()]
            self._check_fit(what, mode, starts)
        except Exception:
            self._is_broken = False  # all ranks know, and nothing has begun
            raise
        parameters = [
            each
            for each in (self._stage.parameters() if mode == _TRAIN else ())
            if each.requires_grad
        ]
        kept = KeptGradients(parameters)
        try:
            found = self._flowed(what, mode, batches, wanted, starts, parameters)
        except BaseException:
            kept.restore()
            raise
        kept.add()
        return found

    def _started(
        self, what: str, mode: int, microbatches: Any, targets: Any
    ) -> tuple[MicroBatches, Sequence[Any] | None, _Start]:
        """Check what this rank was given; local."""
        links = self._links
        batches, num_inputs, num_targets, num_samples, facts = (
            *(MicroBatches(()), -1, -1),
            *(0, 0),
        )
        if links.is_first:
            batches = MicroBatches.of(what, microbatches)
            num_inputs = len(batches.inputs)
            num_samples, facts = int(batches.sizes().sum()), batches.facts()
        elif microbatches is not None:
            num_inputs = len(listed(what, "microbatches", microbatches))
        wanted = None
        if mode != _PREDICT and (links.is_last or targets is not None):
            wanted = listed(what, "targets", targets)
            num_targets = len(wanted)
        stage_facts = facts_of_stage(self._stage, links.device)
        numbers = num_inputs, num_targets, num_samples, facts, stage_facts
        return batches, wanted, _Start(mode, *numbers)

    def _check_fit(self, what: str, mode: int, starts: Sequence[_Start]) -> None:
        """Raise UsageError, on all ranks, where calls do not fit."""
        for rank, each in enumerate(starts):
            if each.mode != mode:
                raise UsageError(
                    f"{what}: rank {rank} calls {_NAMES[each.mode]}, and rank "
                    f"{self._comm.rank} {_NAMES[mode]}; call the same on all ranks"
                )
        for column in self._ranks:
            count = starts[column[0]].num_inputs
            for rank in column:
                for name, number in (
                    ("micro-batches", starts[rank].num_inputs),
                    ("targets", starts[rank].num_targets),
                ):
                    if number not in (-1, count):
                        raise UsageError(
                            f"{what}: rank {rank} has {number} {name}, and rank "
                            f"{column[0]} {count} micro-batches; pass as many on all "
                            f"ranks of a pipeline"
                        )
        for stage in range(self.num_stages):
            ranks = [column[stage] for column in self._ranks]
            for rank in ranks:
                if starts[rank].stage_facts != starts[ranks[0]].stage_facts:
                    raise UsageError(
                        f"{what}: stage {stage} of rank {rank} differs from that of "
                        f"rank {ranks[0]}; replicas must have the same parameters, "
                        f"frozen ones and modes"
                    )

    def _flowed(
        self,
        what: str,
        mode: int,
        batches: MicroBatches,
        targets: Sequence[Any] | None,
        starts: Sequence[_Start],
        parameters: Sequence[Tensor],
    ) -> tuple[float, list[Any]]:
        """Run a step whose arguments fit; return loss and outputs."""
        links, column = self._links, self._column
        count = starts[column[0]].num_inputs
        key = (
            *(mode, starts[column[0]].input_facts),
            *(starts[rank].stage_facts for rank in column),
        )
        known = self._known.get(key) if self._fixed_shapes else None
        judge = self._judge(mode, batches, targets, starts)
        alarm = Alarm(self._comm)
        flow = Flow(
            *(self._stage, links, alarm),
            inputs=batches.inputs,
            count=count,
            judge=judge,
            in_flight=self._in_flight,
            is_training=mode == _TRAIN,
            known=known,
        )
        sums = None
        if self._data is not None and mode == _TRAIN:
            sums = GradientSums(self._data, parameters)
        error: Exception | None = None
        warned: list[Any] = []
        try:
            flow.run()
            if sums is not None:
                sums.check()
                sums.start()
        except ToldError:
            pass
        except Exception as wrong:  # noqa: BLE001  the other ranks must hear of it
            error = wrong
        loss, seconds = sum(flow.losses), flow.seconds / max(count, 1)
        self._most_in_flight = flow.most_in_flight
        try:
            if error is not None:
                warned = alarm.raise_it()
            said = _End(
                *(int(error is not None), _bits(loss), _bits(seconds)),
                int(sums is not None and sums.is_started),
            )
            every = gathered(self._comm, [*said, *links.counts])
        except CommError as lost:
            if error is not None:
                raise error from lost
            raise
        wrong_ranks = np.flatnonzero(every[:, 0]).tolist()
        if wrong_ranks:
            self._clear_away(every, wrong_ranks, alarm, warned, sums)
            self._is_broken = False
            raise_told(self._comm, what, error, wrong_ranks[0])
        links.finish()
        if sums is not None:
            sums.take()
        if self._fixed_shapes and known is None:
            while len(self._known) >= _MOST_KNOWN:
                del self._known[next(iter(self._known))]
            self._known[key] = flow.signatures
        self._is_broken = False
        self._seconds = tuple(
            max(_float(every[column[stage], 2]) for column in self._ranks)
            for stage in range(self.num_stages)
        )
        total = sum(_float(every[column[-1], 1]) for column in self._ranks)
        return float(total), flow.outputs

    def _judge(
        self,
        mode: int,
        batches: MicroBatches,
        targets: Sequence[Any] | None,
        starts: Sequence[_Start],
    ) -> Judge | None:
        """Return what becomes of outputs, on the last stage; sends sizes there."""
        links = self._links
        if mode == _PREDICT:
            return Judge(None, (), ()) if links.is_last else None
        count = starts[self._column[0]].num_inputs
        weights = [1.0] * count
        if self._reduction == "mean":
            own = batches.sizes() if links.is_first else None
            total = sum(starts[column[0]].num_samples for column in self._ranks)
            sizes = links.sizes(own, count).tolist()
            weights = [size / max(total, 1) for size in sizes]
        if not links.is_last:
            return None
        assert targets is not None  # it has been checked
        return Judge(self._loss_fn, targets, weights)

    def _clear_away(
        self,
        every: Numbers,
        wrong_ranks: Sequence[int],
        alarm: Alarm,
        warned: Sequence[Any],
        sums: GradientSums | None,
    ) -> None:
        """End all that a failed step has under way; collective."""
        taken = alarm.taken()
        for rank in wrong_ranks:
            if rank != self._comm.rank and rank not in taken:
                alarm.take_from(rank)
        self._links.clear_away(every[:, len(_End._fields) :])
        for request in warned:
            request.wait()
        if sums is not None:
            # Replicas that have come so far wait for the others.
            mates = [each[self._stage_number] for each in self._ranks]
            if not sums.is_started and any(every[rank, 3] for rank in mates):
                sums.start()
            if sums.is_started:
                sums.wait()

    # -- the end -----------------------------------------------------------------------

    def free(self) -> None:
        """Release the communicators of the pipeline; local, idempotent."""
        if self._data is not None:
            self._data.free()
        self._comm.free()

    def __enter__(self) -> MessageDrivenPipeline:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self.free()

    def __repr__(self) -> str:
        replicas = f", {len(self._ranks)} replicas" if len(self._ranks) > 1 else ""
        return (
            f"<MessageDrivenPipeline of {self.num_stages} stages{replicas}, stage "
            f"{self._stage_number}>"
        )


def _columns(grid: ProcessGrid) -> list[list[int]]:
    """Return the ranks of each pipeline of a grid, stage by stage."""
    if "pipe" not in grid.axes or not {*grid.axes} <= {*_AXES}:
        raise UsageError(
            f"{_CLASS}: a grid with the axes {', '.join(grid.axes)}; expected "
            f'"pipe", and "data" if you like'
        )
    places = np.arange(grid.num_ranks).reshape([*grid.shape.values()])
    if grid.axes[0] == "pipe" and len(grid.axes) > 1:
        places = places.T
    found: list[list[int]] = places.reshape(-1, grid.size("pipe")).tolist()
    return found


def _bits(value: float) -> int:
    """Return the 64 bits of a float as an integer."""
    found: int = struct.unpack("<q", struct.pack("<d", value))[0]
    return found


def _float(bits: int) -> float:
    """Return the float that has these bits."""
    found: float = struct.unpack("<d", struct.pack("<q", int(bits)))[0]
    return found
