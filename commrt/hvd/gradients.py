# SPDX-License-Identifier: Apache-2.0
"""Gradients of an optimizer, reduced over the ranks while others are computed.

Each parameter has a hook that submits its gradient once it is there, in the order of
this rank's backward pass. Orders may differ between ranks. All gradients of a step
together make at most ceil(bytes / fusion_nbytes) collectives for each type.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import torch

from commrt.errors import MismatchError, UsageError, shown
from commrt.hvd.compression import Compressor
from commrt.hvd.handles import Handle
from commrt.hvd.operators import Average, ReduceOp, Sum
from commrt.hvd.process_sets import ProcessSet
from commrt.hvd.sparse_sums import sparse_allreduce_async
from commrt.hvd.submitting import (
    allreduce_async_,
    gradients_allreduce_async_,
    refusing,
)
from commrt.layers.data.own_pieces import place_of

__all__ = ["GradientExchange", "Groups", "named", "pieces_of"]

Tensor: TypeAlias = torch.Tensor
Groups: TypeAlias = int | Sequence[Sequence[Tensor]] | None
Named: TypeAlias = Iterable[tuple[str, Tensor]] | None


def named(what: str, optimizer: torch.optim.Optimizer, given: Named) -> dict[Any, str]:
    """Return the name of each parameter of an optimizer.

    Raises UsageError unless each has one of its own; without any they are numbered.
    """
    own = [
        (f"allreduce.noname.{i}.{j}", parameter)
        for i, group in enumerate(optimizer.param_groups)
        for j, parameter in enumerate(group["params"])
    ]
    pairs = own if given is None else list(given)
    if not all(isinstance(each, tuple) and len(each) == 2 for each in pairs):
        raise UsageError(
            f"{what}: named_parameters must have pairs of name and parameter, as "
            f"model.named_parameters() has"
        )
    names = [name for name, _ in pairs]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise UsageError(
            f"{what}: named_parameters has these names more than once: "
            f"{', '.join(twice)}; give each parameter a name of its own"
        )
    found = {parameter: name for name, parameter in pairs}
    unnamed = [name for name, parameter in own if parameter not in found]
    if unnamed:
        raise UsageError(
            f"{what}: named_parameters lacks {len(unnamed)} parameters of the "
            f"optimizer: pass model.named_parameters() of its whole model"
        )
    return {parameter: found[parameter] for _, parameter in own}


def pieces_of(parameters: Iterable[Tensor]) -> str:
    """Return which pieces of cut parameters this rank has; empty: it has whole ones."""
    places = [place_of(each) for each in parameters]
    if not any(places):
        return ""
    return "; ".join(
        " and ".join(f"place {number} along {axis}" for axis, number in each) or "whole"
        for each in places
    )


class GradientExchange:
    """Submits gradients as they come, and waits for their reductions.

    Args:
        names: of each parameter, equal on all ranks.
        compression: for the way.
        passes: backward passes in which gradients are added up before they are sent.
        op: the reduction.
        predivide: gradients are divided by this before the sum, and the average is
            multiplied by it.
        groups: parameters whose gradients are sent together: their number, or lists of
            parameters.
        sparse_as_dense: whether sparse gradients are sent as dense ones.
        process_set: the ranks.
        is_active: whether this rank is one of them.
    """

    def __init__(
        self,
        names: dict[Any, str],
        *,
        compression: type[Compressor],
        passes: int,
        op: ReduceOp,
        predivide: float,
        groups: Groups,
        sparse_as_dense: bool,
        process_set: ProcessSet,
        is_active: bool,
    ) -> None:
        self.names = names
        self._compression = compression
        self._op = op
        self._factors = (1.0 / predivide, predivide) if op is Average else (1.0, 1.0)
        self._sparse_as_dense = sparse_as_dense
        self._process_set = process_set
        self._trained = [each for each in names if each.requires_grad]
        self._group_of = self._grouped(groups)
        self.is_active = is_active
        self._handles: dict[tuple[Tensor, ...], tuple[Handle, list[Any]]] = {}
        self._refused: dict[tuple[Tensor, ...], Exception] = {}
        """Groups that could not be sent, which the other ranks have been told."""
        self.set_passes(passes)
        self._hooks: list[Any] = []
        if self.is_active:
            for parameter in self._trained:
                hook = parameter.register_post_accumulate_grad_hook(self._came)
                self._hooks.append(hook)

    def set_passes(self, passes: int) -> None:
        """Set the backward passes of a step."""
        if type(passes) is not int or passes < 1:
            raise UsageError(
                f"backward_passes_per_step={shown(passes)} must be a whole number "
                f"above 0"
            )
        self.passes = passes
        self.reset()

    def reset(self) -> None:
        """Begin a step anew: no gradient has come. None may be under way."""
        self._refused.clear()
        self._left = dict.fromkeys(self._trained, self.passes)

    @property
    def has_sent(self) -> bool:
        """True if gradients of this rank are under way that nobody has waited for."""
        return bool(self._handles or self._refused)

    def any_has_sent(self) -> bool:
        """Return whether gradients of some rank are under way; collective."""
        if not self.is_active:
            return False
        number = torch.tensor([float(self.has_sent)])
        name = "gradients.under_way"
        allreduce_async_(
            number, name=name, op=Sum, process_set=self._process_set
        ).wait()
        return bool(number)

    def check_none_sent(self, what: str) -> None:
        """Raise UsageError, which names the caller, while gradients are under way."""
        if self.has_sent:
            raise UsageError(
                f"{what} came after backward(), and before step() or synchronize(): "
                f"gradients are under way; call one of these first"
            )

    def close(self) -> None:
        """Take the hooks off."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def finish(self) -> None:
        """Put the reductions of all gradients into their places.

        Gradients that this rank does not have count as zeros. Collective. After an
        error none is under way, so a program may go on.
        """
        if not self.is_active:
            return
        try:
            # The others wait for each gradient: an error of one keeps none of the rest.
            for group in dict.fromkeys(self._group_of.values()):
                if group not in self._handles and group not in self._refused:
                    with contextlib.suppress(Exception):  # raised below
                        self._send(group)
            for error in self._refused.values():
                raise error
            self._take()
        except Exception:
            for handle, _ in self._handles.values():
                with contextlib.suppress(Exception):  # the first error is raised
                    handle.wait()
            raise
        finally:
            self._handles.clear()
            self.reset()

    def _take(self) -> None:
        """Wait for all gradients, and put them into their places."""
        for group, (handle, contexts) in self._handles.items():
            try:
                results = handle.wait()
            except MismatchError as error:
                if "pieces of cut parameters: " in str(error):
                    raise MismatchError(
                        f"hvd.DistributedOptimizer: {error}\n"
                        f"Gradients of different parameters must not be added up: call "
                        f"sync_gradients of the layer's package for these, and leave "
                        f"them out of this optimizer"
                    ) from error
                if "operation: " not in str(error):
                    raise
                raise MismatchError(
                    f"hvd.DistributedOptimizer: {error}\n"
                    f"A rank without a gradient sends dense zeros. Where others have a "
                    f"sparse one, pass sparse_as_dense=True on all ranks"
                ) from error
            if not isinstance(results, list):  # a sparse one
                results = [results]
            for parameter, result, context in zip(
                group, results, contexts, strict=True
            ):
                self._put(parameter, result, context)

    def _grouped(self, groups: Groups) -> dict[Tensor, tuple[Tensor, ...]]:
        """Return the group of each parameter; by itself it is alone."""
        trained = self._trained
        made: list[list[Tensor]]
        if groups is None:
            made = []
        elif isinstance(groups, int) and not isinstance(groups, bool) and groups >= 0:
            size = -(-len(trained) // groups) if groups else 1
            made = [trained[i : i + size] for i in range(0, len(trained), size or 1)]
        elif isinstance(groups, Sequence):
            made = [list(group) for group in groups]
        else:
            raise UsageError(
                f"hvd.DistributedOptimizer: groups={shown(groups)} must be a whole "
                f"number from 0, or lists of parameters"
            )
        found: dict[Tensor, tuple[Tensor, ...]] = {}
        for group in made:
            members = tuple(each for each in group if each.requires_grad)
            for each in members:
                if each not in self.names or each in found:
                    raise UsageError(
                        "hvd.DistributedOptimizer: groups must have parameters of the "
                        "optimizer, each once"
                    )
                found[each] = members
        return {each: found.get(each, (each,)) for each in trained}

    def _came(self, parameter: Tensor) -> None:
        """Submit a parameter's group once all its gradients are there; a hook."""
        if self._left[parameter] == 0:
            raise UsageError(
                f"hvd.DistributedOptimizer: gradient {self.names[parameter]} came more "
                f"than backward_passes_per_step={self.passes} times before step() or "
                f"synchronize(); make that number larger to add gradients up"
            )
        self._left[parameter] -= 1
        group = self._group_of[parameter]
        if all(self._left[each] == 0 for each in group):
            self._send(group)

    def _send(self, group: tuple[Tensor, ...]) -> None:
        """Submit the gradients of a group; an error is kept, too."""
        try:
            self._submit(group)
        except Exception as error:
            self._refused[group] = error
            raise

    def _submit(self, group: tuple[Tensor, ...]) -> None:
        for parameter in group:
            self._left[parameter] = 0
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        name = f"gradient.{self.names[group[0]]}"
        gradients = [parameter.grad for parameter in group]
        sparse = [each for each in gradients if each is not None and each.is_sparse]
        if sparse and not self._sparse_as_dense:
            self._send_sparse(group, name)
            return
        with refusing("DistributedOptimizer", "allreduce", name, self._process_set):
            packed = [
                self._compression.compress(each.to_dense())
                for each in gradients
                if each is not None
            ]
        tensors, contexts = [x for x, _ in packed], [context for _, context in packed]
        handle = gradients_allreduce_async_(
            *(tensors, pieces_of(group), name, self._op, self._factors),
            self._process_set,
        )
        self._handles[group] = handle, contexts

    def _send_sparse(self, group: tuple[Tensor, ...], name: str) -> None:
        with refusing("DistributedOptimizer", "allreduce", name, self._process_set):
            if len(group) > 1:
                raise UsageError(
                    f"hvd.DistributedOptimizer: {name} is sparse, and sparse gradients "
                    f"go alone: leave their parameters out of groups, or pass "
                    f"sparse_as_dense=True"
                )
        gradient = group[0].grad
        assert gradient is not None
        handle = sparse_allreduce_async(
            *(gradient, name, self._op, self._process_set), pieces=pieces_of(group)
        )
        self._handles[group] = handle, [None]

    def _put(self, parameter: Tensor, result: Tensor, context: Any) -> None:
        gradient = parameter.grad
        if result.is_sparse:
            parameter.grad = result
            return
        whole = self._compression.decompress(result, context)
        assert gradient is not None
        if gradient.is_sparse:
            parameter.grad = whole.to_sparse(gradient.sparse_dim())
        elif whole.data_ptr() != gradient.data_ptr():
            gradient.copy_(whole)
