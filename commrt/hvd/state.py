# SPDX-License-Identifier: Apache-2.0
"""Objects, parameters and the state of optimizers, sent from one rank to the others."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch

from commrt.errors import UsageError, shown
from commrt.hvd.current import current
from commrt.hvd.handles import synchronize
from commrt.hvd.operations import broadcast_
from commrt.hvd.process_sets import ProcessSet, global_process_set
from commrt.hvd.submitting import broadcast_async_, refusing, rows_allgather_async

__all__ = [
    "allgather_object",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
]

Tensor: TypeAlias = torch.Tensor
Parameters: TypeAlias = Mapping[str, Any] | Sequence[Any]


def _packed(what: str, value: Any) -> Tensor:
    try:
        data = pickle.dumps(value)
    except Exception as error:
        raise UsageError(
            f"{what}: {shown(value)} cannot be pickled: {error}"
        ) from error
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the object of ``root_rank``, which is pickled for the others.

    Args:
        obj: used on ``root_rank`` alone, which returns it.
        root_rank: the rank that has it, as ``hvd.rank()`` numbers ranks.
        name: equal on all ranks; None: as of unnamed operations.
        process_set: the ranks.

    Only for ranks that trust each other, as all pickles.
    """
    is_root = current().comm.rank == root_rank
    data = torch.empty(0, dtype=torch.uint8)
    of_size = None if name is None else f"{name}.sz"
    if is_root:
        with refusing("broadcast_object", "broadcast", of_size, process_set):
            data = _packed("hvd.broadcast_object", obj)
    size = torch.tensor([len(data)])
    broadcast_(size, root_rank, of_size, process_set)
    if not is_root:
        data = torch.empty(int(size), dtype=torch.uint8)
    broadcast_(data, root_rank, None if name is None else f"{name}.t", process_set)
    return obj if is_root else pickle.loads(data.numpy())


def allgather_object(
    obj: Any,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Return the objects of all ranks, in their order. Arguments as above."""
    with refusing("allgather_object", "allgather", name, process_set):
        data = _packed("hvd.allgather_object", obj)
    handle = rows_allgather_async([data], name, process_set)
    (everything,), (sizes,) = synchronize(handle)
    return [pickle.loads(each.numpy()) for each in everything.split(sizes)]


def broadcast_parameters(params: Parameters, root_rank: int = 0) -> None:
    """Give parameters the values of ``root_rank``, in place.

    Args:
        params: a model's ``state_dict()``, or a list of its ``named_parameters()`` or
            ``parameters()``. Values that are no tensors are left alone.
        root_rank: the rank that has the values.

    Collective over all ranks, with the same parameters. Tensors go together in buckets.
    """
    what = "hvd.broadcast_parameters"
    named: list[tuple[str | None, Any]]
    if isinstance(params, Mapping):
        named = sorted(params.items())
    elif isinstance(params, Sequence) or hasattr(params, "__next__"):
        named = [each if isinstance(each, tuple) else (None, each) for each in params]
    else:
        raise UsageError(
            f"{what}: params={shown(params)} must be a state_dict, or a list of "
            f"parameters"
        )
    handles = [
        broadcast_async_(
            value, root_rank, None if name is None else f"broadcast.{name}"
        )
        for name, value in named
        if isinstance(value, torch.Tensor)
    ]
    for handle in handles:
        synchronize(handle)


class _Described(NamedTuple):
    """A tensor's place in a state that is sent without tensors."""

    dtype: torch.dtype
    shape: tuple[int, ...]


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int = 0, model: Any = None
) -> None:
    """Give an optimizer the state and the options of ``root_rank``'s.

    Args:
        optimizer: of equal parameters on all ranks. Its state may be empty here, or
            there.
        root_rank: the rank that has the state, such as one that has loaded a file.
        model: ignored; Horovod needs it for sparse parameters.

    Collective over all ranks. The structure is pickled, and tensors are broadcast in
    buckets. No step is taken to make a state, so parameters stay as they are.
    """
    del model
    is_root = current().comm.rank == root_rank
    state, described = None, None
    found: list[Tensor] = []
    if is_root:
        what = "broadcast_optimizer_state"
        with refusing(what, "broadcast", None, global_process_set):
            state = optimizer.state_dict()
            described = _without_tensors(state, found)
    told = broadcast_object(described, root_rank)
    if not is_root:
        state = _with_tensors(told, found)
    # Root's own tensors are sent from where they are: on the other ranks they are new.
    sent = [each.detach().cpu() for each in found]
    handles = [broadcast_async_(each, root_rank) for each in sent]
    for handle in handles:
        synchronize(handle)
    if not is_root:
        assert state is not None
        optimizer.load_state_dict(state)


def _without_tensors(value: Any, found: list[Tensor]) -> Any:
    """Return a state with descriptions in the place of tensors, which are added."""
    if isinstance(value, torch.Tensor):
        found.append(value)
        return _Described(value.dtype, tuple(value.shape))
    if isinstance(value, dict):
        return {key: _without_tensors(each, found) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_without_tensors(each, found) for each in value)
    return value


def _with_tensors(value: Any, made: list[Tensor]) -> Any:
    """Return a state with new tensors where descriptions were; these are added."""
    if isinstance(value, _Described):
        made.append(torch.zeros(value.shape, dtype=value.dtype))
        return made[-1]
    if isinstance(value, dict):
        return {key: _with_tensors(each, made) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_with_tensors(each, made) for each in value)
    return value
