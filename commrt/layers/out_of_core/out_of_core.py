# SPDX-License-Identifier: Apache-2.0
"""A sequence of blocks whose saved tensors take a bounded part of memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import nn

from commrt.comm import Communicator
from commrt.errors import ClosedError, UsageError, shown
from commrt.layers.all_or_none import check_same, meet, number_of
from commrt.layers.out_of_core.costs import BlockCost, Link, Mode
from commrt.layers.out_of_core.far import FarMemory
from commrt.layers.out_of_core.gradient_sums import GradientSums
from commrt.layers.out_of_core.measuring import measure
from commrt.layers.out_of_core.near import NearMemory
from commrt.layers.out_of_core.passes import Pass
from commrt.layers.out_of_core.planner import Plan, plan
from commrt.layers.out_of_core.values import tensors_of

__all__ = ["OutOfCore", "Step"]

Tensor: TypeAlias = torch.Tensor

_MOST_EVENTS = 10_000


class Step(NamedTuple):
    """The last forward passes since ``zero_step``, and their backward passes."""

    events: tuple[tuple[str, int], ...]
    """What happened, in order, and to which block: ``forward``, ``store``,
    ``backward``, ``load``, ``recompute``, ``gradient``; at most 10,000."""
    stall_s: float
    """In which the computation waited for transfers or for memory."""
    stored_nbytes: int
    """Moved to far memory."""
    loaded_nbytes: int
    """Moved back."""
    peak_nbytes: int
    """Most bytes of saved tensors near."""


class OutOfCore(nn.Module):  # type: ignore[misc]  # torch is not looked into
    """Blocks of layers, trained with less memory than their saved tensors take.

        with FileFar("/tmp/far") as far:
            model = OutOfCore(nn.Sequential(*blocks), x, budget_bytes=1 << 30, far=far)
            loss = criterion(model(x), target)
            model.backward(loss)
            optimizer.step()
            model.close()

    Tensors that autograd saves between the forward and the backward pass are kept near,
    swapped to far memory, or recomputed, block by block, as ``plan`` decides from times
    and bytes that are measured here. Results have the bits of the plain sequence.
    Parameters, buffers and the program's input stay where they are and do not count;
    nor does what a block computes with and does not save.

    Args:
        blocks: modules, each a call with the output of the one before: a tensor, or a
            tuple of tensors. An ``nn.Sequential`` gives its own.
        sample: an input, as large as any that follows, which requires a gradient if
            these do. It is measured in the modules' present mode, ``train`` or
            ``eval``.
        budget_bytes: most bytes of saved tensors near; equal on all ranks.
        far: the far memory. It stays the caller's, to close after this object.
        comm: ranks that train the same model on data of their own; None: one process.
        policy: ``auto``, ``keep``, ``swap``, ``recompute``, or a mode for each block.
        bucket_nbytes: of the sums of gradients (``GradientReducer``).
        repeats: measured runs.

    With ``comm`` all ranks make it, call it with gradients enabled and call
    ``backward`` equally often. The plan follows from the slowest rank's times and the
    largest bytes. ``backward`` leaves the mean of all ranks' gradients; a sum starts
    when its gradients are there, while earlier blocks come back. Bytes: by
    ``allgather`` 88, and 72 for each block, when it is made; 8 in a forward pass and 8
    in a backward pass; and those of ``GradientReducer``.

    Raises UsageError on all ranks, before gradients are sent, for a budget that is
    smaller than a block needs alone, and for arguments that differ.
    """

    def __init__(
        self,
        blocks: nn.Sequential | Sequence[nn.Module],
        sample: Any,
        *,
        budget_bytes: int,
        far: FarMemory,
        comm: Communicator | None = None,
        policy: str | Sequence[Mode] = "auto",
        bucket_nbytes: int | None = None,
        repeats: int = 3,
    ) -> None:
        super().__init__()
        self._comm: Communicator | None = None
        self._sums: GradientSums | None = None
        self._is_closed = self._is_in_backward = False
        if comm is not None and comm.size > 1:
            self._comm = comm.dup(name=f"{comm.name}.out-of-core")
        try:
            made = _Arguments.of(
                *(blocks, sample, budget_bytes, far, repeats, bucket_nbytes),
                self._comm,
            )
            self.blocks = nn.ModuleList(made.modules)
            self._far = far
            costs, link = _agreed(self._comm, *made.measured())
            self._plan = self._planned(costs, budget_bytes, link, policy)
            self._start_sums(bucket_nbytes)
        except BaseException:
            self.close()
            raise
        self._near = NearMemory(budget_bytes, far)
        self._passes: list[Pass] = []
        self._events: list[tuple[str, int]] = []

    # -- passes ------------------------------------------------------------------

    def forward(self, value: Any) -> Any:
        """Return the last block's output; with gradients collective.

        Without gradients blocks are called one after the other, and nothing is saved
        or sent. An error of one rank is raised there, and a RefusedError on the others.
        """
        if self._is_closed:
            raise ClosedError("OutOfCore: closed; make another one")
        if not torch.is_grad_enabled():
            for block in self.blocks:
                value = block(value)
            return value
        made = Pass(
            *(list(self.blocks), self._plan, self._near),
            check=self._check_backward,
            record=self._record,
        )
        error: Exception | None = None
        output = None
        try:
            output = made.forward(value)
        except Exception as raised:  # noqa: BLE001 - the other ranks wait
            error = raised
        try:
            self._raise_on_all("OutOfCore.forward", error)
        except BaseException:
            made.abandon()
            raise
        self._passes = [each for each in self._passes if each.is_alive]
        self._passes.append(made)
        return output

    def backward(
        self, loss: Tensor, gradient: Tensor | None = None, *, sync: bool = True
    ) -> None:
        """Do the backward pass, and leave the means of gradients; collective.

        Args:
            loss: that follows from outputs of the forward pass.
            gradient: of the loss; None: it is a number, and the gradient 1.
            sync: False: gradients are added up on each rank, for the sums of a later
                call.

        With one process ``loss.backward()`` does the same. After an error the gradients
        of all ranks are of no use, and all saved tensors are released. An error of one
        rank is raised there, and a RefusedError on the others.
        """
        if self._is_closed:
            raise ClosedError("OutOfCore: closed; make another one")
        try:
            sums = self._sums if sync else None
            error = self._gone_backward(loss, gradient, sums)
            if sums is not None:
                error = sums.end(error)
            self._raise_on_all("OutOfCore.backward", error)
        except BaseException:
            self.abandon()
            raise

    def _gone_backward(
        self, loss: Tensor, gradient: Tensor | None, sums: GradientSums | None
    ) -> Exception | None:
        """Do this rank's backward pass; return its error."""
        self._is_in_backward = True
        try:
            if sums is not None:
                sums.begin(self.blocks.parameters())
            loss.backward(gradient)
        except Exception as raised:  # noqa: BLE001 - the other ranks wait
            self.abandon()
            return raised
        finally:
            self._is_in_backward = False
        return None

    def abandon(self) -> None:
        """Release the saved tensors of all forward passes, which end here."""
        for each in self._passes:
            each.abandon()
        self._passes.clear()

    # -- facts -------------------------------------------------------------------

    @property
    def plan(self) -> Plan:
        """The plan, equal on all ranks."""
        return self._plan

    @property
    def near_nbytes(self) -> int:
        """Bytes of saved tensors near now."""
        self._near.poll()
        return self._near.ledger.in_use

    @property
    def step(self) -> Step:
        """What happened since ``zero_step``."""
        near = self._near
        return Step(
            tuple(self._events),
            *(near.stall_s, near.stored_nbytes, near.loaded_nbytes),
            near.ledger.peak,
        )

    def zero_step(self) -> None:
        """Begin a new ``step``."""
        self._events.clear()
        self._near.restart()

    def close(self) -> None:
        """Release saved tensors, and free communicators; local, idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        for each in getattr(self, "_passes", []):
            each.abandon()
        try:
            if self._sums is not None:
                self._sums.close()
        finally:
            if self._comm is not None:
                self._comm.free()

    def __deepcopy__(self, memo: Any) -> OutOfCore:
        """Refuse: the copy would share saved tensors and communicators."""
        raise UsageError(
            "OutOfCore: no deepcopy; copy model.blocks, and make another one of them"
        )

    def extra_repr(self) -> str:
        """Return modes and budget, for ``print(model)``."""
        modes = ", ".join(self._plan.modes)
        return f"budget_bytes={self._plan.budget_bytes}, modes=({modes})"

    # -- parts -------------------------------------------------------------------

    def _raise_on_all(self, what: str, error: Exception | None) -> None:
        """Raise an error on all ranks if one has any; collective."""
        if self._comm is not None:
            meet(self._comm, what, error, ())
        elif error is not None:
            raise error

    def _check_backward(self) -> None:
        if self._is_closed:
            raise ClosedError("OutOfCore: closed, so its saved tensors are gone")
        if self._comm is not None and not self._is_in_backward:
            raise UsageError(
                "OutOfCore: loss.backward() knows nothing of other ranks; call "
                "backward(loss) of the OutOfCore"
            )

    def _planned(
        self,
        costs: Sequence[BlockCost],
        budget_bytes: int,
        link: Link,
        policy: str | Sequence[Mode],
    ) -> Plan:
        """Return the plan; raise UsageError on all ranks if one has none, or another.

        Policies are all that can differ.
        """
        made: Plan | None = None
        error: Exception | None = None
        try:
            made = plan(costs, budget_bytes, link, policy=policy)
        except Exception as raised:  # noqa: BLE001 - the other ranks wait
            error = raised
        if self._comm is not None:
            modes = None if made is None else made.modes
            numbers = meet(self._comm, "OutOfCore", error, [number_of(modes)])
            check_same("OutOfCore", numbers[:, 0].tolist(), "policies")
        if error is not None:
            raise error
        assert made is not None
        return made

    def _start_sums(self, bucket_nbytes: int | None) -> None:
        self._owners: dict[int, int] = {}
        if self._comm is None:
            return
        parameters = [x for x in self.blocks.parameters() if x.requires_grad]
        numbers = {id(x): number for number, x in enumerate(parameters)}
        for place, block in enumerate(self.blocks):
            for x in block.parameters():
                # Of blocks that share it, the first one adds to its gradient last.
                if id(x) in numbers:
                    self._owners.setdefault(numbers[id(x)], place)
        self._sums = GradientSums(
            self._comm,
            parameters,
            bucket_nbytes,
            lambda number: self._record("gradient", self._owners[number]),
        )

    def _record(self, what: str, block: int) -> None:
        if len(self._events) < _MOST_EVENTS:
            self._events.append((what, block))


class _Arguments(NamedTuple):
    """Checked arguments."""

    modules: list[nn.Module]
    sample: Any
    far: FarMemory
    repeats: int
    comm: Communicator | None

    @classmethod
    def of(
        cls,
        blocks: Any,
        sample: Any,
        budget_bytes: Any,
        far: Any,
        repeats: Any,
        bucket_nbytes: Any,
        comm: Communicator | None,
    ) -> _Arguments:
        """Return them; UsageError on all ranks if one refuses its own. Collective."""
        error: Exception | None = None
        modules: list[nn.Module] = []
        facts: list[Any] = []
        given = budget_bytes, bucket_nbytes
        try:
            modules = _modules_of(blocks)
            facts = _facts(modules)
            tensors_of(sample, "the sample")
            _check_number("budget_bytes", budget_bytes, 0)
            _check_number("repeats", repeats, 1)
            if bucket_nbytes is not None:
                _check_number("bucket_nbytes", bucket_nbytes, 1)
            if not isinstance(far, FarMemory):
                raise UsageError(
                    f"OutOfCore: far={shown(far)}: expected a FarMemory, such as "
                    f"FileFar, ThrottledCopy or PinnedMemory"
                )
        except Exception as raised:  # noqa: BLE001 - the other ranks wait
            error = raised
        if comm is not None:
            said = [len(modules), *(0 if error else each or 0 for each in given)]
            said.append(number_of(facts))
            every = meet(comm, "OutOfCore", error, said).T.tolist()
            for values, name in zip(every, _NAMES, strict=True):
                check_same("OutOfCore", values, name)
        elif error is not None:
            raise error
        return cls(modules, sample, far, repeats, comm)

    def measured(self) -> tuple[list[BlockCost], Link]:
        """Return costs and link of this rank; an error on all if one has one."""
        error: Exception | None = None
        costs: list[BlockCost] = []
        link = Link(1.0, 1.0)
        try:
            link = self.far.speeds()
            costs = measure(
                self.modules, self.sample, self.far.clock, repeats=self.repeats
            )
        except Exception as raised:  # noqa: BLE001 - the other ranks wait
            error = raised
        if self.comm is not None:
            meet(self.comm, "OutOfCore", error, ())
        elif error is not None:
            raise error
        return costs, link


_NAMES = "numbers of blocks", "budget_bytes", "bucket_nbytes", "parameters"


def _facts(modules: Sequence[nn.Module]) -> list[Any]:
    """Return what is equal on ranks that train the same model."""
    return [
        [
            (tuple(x.shape), x.dtype, x.device.type, x.requires_grad, x.layout)
            for x in block.parameters()
        ]
        for block in modules
    ]


def _check_number(name: str, number: Any, least: int) -> None:
    if type(number) is not int or not least <= number < 2**63:
        raise UsageError(
            f"OutOfCore: {name}={shown(number)}: expected an integer from {least}"
        )


def _modules_of(blocks: Any) -> list[nn.Module]:
    is_list = isinstance(blocks, nn.Sequential | nn.ModuleList | list | tuple)
    modules = list(blocks) if is_list else []
    if not modules or not all(isinstance(block, nn.Module) for block in modules):
        raise UsageError(
            f"OutOfCore: blocks={shown(type(blocks).__name__)}: expected an "
            f"nn.Sequential, or a list of modules, one at least"
        )
    return modules


def _agreed(
    comm: Communicator | None, costs: Sequence[BlockCost], link: Link
) -> tuple[list[BlockCost], Link]:
    """Return the largest costs and the slowest link of all ranks; collective."""
    if comm is None:
        return list(costs), link
    mine = [[1 / link.out_bytes_per_s, 1 / link.in_bytes_per_s, link.latency_s]]
    rows = [
        [
            *(cost.forward_s, cost.backward_s, cost.saved_nbytes, cost.output_nbytes),
            *(cost.resident_nbytes, cost.replayed_nbytes, cost.num_transfers),
            *(not cost.can_recompute, cost.replay_s),
        ]
        for cost in costs
    ]
    flat = np.array([*mine[0], *(each for row in rows for each in row)], np.float64)
    every = np.empty((comm.size, len(flat)), np.float64)
    comm.allgather(flat, out=every)
    most = every.max(0).tolist()
    found = []
    for number in range(len(costs)):
        row = most[3 + 9 * number : 12 + 9 * number]
        saved, output, resident, replayed, transfers = map(int, row[2:7])
        found.append(
            BlockCost(
                *(row[0], row[1], saved, output, resident, replayed, transfers),
                recompute_s=row[8],
                can_recompute=not row[7],
            )
        )
    return found, Link(1 / most[0], 1 / most[1], most[2])
