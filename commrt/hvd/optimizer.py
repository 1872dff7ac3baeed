# SPDX-License-Identifier: Apache-2.0
"""DistributedOptimizer: an optimizer whose steps use the gradients of all ranks."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch

from commrt.errors import UsageError, shown
from commrt.hvd.compression import Compression, Compressor
from commrt.hvd.current import current
from commrt.hvd.gradients import (
    GradientExchange,
    Groups,
    Named,
    named,
    pieces_of,
)
from commrt.hvd.operators import Adasum, Average, ReduceOp
from commrt.hvd.process_sets import ProcessSet, global_process_set
from commrt.hvd.submitting import gradients_allreduce_async_, refusing

__all__ = ["DistributedOptimizer"]

Tensor: TypeAlias = torch.Tensor
Closure: TypeAlias = Callable[[], Any] | None
_WHAT = "hvd.DistributedOptimizer"


def DistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: torch.optim.Optimizer,
    named_parameters: Named = None,
    compression: type[Compressor] = Compression.none,
    backward_passes_per_step: int = 1,
    op: ReduceOp = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Groups = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return an optimizer that reduces gradients over the ranks before its step.

        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters()
        )

    Gradients are submitted while the backward pass computes others. ``step()`` waits
    for all of them. The result is of the optimizer's own class, and shares its state.

    Args:
        optimizer: any of torch's.
        named_parameters: names of its parameters, equal on all ranks.
        compression: of gradients on their way.
        backward_passes_per_step: gradients are added up over so many passes.
        op: ``Average``, ``Sum`` or another reduction. With ``Adasum`` each rank takes a
            step by its own gradients, and the changes are added.
        gradient_predivide_factor: splits the average's division: gradients are divided
            by it before the sum, and multiplied by it after.
        num_groups: the old name of ``groups``.
        groups: gradients that go together: how many such groups, or lists of
            parameters.
        sparse_as_dense: whether sparse gradients are sent as dense ones.
        process_set: the ranks. Others take steps by their own gradients.

    Raises UsageError for arguments that do not fit, and before ``hvd.init()``. The
    first step raises MismatchError on all ranks for parameters of which they have
    different pieces, such as experts: call ``sync_gradients`` of the layer's package
    for these.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(f"{_WHAT}: {shown(optimizer)} is no optimizer of torch's")
    if not isinstance(op, ReduceOp):
        raise UsageError(f"{_WHAT}: op={shown(op)} must be such as hvd.Average")
    if gradient_predivide_factor != 1.0 and op is not Average:
        raise UsageError(
            f"{_WHAT}: gradient_predivide_factor={gradient_predivide_factor} is for "
            f"op=hvd.Average alone, and op is {op}"
        )
    if num_groups:
        warnings.warn(
            "num_groups is the old name of groups", DeprecationWarning, stacklevel=2
        )
        groups = num_groups if groups is None else groups
    if not isinstance(process_set, ProcessSet):
        raise UsageError(
            f"{_WHAT}: process_set={shown(process_set)} must be a ProcessSet"
        )
    session = current()
    ranks = session.ranks_of(process_set.number(_WHAT))
    names = named(_WHAT, optimizer, named_parameters)
    if op is Adasum and session.comm.size > 1:
        if process_set.process_set_id != 0:
            raise UsageError(
                f"{_WHAT}: op=hvd.Adasum is for the set of all ranks, not for "
                f"{process_set!r}"
            )
        deltas = _Deltas(names, compression, backward_passes_per_step)
        return _made(optimizer, _AdasumSteps, _deltas=deltas)
    exchange = GradientExchange(
        names,
        compression=compression,
        passes=backward_passes_per_step,
        op=op,
        predivide=gradient_predivide_factor,
        groups=groups,
        sparse_as_dense=sparse_as_dense,
        process_set=process_set,
        is_active=session.comm.rank in ranks,
    )
    return _made(
        optimizer,
        _Steps,
        _exchange=exchange,
        _is_synchronized=False,
        _synchronizes=True,
    )


def _made(optimizer: torch.optim.Optimizer, steps: type, **fields: Any) -> Any:
    """Return an optimizer of the given one's class and state, with other steps.

    Programs and schedulers ask for the class, so an object around it would not do.
    """
    kind = type(optimizer)
    members = {
        name: value
        for name, value in vars(steps).items()
        if name not in ("__dict__", "__weakref__")
    }
    members |= {"plain_kind": kind, "step": _step_seen_by(optimizer, members["step"])}
    made_kind: Any = type(kind.__name__, (kind,), members)
    made = made_kind.__new__(made_kind)
    # A scheduler puts a step into an optimizer's fields, which would hide the new one.
    own = {name: x for name, x in vars(optimizer).items() if name not in members}
    made.__dict__.update(own)
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def _step_seen_by(optimizer: Any, step: Callable[..., Any]) -> Callable[..., Any]:
    """Return a step that schedulers of another optimizer see as one of that."""

    @functools.wraps(step)
    def stepping(self: Any, *args: Any, **kwargs: Any) -> Any:
        vars(optimizer)["_opt_called"] = (
            True  # torch warns of schedulers that come first
        )
        return step(self, *args, **kwargs)

    # torch runs hooks in steps that lack this mark; the plain step has run them.
    stepping.hooked = True  # type: ignore[attr-defined]
    return stepping


class _Steps:
    """Methods of an optimizer that reduces gradients."""

    plain_kind: type[torch.optim.Optimizer]
    _exchange: GradientExchange
    _is_synchronized: bool
    _synchronizes: bool

    @property
    def backward_passes_per_step(self) -> int:
        """Backward passes whose gradients are added up."""
        return self._exchange.passes

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Set the backward passes whose gradients are added up, between steps.

        Raises UsageError while gradients are under way.
        """
        self._exchange.check_none_sent("optimizer.set_backward_passes_per_step()")
        self._exchange.set_passes(passes)

    def synchronize(self) -> None:
        """Wait for the reductions of all gradients; ``step()`` need not do so again.

        For programs that clip gradients, followed by ``skip_synchronize()``.
        """
        self._exchange.finish()
        self._is_synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Within, ``step()`` takes gradients as they are."""
        self._synchronizes = False
        try:
            yield
        finally:
            self._synchronizes = True

    def step(self, closure: Closure = None) -> Any:
        """Wait for the reductions, and take a step by them.

        A closure's gradients are reduced each time that the optimizer calls it. Before,
        the ranks find out whether some of them have sent gradients, and finish these.
        """
        if not self._synchronizes:
            self._is_synchronized = False
            return self.plain_kind.step(self, closure)
        if self._is_synchronized:
            warnings.warn(
                "optimizer.step() reduces gradients that optimizer.synchronize() has "
                "reduced: call it within optimizer.skip_synchronize()",
                stacklevel=2,
            )
        reduced: Closure = None
        if closure is None:
            self._exchange.finish()
        else:
            compute = closure
            if self._exchange.any_has_sent():
                self._exchange.finish()

            def reduced() -> Any:
                loss = compute()
                self._exchange.finish()
                return loss

        self._is_synchronized = False
        return self.plain_kind.step(self, reduced)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Begin with new gradients; UsageError while some are under way."""
        self._exchange.check_none_sent("optimizer.zero_grad()")
        self.plain_kind.zero_grad(self, set_to_none)

    def load_state_dict(self, state_dict: Any) -> None:
        """Take a state, and begin a step anew; UsageError while gradients go."""
        self._exchange.check_none_sent("optimizer.load_state_dict()")
        self._exchange.reset()
        self._is_synchronized = False
        self.plain_kind.load_state_dict(self, state_dict)


