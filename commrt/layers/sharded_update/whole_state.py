# SPDX-License-Identifier: Apache-2.0
"""The state of a sharded optimizer in the form of the plain one, and back."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch

from commrt.comm import Communicator
from commrt.errors import UsageError, shown
from commrt.layers.sharded_update.bucket import Bucket, flat_view
from commrt.layers.sharded_update.making import options_of
from commrt.layers.sharded_update.meeting import meet

__all__ = ["gathered_state", "load_parts"]

Tensor: TypeAlias = torch.Tensor
State: TypeAlias = dict[str, Any]
_WHAT = "ShardedOptimizer"


class _Part(NamedTuple):
    """The facts of a tensor that a rank has a part of, or all."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    is_cut: bool
    """True if it has an element for each one of the parameter's piece."""


def gathered_state(
    buckets: Sequence[Bucket], comm: Communicator | None, root: int | None
) -> dict[int, State] | None:
    """Return the state of each parameter by its number, on the root; collective.

    Args:
        buckets: of this rank.
        comm: the ranks; None: one rank.
        root: the rank that gets it; None: all ranks.

    Raises UsageError, on all ranks, for a state that is no tensors and numbers.
    """
    own: dict[int, State] = {}
    error = None
    try:
        for bucket in buckets:
            for piece, view in bucket.pieces:
                state = _state_of(bucket, view)
                if state:
                    number = bucket.numbers[piece.index]
                    own[number] = {
                        name: _fact(number, name, value, view, bucket.is_whole)
                        for name, value in state.items()
                    }
    except Exception as caught:  # noqa: BLE001  the others wait to hear of it
        error = caught
    meet(comm, f"{_WHAT}.whole_state_dict", error, "")
    every = [own] if comm is None else comm.allgather_object(own)
    is_root = root is None or comm is None or comm.rank == root
    found: dict[int, State] = {}
    for bucket in buckets:
        for at, number in enumerate(bucket.numbers):
            holders = [rank for rank, facts in enumerate(every) if number in facts]
            for name in every[holders[0]][number] if holders else ():
                facts = [facts.get(number, {}).get(name) for facts in every]
                value = _gathered(bucket, at, name, facts, comm, root)
                if is_root:
                    found.setdefault(number, {})[name] = value
    return {number: found[number] for number in sorted(found)} if is_root else None


def _state_of(bucket: Bucket, view: Tensor) -> State:
    """Return the state of a piece; empty before its first step."""
    if bucket.optimizer is None:
        return {}
    state: State = bucket.optimizer.state.get(view, {})
    return state


def _fact(number: int, name: str, value: Any, view: Tensor, is_whole: bool) -> Any:
    """Return what other ranks must know of an entry: a part's facts, or the entry."""
    if isinstance(value, torch.Tensor):
        if value.layout != torch.strided:
            raise UsageError(
                f"{_WHAT}.whole_state_dict: the state {name!r} of parameter {number} "
                f"is stored as {value.layout}; expected a dense tensor"
            )
        if value.dim() == 0:
            return value.detach().cpu()
        is_cut = not is_whole and value.shape == view.shape
        return _Part(tuple(value.shape), value.dtype, is_cut)
    if isinstance(value, list | tuple | dict) or callable(value):
        raise UsageError(
            f"{_WHAT}.whole_state_dict: the state {name!r} of parameter {number} is "
            f"{shown(value)}; expected a tensor or a number"
        )
    return value


def _gathered(
    bucket: Bucket,
    at: int,
    name: str,
    facts: Sequence[Any],
    comm: Communicator | None,
    root: int | None,
) -> Any:
    """Return an entry of a parameter's state, whole on the root."""
    holders = [rank for rank, fact in enumerate(facts) if fact is not None]
    first = facts[holders[0]] if holders else None
    if not isinstance(first, _Part):
        return first
    # An entry that is not cut is equal on all ranks that have it, so one of them sends.
    senders = holders if first.is_cut else holders[:1]
    counts = [
        torch.Size(facts[rank].shape).numel() if rank in senders else 0
        for rank in range(len(facts))
    ]
    rank = 0 if comm is None else comm.rank
    part = torch.empty(0, dtype=first.dtype)
    for piece, view in bucket.pieces:
        if piece.index == at and rank in senders:
            value = _state_of(bucket, view)[name].detach()
            if value.shape == view.shape:
                value = flat_view(
                    torch.empty_like(view, dtype=value.dtype).copy_(value)
                )
            part = value.contiguous().view(-1).cpu()
    whole: Tensor | None = part
    if comm is not None:
        is_root = root is None or rank == root
        whole = torch.empty(sum(counts), dtype=first.dtype) if is_root else None
        if root is None:
            comm.allgatherv(part, counts=counts, out=whole)
        else:
            comm.gatherv(part, root, counts=counts, out=whole)
    if whole is None:
        return None
    parameter = bucket.parameters[at]
    if first.is_cut or (first.shape == tuple(parameter.shape)):
        made = torch.empty_strided(
            parameter.shape, parameter.stride(), dtype=first.dtype
        )
        flat_view(made).copy_(whole)
        return made
    return whole.clone().view(first.shape)


