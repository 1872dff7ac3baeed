# SPDX-License-Identifier: Apache-2.0
"""ShardedOptimizer: each rank updates a part of the parameters, and keeps its state.

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion
Parameter Models", section 5.1, stage 1; Xu et al., "Automatic Cross-Replica Sharding of
Weight Update in Data-Parallel Training".
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any, TypeAlias

import torch
from torch import nn

from commrt.comm import Communicator
from commrt.errors import UsageError, shown
from commrt.layers.samples.agreement import agreed
from commrt.layers.sharded_update.bucket import Bucket
from commrt.layers.sharded_update.making import (
    Factory,
    Maker,
    changes,
    check_apart,
    group_texts,
    options_of,
    settings_text,
)
from commrt.layers.sharded_update.meeting import end_together, meet
from commrt.layers.sharded_update.norms import total_norm
from commrt.layers.sharded_update.whole_state import gathered_state, load_parts

__all__ = ["ShardedOptimizer"]

Tensor: TypeAlias = torch.Tensor
_WHAT = "ShardedOptimizer"
BUCKET_NBYTES = 4 << 20
_AHEAD = 4
"""Buckets whose gradients travel while one is updated."""
_COPIES = 2
"""Buckets in buffers whose new values travel then."""
_FROM_SCALER = ("grad_scale", "found_inf")
News: TypeAlias = dict[int, tuple[int, dict[str, Any]]]
"""Of a group: the number of a bucket, and the settings that its optimizer changed."""


class ShardedOptimizer(torch.optim.Optimizer):  # type: ignore[misc]
    """An optimizer of torch's, divided among ranks that train the same model.

        adam = torch.optim.AdamW
        optimizer = ShardedOptimizer(model.parameters(), comm, adam, lr=1e-3)
        loss.backward()
        optimizer.step()

    Each rank updates its part of the parameters, and has the optimizer's state of that
    part alone. ``step()`` sums gradients over the ranks, and brings the new values to
    all of them. It works in buckets: gradients of some travel while another one is
    updated, and so do new values; on the host, within one node, one after another.

    Args:
        params: parameters, named ones or groups, as torch's optimizers take them; equal
            on all ranks, in the same order.
        comm: the ranks.
        factory: a class of optimizers, or a function that returns one for groups; it is
            called for each bucket.
        gradients: "own": each rank has gradients of its own samples, and ``step()``
            reduces them. "summed": they are equal on all ranks, as DDP leaves them.
        op: "avg" or "sum", of gradients of its own.
        cut: "elements": buckets are cut evenly, also within parameters. "parameters":
            each parameter is one rank's. "auto": elements for those optimizers of torch
            that treat each element by itself, parameters for any other.
        bucket_nbytes: of a bucket of small parameters. One of 128 KiB or more is a
            bucket of its own, which is sent without copies.
        kwargs: of the factory.

    A parameter that no rank has a gradient of stays as it is. Where some have one, the
    others' counts as zeros. On one rank nothing is sent.

    Pattern, for N parameters with Ψ bytes of those that any rank has a gradient of: an
    ``allreduce`` of 17 + N bytes; for each bucket a ``reduce_scatterv`` and an
    ``allgatherv``, together of Ψ bytes each (no ``reduce_scatterv`` with "summed"); an
    ``allreduce`` of 1; objects, where an optimizer changes its groups' settings.

    Collective when it is made. Raises UsageError, on all ranks alike, for arguments
    that do not fit or differ, for optimizers that cannot be divided, and for parameters
    that share memory, fill no run of it, or are DTensors.
    """

    _step_supports_amp_scaling = True  # torch's GradScaler then steps on all ranks

    def __init__(
        self,
        params: Any,
        comm: Communicator,
        factory: Factory,
        *,
        gradients: str = "own",
        op: str = "avg",
        cut: str = "auto",
        bucket_nbytes: int = BUCKET_NBYTES,
        **kwargs: Any,
    ) -> None:
        if not isinstance(comm, Communicator):
            raise UsageError(f"{_WHAT}: comm={shown(comm)} must be a communicator")
        self._is_open = self._is_reduced = self._is_scaled = False
        self._buckets: list[Bucket] = []
        self._present: list[bool] = []
        self._given = comm
        self._comm = comm.dup(name=f"{comm.name}.optimizer") if comm.size > 1 else None

        def made() -> tuple[Maker, int, list[str]]:
            if gradients not in ("own", "summed"):
                raise UsageError(
                    f"{_WHAT}: gradients={shown(gradients)} must be 'own' or 'summed'"
                )
            if op not in ("avg", "sum"):
                raise UsageError(f"{_WHAT}: op={shown(op)} must be 'avg' or 'sum'")
            maker = Maker(factory, kwargs, cut, bucket_nbytes, self._ranks)
            super(ShardedOptimizer, self).__init__(params, {})
            self.defaults = maker.fill_in(self.param_groups)
            check_apart(
                [each for group in self.param_groups for each in group["params"]]
            )
            first = 0
            for number, group in enumerate(self.param_groups):
                self._buckets += maker.buckets(number, group, first)
                first += len(group["params"])
            texts = [f"gradients={gradients!r}, op={op!r}, cut={cut!r}"]
            texts += [f"bucket_nbytes={bucket_nbytes}, {maker.kind}"]
            return maker, 0, [*texts, *group_texts(self.param_groups)]

        try:
            self._maker, _ = agreed(_WHAT, self._ranks, made)
        except BaseException:
            self.close()
            raise
        self._op = op if gradients == "own" else None
        self._is_open = True

    @property
    def _ranks(self) -> Communicator:
        """The optimizer's own communicator; on one rank the given one."""
        return self._given if self._comm is None else self._comm

    # -- groups ------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, as torch does; collective.

        Raises UsageError, on all ranks, where the groups differ.
        """
        if not self._is_open:
            super().add_param_group(param_group)
            return
        self._check_open("add_param_group")
        number = len(self.param_groups)

        def made() -> tuple[list[Bucket], int, list[str]]:
            if self._is_reduced:
                raise UsageError(f"{_WHAT}.add_param_group: gradients wait for step()")
            self.defaults, defaults = {}, self.defaults
            try:
                super(ShardedOptimizer, self).add_param_group(dict(param_group))
            finally:
                self.defaults = defaults
            group = self.param_groups[-1]
            for name, value in defaults.items():
                group.setdefault(name, value)
            self._maker.fill_in([group])
            check_apart([each for one in self.param_groups for each in one["params"]])
            first = sum(len(one["params"]) for one in self.param_groups[:-1])
            return self._maker.buckets(number, group, first), 0, group_texts([group])

        try:
            buckets, _ = agreed(f"{_WHAT}.add_param_group", self._ranks, made)
        except BaseException:
            del self.param_groups[number:]
            raise
        self._buckets += buckets

    # -- a step ------------------------------------------------------------------------

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Sum gradients, update all parameters, and return the closure's loss.

        Collective. A closure is called once, before the gradients are summed. After
        ``reduce_gradients`` or ``clip_grad_norm_`` the sums are used that are there.

        Raises an error on all ranks where one of them has one, such as a sparse
        gradient, or settings that differ; parameters are then as before. An error
        within the optimizer is raised on all ranks, too: the state is then undefined.
        Where a rank fails between two buckets, as for want of memory, all others raise
        RevokedError, and the optimizer has ended.
        """
        self._check_open("step")
        try:
            return self._step(closure)
        except BaseException:
            for name in _FROM_SCALER:  # torch's scaler takes them back after a step
                self.__dict__.pop(name, None)
            raise

    def _step(self, closure: Callable[[], Any] | None) -> Any:
        loss, error = None, None
        try:
            if closure is not None:
                loss = self._loss(closure)
            self._check_scaler()
            self._check_memory()
            if not self._is_reduced:
                self._check_gradients()
        except Exception as caught:  # noqa: BLE001  the others wait to hear of it
            error = caught
        self._meet("step", error)
        found_inf = getattr(self, "found_inf", None)
        if found_inf is not None and bool(found_inf):
            self._forget()
            return loss
        news: News = {}
        with self._ending_all():
            failure = self._update(news)
        self._is_reduced = self._is_scaled = False
        if end_together(self._comm, f"{_WHAT}.step", failure, bool(news)):
            self._take(news)
        return loss

    def _update(self, news: News) -> Exception | None:
        """Sum, update and gather all buckets; return an error of this rank's optimizer.

        Args:
            news: gets the settings that the first bucket of each group has changed.
        """
        options = [options_of(group) for group in self.param_groups]
        failure: Exception | None = None
        overlaps = self._overlaps
        ahead = _AHEAD if overlaps else 0
        sums = deque(range(len(self._buckets)))
        under_way: deque[Bucket] = deque()
        for at, bucket in enumerate(self._buckets):
            if not self._is_reduced:
                while sums and sums[0] <= at + ahead:
                    self._start_sum(self._buckets[sums.popleft()])
                bucket.finish_sum(may_share=True)
            try:
                self._scale(bucket)
                if failure is None and any(self._present_in(bucket)):
                    number = bucket.group
                    found = bucket.update(options[number])
                    changed = changes(self.param_groups[number], found)
                    if changed:
                        news.setdefault(number, (at, changed))
            except Exception as caught:  # noqa: BLE001  the others wait for its part
                failure = caught
            bucket.drop()
            if overlaps:
                bucket.start_gather()
                under_way.append(bucket)
            while sum(each.has_buffer for each in under_way) > _COPIES:
                under_way.popleft().finish_gather()
        for bucket in under_way if overlaps else self._buckets:
            if not overlaps:
                bucket.start_gather()
            bucket.finish_gather()
        return failure

    @property
    def _overlaps(self) -> bool:
        """True if what is sent can go on while this rank computes.

        Ranks of one node copy through memory that they share, by the cores on which
        they compute, so there nothing is hidden.
        """
        on_host = all(bucket.is_on_host for bucket in self._buckets)
        return len(self._ranks.nodes) > 1 or not on_host

    @contextlib.contextmanager
    def _ending_all(self) -> Iterator[None]:
        """End the optimizer on all ranks where this one raises an error.

        The others wait for buckets that this rank sends no more.
        """
        try:
            yield
        except BaseException as error:
            if self._comm is not None:
                self._comm.revoke(f"{_WHAT}: {error!r} while buckets were on their way")
            raise

    def _take(self, news: News) -> None:
        """Take settings that an optimizer has changed; collective.

        A rank may have no piece of a group, so all take those of the first that has.
        """
        every = [news] if self._comm is None else self._comm.allgather_object(news)
        for number, group in enumerate(self.param_groups):
            found = [each[number] for each in every if number in each]
            if found:
                group.update(min(found, key=lambda each: each[0])[1])

    def _loss(self, closure: Callable[[], Any]) -> Any:
        if self._is_reduced:
            raise UsageError(
                f"{_WHAT}.step: gradients are summed already, so a closure cannot make "
                f"new ones; call step() without it"
            )
        with torch.enable_grad():
            return closure()

    def reduce_gradients(self) -> None:
        """Sum gradients now, for ``step()`` to use them; collective.

        Each rank has the sums of its own part. Parameters' ``grad`` stay as they are.
        Raises UsageError where sums are there that no step has used; ``zero_grad()``
        forgets these.
        """
        self._check_open("reduce_gradients")
        error = None
        try:
            if self._is_reduced:
                raise UsageError(
                    f"{_WHAT}.reduce_gradients: gradients are summed already; call "
                    f"step() or zero_grad() first"
                )
            self._check_memory()
            self._check_gradients()
        except Exception as caught:  # noqa: BLE001  the others wait to hear of it
            error = caught
        self._meet("reduce_gradients", error)
        self._reduce()

    def _reduce(self) -> None:
        """Sum the gradients of all buckets, two of which are under way at a time."""
        waiting: deque[Bucket] = deque()
        with self._ending_all():
            for bucket in self._buckets:
                self._start_sum(bucket)
                waiting.append(bucket)
                if len(waiting) > 1:
                    waiting.popleft().finish_sum()
            for bucket in waiting:
                bucket.finish_sum()
        self._is_reduced = True

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        *,
        error_if_nonfinite: bool = False,
    ) -> Tensor:
        """Scale the sums of gradients to a norm of at most ``max_norm``; collective.

        Call it between ``backward()`` and ``step()``. It sums the gradients, unless
        ``reduce_gradients`` has. The norm is that of all elements, computed in float64,
        with the same bits on all ranks. On one rank it is torch's function.

        Returns the norm before. Bytes: an ``allreduce`` of 8 beside those of sums, and
        one of 17 + N.

        Raises UsageError for a norm that is none, or differs between ranks, and
        RuntimeError for a norm that is not finite with ``error_if_nonfinite``.
        """
        self._check_open("clip_grad_norm_")
        error = None
        try:
            if not (float(max_norm) > 0 and float(norm_type) > 0):
                raise UsageError(
                    f"{_WHAT}.clip_grad_norm_: max_norm={shown(max_norm)} and "
                    f"norm_type={shown(norm_type)} must be above 0"
                )
            self._check_memory()
            if not self._is_reduced:
                self._check_gradients()
        except Exception as caught:  # noqa: BLE001  the others wait to hear of it
            error = caught
        said = f"max_norm={max_norm}, norm_type={norm_type}, {error_if_nonfinite}"
        self._meet("clip_grad_norm_", error, said)
        if not self._is_reduced:
            self._reduce()
        views = [view for each in self._buckets for _, view in each.pieces]
        power = float(norm_type)
        if self._comm is None:
            return nn.utils.clip_grad_norm_(views, max_norm, power, error_if_nonfinite)
        total = total_norm(views, power, self._comm)
        if error_if_nonfinite and not bool(total.isfinite()):
            raise RuntimeError(
                f"{_WHAT}.clip_grad_norm_: the norm of order {power} of all gradients "
                f"is {float(total)}, so they cannot be scaled"
            )
        scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)
        for view in views:
            if view.grad is not None:
                view.grad.mul_(scale.to(view.device, view.grad.real.dtype))
        return total

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget gradients and sums of them; local."""
        self._forget()
        super().zero_grad(set_to_none)

    def _forget(self) -> None:
        for bucket in self._buckets:
            bucket.drop()
        self._is_reduced = self._is_scaled = False

    def _meet(self, call: str, error: Exception | None, said: str = "") -> None:
        """Find out what all ranks have gradients of; raise any rank's error."""
        what = f"{_WHAT}.{call}"
        there = [False] * self._num_parameters()
        if not self._is_reduced and error is None:
            there = [
                each.grad is not None
                for group in self.param_groups
                for each in group["params"]
            ]
        scales = [getattr(self, name, None) for name in _FROM_SCALER]
        said += f", summed={self._is_reduced}, grad_scale and found_inf: " + repr(
            [None if each is None else float(each) for each in scales]
        )
        fact = f"{call}: {settings_text(self.param_groups)}{said}"
        present = meet(self._comm, what, error, fact, there)
        if not self._is_reduced:
            self._present = present

    def _num_parameters(self) -> int:
        return sum(len(group["params"]) for group in self.param_groups)

    def _present_in(self, bucket: Bucket) -> list[bool]:
        return [self._present[number] for number in bucket.numbers]

    def _start_sum(self, bucket: Bucket) -> None:
        bucket.start_sum(self._present_in(bucket), self._op)

    def _check_memory(self) -> None:
        """Follow parameters to new memory; UsageError for other types; local."""
        for bucket in self._buckets:
            bucket.follow()

    def _check_gradients(self) -> None:
        """Raise UsageError for gradients that cannot be cut; local."""
        for bucket in self._buckets:
            for number, parameter in zip(
                bucket.numbers, bucket.parameters, strict=True
            ):
                gradient = parameter.grad
                if gradient is not None and gradient.layout != torch.strided:
                    raise UsageError(
                        f"{_WHAT}: the gradient of parameter {number} is stored as "
                        f"{gradient.layout}; make its layer with dense gradients"
                    )
                if gradient is not None and gradient.dtype != parameter.dtype:
                    raise UsageError(
                        f"{_WHAT}: the gradient of parameter {number} is of "
                        f"{gradient.dtype}, and the parameter of {parameter.dtype}; "
                        f"they must be equal"
                    )

    # -- scaled losses -----------------------------------------------------------------

    @property
    def views(self) -> list[Tensor]:
        """This rank's pieces, with the sums of gradients once these are reduced."""
        return [view for bucket in self._buckets for _, view in bucket.pieces]

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """The buckets, in the order in which they travel."""
        return tuple(self._buckets)

    @property
    def is_reduced(self) -> bool:
        """True while sums of gradients wait for a step."""
        return self._is_reduced

    def mark_scaled(self) -> None:
        """Note that ranks agree on overflows; ``GradScaler`` calls it."""
        self._is_scaled = True

    def _check_scaler(self) -> None:
        if getattr(self, "found_inf", None) is not None and not self._is_scaled:
            raise UsageError(
                f"{_WHAT}.step: torch's GradScaler looks for overflows on each rank by "
                f"itself; use commrt.layers.sharded_update.GradScaler"
            )

    def _scale(self, bucket: Bucket) -> None:
        """Divide a bucket's sums by the scale of the loss."""
        scale = getattr(self, "grad_scale", None)
        if scale is None:
            return
        inverse = scale.double().reciprocal().float()  # as torch's scaler does
        for _, view in bucket.pieces:
            if view.grad is not None:
                view.grad.mul_(inverse.to(view.device))

    # -- state -------------------------------------------------------------------------

    def state_nbytes(self) -> int:
        """Return the bytes of this rank's state, in tensors; local."""
        return sum(
            value.nbytes
            for bucket in self._buckets
            if bucket.optimizer is not None
            for state in bucket.optimizer.state.values()
            for value in state.values()
            if isinstance(value, torch.Tensor)
        )

    def whole_state_dict(self, root: int | None = 0) -> dict[str, Any] | None:
        """Return the state in the form of the plain optimizer's; collective.

        Tensors come one by one, and lie in memory of the host.

        Args:
            root: the rank that gets it, others get None; None: all ranks.

        Bytes: a ``gatherv`` of each tensor of the state, or an ``allgatherv``; a number
        that is the same for all elements of a parameter travels as an object.
        """
        self._check_open("whole_state_dict")
        comm = self._comm
        said = f"root={root!r}"
        error: Exception | None = None
        if root is not None and (
            type(root) is not int or not 0 <= root < self._given.size
        ):
            error = UsageError(
                f"{_WHAT}.whole_state_dict: root={shown(root)} must be a rank of "
                f"{self._given.name}, or None"
            )
        meet(comm, f"{_WHAT}.whole_state_dict", error, said)
        state = gathered_state(self._buckets, comm, root)
        if state is None:
            return None
        groups, first = [], 0
        for group in self.param_groups:
            last = first + len(group["params"])
            kept = {k: v for k, v in group.items() if k != "params"}
            groups.append({**kept, "params": [*range(first, last)]})
            first = last
        return {"state": state, "param_groups": groups}

    def state_dict(self) -> dict[str, Any]:
        """Raise UsageError: a rank has a part of the state."""
        raise UsageError(
            f"{_WHAT}.state_dict: each rank has a part of the state; call "
            f"whole_state_dict(root) on all ranks"
        )

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take this rank's part of a whole state; local.

        Args:
            state_dict: of ``whole_state_dict``, of any number of ranks, or of the plain
                optimizer; whole on each rank. It stays as it is.

        Raises UsageError for a state of other groups or parameters; the optimizer is
        then as before.
        """
        self._check_open("load_state_dict")
        groups = load_parts(self._buckets, self.param_groups, state_dict)
        for group, found in zip(self.param_groups, groups, strict=True):
            group.update({k: v for k, v in found.items() if k != "params"})
        self._forget()

    # -- end ---------------------------------------------------------------------------

    def close(self) -> None:
        """Free the optimizer's communicator; local. Parameters and state stay."""
        self._is_open = False
        comm, self._comm = self._comm, None
        if comm is not None:
            comm.free()

    def __enter__(self) -> ShardedOptimizer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        raise UsageError(
            f"{_WHAT}: it cannot be copied or pickled, as its ranks cannot; save "
            f"whole_state_dict()"
        )

    def _check_open(self, call: str) -> None:
        if not self._is_open:
            raise UsageError(f"{_WHAT}.{call}: the optimizer is closed")
