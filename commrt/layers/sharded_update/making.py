# SPDX-License-Identifier: Apache-2.0
"""Checks of a sharded optimizer's arguments, and its buckets; all of it is local."""

from __future__ import annotations

import functools
import itertools
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn, optim

from commrt.comm import Communicator
from commrt.errors import UsageError, shown
from commrt.layers.data.buckets import cut
from commrt.layers.data.own_pieces import place_of
from commrt.layers.sharded_update.bucket import Bucket, is_dense
from commrt.layers.sharded_update.buffers import Buffers
from commrt.layers.sharded_update.layout import cut_evenly, cut_whole, owners

__all__ = [
    "Factory",
    "Maker",
    "changes",
    "check_apart",
    "group_texts",
    "options_of",
    "settings_text",
]

Tensor: TypeAlias = torch.Tensor
Factory: TypeAlias = Callable[..., optim.Optimizer]
Group: TypeAlias = dict[str, Any]

_WHAT = "ShardedOptimizer"
ELEMENTWISE: tuple[type[optim.Optimizer], ...] = (
    optim.ASGD,
    optim.Adadelta,
    optim.Adagrad,
    optim.Adam,
    optim.AdamW,
    optim.Adamax,
    optim.NAdam,
    optim.RAdam,
    optim.RMSprop,
    optim.Rprop,
    optim.SGD,
)
"""Optimizers of torch that treat each element by itself."""
ALONE_NBYTES = 128 << 10
"""Longer parameters are buckets of their own: they travel from where they are to where
they belong, and copies into a buffer would take longer than one call more."""
_REFUSED = {
    optim.LBFGS: "it evaluates its closure several times, over all parameters at once",
    optim.SparseAdam: "it is for sparse gradients, which are not cut",
}


def options_of(group: Mapping[str, Any]) -> Group:
    """Return a group's settings, without its parameters."""
    return {k: v for k, v in group.items() if k not in ("params", "param_names")}


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> Group:
    """Return the settings of a group that an optimizer has changed."""
    return {k: v for k, v in after.items() if _plain(v) != _plain(before[k])}


def settings_text(groups: Sequence[Mapping[str, Any]]) -> str:
    """Return a text of groups' settings, which must be equal on all ranks."""
    return repr(
        [
            {name: _plain(value) for name, value in sorted(options_of(group).items())}
            for group in groups
        ]
    )