class _Deltas:
    """Changes of parameters by a rank's own step, and their adaptive sums.

    Args:
        names: of each parameter.
        compression: for the way.
        passes: backward passes of a step.
    """

    def __init__(
        self, names: dict[Any, str], compression: type[Compressor], passes: int
    ) -> None:
        if type(passes) is not int or passes < 1:
            raise UsageError(
                f"{_WHAT}: backward_passes_per_step={shown(passes)} must be a whole "
                f"number above 0"
            )
        self.passes = passes
        self._trained = [each for each in names if each.requires_grad]
        self._compression = compression

    def starts(self) -> list[Tensor]:
        """Return copies of the parameters."""
        return [each.detach().clone() for each in self._trained]

    def add(self, starts: list[Tensor]) -> None:
        """Add all ranks' changes to where the parameters were; collective."""
        if not starts:
            return
        name = "adasum.deltas"
        with refusing("DistributedOptimizer", "allreduce", name, global_process_set):
            packed = [
                self._compression.compress(parameter.detach() - start)
                for parameter, start in zip(self._trained, starts, strict=True)
            ]
        handle = gradients_allreduce_async_(
            *([delta for delta, _ in packed], pieces_of(self._trained), name),
            *(Adasum, (1.0, 1.0), global_process_set),
        )
        handle.wait()
        with torch.no_grad():
            for parameter, start, (delta, context) in zip(
                self._trained, starts, packed, strict=True
            ):
                parameter.copy_(start + self._compression.decompress(delta, context))


class _AdasumSteps:
    """Methods of an optimizer whose changes are added by Adasum."""

    plain_kind: type[torch.optim.Optimizer]
    _deltas: _Deltas

    @property
    def backward_passes_per_step(self) -> int:
        """Backward passes whose gradients are added up; torch adds them."""
        return self._deltas.passes

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Set the backward passes of a step, which torch adds up by itself."""
        self._deltas.passes = passes

    def synchronize(self) -> None:
        """Do nothing: gradients stay this rank's own."""

    def skip_synchronize(self) -> Any:
        """Raise UsageError: it is the step that communicates."""
        raise UsageError(
            "optimizer.skip_synchronize() is not for op=hvd.Adasum: its step adds the "
            "changes of all ranks"
        )

    def step(self, closure: Closure = None) -> Any:
        """Take a step by this rank's gradients, and add the changes of all ranks."""
        starts = self._deltas.starts()
        loss = self.plain_kind.step(self, closure)
        self._deltas.add(starts)
        return loss