def load_parts(
    buckets: Sequence[Bucket],
    groups: Sequence[Mapping[str, Any]],
    given: Mapping[str, Any],
) -> list[State]:
    """Give each bucket's optimizer its part of a whole state; return the groups.

    Args:
        buckets: of this rank.
        groups: of the optimizer.
        given: the form of torch's ``state_dict``.

    Raises UsageError for a state of other groups or parameters, before it takes any.
    """
    if not isinstance(given, Mapping) or not {"state", "param_groups"} <= {*given}:
        raise UsageError(
            f"{_WHAT}.load_state_dict: state={shown(given)} must have 'state' and "
            f"'param_groups', as an optimizer's state_dict()"
        )
    found = copy.deepcopy([*given["param_groups"]])
    sizes = [len(group["params"]) for group in groups]
    theirs = [len(group["params"]) for group in found]
    if sizes != theirs:
        raise UsageError(
            f"{_WHAT}.load_state_dict: the state has groups of {theirs} parameters, "
            f"and the optimizer of {sizes}; load the state of an equal model"
        )
    ids = [each for group in found for each in group["params"]]
    parts = [_part_of(bucket, [given["state"].get(each, {}) for each in ids])
             for bucket in buckets]  # fmt: skip
    for bucket, part in zip(buckets, parts, strict=True):
        if bucket.optimizer is None:
            continue
        places = [*range(len(bucket.pieces))]
        group = {**options_of(found[bucket.group]), "params": places}
        bucket.optimizer.load_state_dict({"state": part, "param_groups": [group]})
        _keep_types(bucket, part)
    return found


def _part_of(bucket: Bucket, states: Sequence[Mapping[str, Any]]) -> dict[int, State]:
    """Return the entries of this rank's pieces, by their places."""
    found = {}
    for number, parameter in zip(bucket.numbers, bucket.parameters, strict=True):
        for name, value in states[number].items() if not bucket.is_whole else ():
            is_like = isinstance(value, torch.Tensor) and value.dim() > 0
            if is_like and value.shape != parameter.shape:
                raise UsageError(
                    f"{_WHAT}.load_state_dict: the state {name!r} of parameter "
                    f"{number} has the shape {tuple(value.shape)}, and the parameter "
                    f"{tuple(parameter.shape)}; they must be equal"
                )
    for place, (piece, _) in enumerate(bucket.pieces):
        number = bucket.numbers[piece.index]
        parameter = bucket.parameters[piece.index]
        part: State = {}
        for name, value in states[number].items():
            is_like = isinstance(value, torch.Tensor) and value.dim() > 0
            if is_like and not bucket.is_whole:
                made = torch.empty_strided(
                    *(parameter.shape, parameter.stride()), dtype=value.dtype
                )
                value = flat_view(made.copy_(value))[piece.low : piece.high].clone()
            elif isinstance(value, torch.Tensor):
                value = value.clone()
            part[name] = value
        if part:
            found[place] = part
    return found


def _keep_types(bucket: Bucket, part: Mapping[int, State]) -> None:
    """Restore tensors that torch has converted to the type of their parameter.

    An optimizer may keep sums in float32 for parameters in bfloat16.
    """
    assert bucket.optimizer is not None
    for place, state in part.items():
        held = bucket.optimizer.state[bucket.pieces[place][1]]
        for name, value in state.items():
            mine = held.get(name)
            if isinstance(value, torch.Tensor) and mine.dtype != value.dtype:
                held[name] = value.to(mine.device)