def group_texts(groups: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return texts of groups that must be equal on all ranks.

    Such are the places of what cuts a parameter (``place_of``): ranks that have
    different experts, for example, must not add up their gradients.
    """
    return [
        f"{settings_text([group])} for "
        + repr([(*_described(x), *place_of(x)) for x in group["params"]])
        + f", named {group.get('param_names')}"
        for group in groups
    ]


def _described(x: torch.Tensor) -> tuple[Any, ...]:
    return tuple(x.shape), x.stride(), str(x.dtype), x.device.type


def _plain(value: Any) -> Any:
    """Return a setting without what differs between processes, such as addresses."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if value is None or isinstance(value, str | numbers.Number):
        return value
    return type(value).__name__


class Maker:
    """Makes the optimizers and buckets of groups.

    Args:
        factory: returns an optimizer of torch's for groups of parameters.
        arguments: further ones of the factory.
        cut: "auto", "elements" or "parameters".
        bucket_nbytes: of a bucket of small parameters, at most.
        comm: the ranks; buckets send on it.

    Raises UsageError for arguments that do not fit.
    """

    def __init__(
        self,
        factory: Factory,
        arguments: Mapping[str, Any],
        cut: str,
        bucket_nbytes: int,
        comm: Communicator,
    ) -> None:
        if not callable(factory):
            raise UsageError(
                f"{_WHAT}: factory={shown(factory)} must be a class of optimizers, "
                f"such as torch.optim.AdamW, or a function that returns one"
            )
        if cut not in ("auto", "elements", "parameters"):
            raise UsageError(
                f"{_WHAT}: cut={shown(cut)} must be 'auto', 'elements' or 'parameters'"
            )
        if type(bucket_nbytes) is not int or bucket_nbytes < 1:
            raise UsageError(
                f"{_WHAT}: bucket_nbytes={shown(bucket_nbytes)} must be an integer of "
                f"at least 1"
            )
        self._factory = functools.partial(factory, **arguments)
        self._cut, self._nbytes, self._comm = cut, bucket_nbytes, comm
        self._loads = [0] * comm.size
        self._buffers = Buffers()
        self.kind: type[optim.Optimizer] | None = None
        """The class of the optimizers, once one was made."""

    @property
    def is_whole(self) -> bool:
        """True if each parameter is updated by one rank as a whole."""
        if self._cut == "auto":
            return self.kind not in ELEMENTWISE
        return self._cut == "parameters"

    def fill_in(self, groups: Sequence[Group]) -> Group:
        """Add an optimizer's own settings to groups; return its defaults.

        Raises UsageError for optimizers that cannot be divided, and the errors of the
        optimizer's own checks.
        """
        # With parameters of no elements: some optimizers allocate their state at once.
        small = [
            {**group, "params": [_stand_in(each) for each in group["params"]]}
            for group in groups
        ]
        made = self._factory(small)
        if not isinstance(made, optim.Optimizer):
            raise UsageError(
                f"{_WHAT}: factory returned {shown(made)}; expected an optimizer of "
                f"torch"
            )
        for kind, why in _REFUSED.items():
            if isinstance(made, kind):
                raise UsageError(
                    f"{_WHAT}: {type(made).__name__} cannot be divided: {why}"
                )
        self.kind = type(made)
        for group, found in zip(groups, made.param_groups, strict=True):
            for name, value in options_of(found).items():
                group.setdefault(name, value)
        return dict(made.defaults)

    def buckets(self, number: int, group: Group, first: int) -> list[Bucket]:
        """Return a group's buckets, those of its first parameters first.

        Args:
            number: of the group.
            group: with all settings.
            first: the number of its first parameter among all groups' ones.
        """
        parameters: list[Tensor] = group["params"]
        alike: dict[tuple[Any, ...], list[int]] = {}
        for at, parameter in enumerate(parameters):
            _check_parameter(first + at, parameter)
            alike.setdefault((parameter.dtype, parameter.device), []).append(at)
        nbytes = [each.nbytes for each in parameters]
        found: list[tuple[int, ...]] = [
            (at,) for at in range(len(nbytes)) if nbytes[at] >= ALONE_NBYTES
        ]
        for order in alike.values():
            small = [at for at in order if nbytes[at] < ALONE_NBYTES]
            found += cut(small, nbytes, self._nbytes)
        made = []
        rank = owners(nbytes, self._loads) if self.is_whole else []
        for bucket in sorted(found):
            counts = [parameters[at].numel() for at in bucket]
            if self.is_whole:
                layout = cut_whole(counts, [rank[at] for at in bucket], self._comm.size)
            else:
                layout = cut_evenly(counts, self._comm.size)
            made.append(self._bucket(number, group, first, bucket, layout))
        return made

    def _bucket(
        self, number: int, group: Group, first: int, places: Sequence[int], layout: Any
    ) -> Bucket:
        bucket = Bucket(
            number,
            [first + at for at in places],
            [group["params"][at] for at in places],
            layout,
            self._comm if self._comm.size > 1 else None,
            self._buffers,
            is_whole=self.is_whole,
        )
        if bucket.pieces:
            views = [view for _, view in bucket.pieces]
            bucket.optimizer = self._factory([{**options_of(group), "params": views}])
        return bucket


def _stand_in(parameter: Tensor) -> Tensor:
    """Return a parameter of the same type, device and number of axes, without data."""
    empty = parameter.detach().new_empty((0,) * parameter.dim())
    is_trained = empty.is_floating_point() or empty.is_complex()
    return nn.Parameter(empty, requires_grad=is_trained)


def _check_parameter(number: int, parameter: Tensor) -> None:
    """Raise UsageError for a parameter whose memory cannot be cut."""
    if hasattr(parameter, "to_local"):
        raise UsageError(
            f"{_WHAT}: parameter {number} is a DTensor, which is cut already: use the "
            f"plain optimizer with it"
        )
    if parameter.layout != torch.strided:
        raise UsageError(
            f"{_WHAT}: parameter {number} is stored as {parameter.layout}; expected a "
            f"dense tensor"
        )
    if not is_dense(parameter):
        raise UsageError(
            f"{_WHAT}: parameter {number}, of shape {tuple(parameter.shape)} and "
            f"strides {parameter.stride()}, does not fill a run of memory; make it of "
            f"x.contiguous()"
        )


def check_apart(parameters: Sequence[Tensor]) -> None:
    """Raise UsageError where two parameters share memory."""
    runs = sorted(
        (each.device.type, each.device.index or 0, each.data_ptr(), each.nbytes, number)
        for number, each in enumerate(parameters)
        if each.nbytes
    )
    for one, other in itertools.pairwise(runs):
        if one[:2] == other[:2] and one[2] + one[3] > other[2]:
            raise UsageError(
                f"{_WHAT}: parameters {one[4]} and {other[4]} share memory, so two "
                f"ranks would update the same elements; share the parameter itself "
                f"between modules"
            )
