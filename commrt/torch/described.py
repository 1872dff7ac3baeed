# SPDX-License-Identifier: Apache-2.0
"""Descriptions of torch's calls in check mode: fields to compare, and words.

Shapes are compared as torch's own wrapper for ``TORCH_DISTRIBUTED_DEBUG=DETAIL`` does
it, so that (2, 3) broadcast into (6,) is an error, although NCCL would take it. Where a
list has tensors of different shapes, one for each rank, all ranks must have the same
list. Lengths of an all-to-all concern pairs of ranks only. So here only its types are
compared, and lengths by pairs later. Roots and reductions, which that wrapper leaves
out, are compared, too.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from commrt.errors import UsageError
from commrt.torch.options import one, tensor_list
from commrt.torch.reductions import PLAIN, reduction_of

__all__ = ["DESCRIBED", "Described", "key_of", "tensor_in_words"]

Arguments = Mapping[str, Any]
Tensors = Sequence[torch.Tensor]
_SPLITS = ("output_splits", "input_splits")


@dataclass(frozen=True)
class Described:
    """One rank's call of a collective."""

    operation: str
    """torch's name of it."""
    alike: Tensors
    """Tensors whose shapes and types are the same on all ranks."""
    in_words: Sequence[str]
    """All tensors that the rank gives, by the names of their arguments."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Other fields that are equal on all ranks."""
    only_types: bool = False
    """True if shapes may differ."""

    def compared(self) -> dict[str, Any]:
        """Return the facts that must be equal on all ranks, as texts of any length."""
        found: dict[str, Any] = {"operation": self.operation, **self.fields}
        if not self.only_types:
            found["shapes"] = ", ".join(_shape(x) for x in self.alike)
        found["dtype"] = ", ".join(_in_runs([_dtype(x) for x in self.alike]))
        found["memory"] = ", ".join(sorted({x.device.type for x in self.alike}))
        return found

    def call(self) -> list[str]:
        """Return the call in words: its name, then its arguments."""
        settings = [f"{name}={value}" for name, value in self.fields.items()]
        return [self.operation, *self.in_words, *settings]


def tensor_in_words(x: torch.Tensor) -> str:
    """Return type, shape and place of a tensor."""
    on = "" if x.is_cpu else f" on {x.device}"
    return f"{_dtype(x)}{_shape(x)}{on}"


def _dtype(x: torch.Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")


def _shape(x: torch.Tensor) -> str:
    if x.layout is torch.strided:
        return str(list(x.shape))
    how = str(x.layout).removeprefix("torch.")
    return f"{list(x.shape)} {how} of {x.sparse_dim()} dimensions"


def _in_runs(texts: Sequence[str]) -> list[str]:
    """Return equal neighbours as one, with their number."""
    runs: list[tuple[str, int]] = []
    for text in texts:
        if runs and runs[-1][0] == text:
            runs[-1] = (text, runs[-1][1] + 1)
        else:
            runs.append((text, 1))
    return [text if count == 1 else f"{count} {text}" for text, count in runs]


def _words(name: str, tensors: Any) -> list[str]:
    """Return an argument in words: a tensor, a list, or a list of lists."""
    if isinstance(tensors, torch.Tensor):
        return [f"{name}={tensor_in_words(tensors)}"]
    return [
        text for i, each in enumerate(tensors) for text in _words(f"{name}[{i}]", each)
    ]


def _of_opts(arguments: Arguments, name: str) -> Any:
    """Return an option, which may stand in place of the options object."""
    opts = arguments.get("opts")
    return getattr(opts, name, opts)


def _op(arguments: Arguments) -> str:
    """Return the reduction's name."""
    op = _of_opts(arguments, "reduceOp")
    return "SUM" if op is None else reduction_of(op).name.upper()


def _root(arguments: Arguments) -> int:
    root = _of_opts(arguments, "rootRank")
    return 0 if root is None else int(root)


def _sizes(splits: Any) -> list[Any]:
    """Return splits as a list; Megatron-core passes arrays of numpy."""
    if isinstance(splits, np.ndarray):
        return list(splits.tolist())
    return list(splits or [])


def _are_alike(tensors: Tensors) -> bool:
    return len({tuple(x.shape) for x in tensors}) <= 1


# -- one for each operation ----------------------------------------------------------


def _allreduce(arguments: Arguments) -> Described:
    x = one("all_reduce", arguments["tensors"])
    fields = {"op": _op(arguments)}
    return Described("all_reduce", [x], _words("tensor", x), fields)


def _allreduce_coalesced(arguments: Arguments) -> Described:
    tensors = arguments["tensors"]
    fields = {"op": _op(arguments)}
    words = _words("tensors", tensors)
    return Described("all_reduce_coalesced", tensors, words, fields)


def _reduce(arguments: Arguments) -> Described:
    x, opts = one("reduce", arguments["tensors"]), arguments.get("root")
    op = arguments.get("op") or getattr(opts, "reduceOp", None)
    root = getattr(opts, "rootRank", opts) or 0
    named = "SUM" if op is None else reduction_of(op).name.upper()
    return Described("reduce", [x], _words("tensor", x), {"op": named, "root": root})


def _broadcast(arguments: Arguments) -> Described:
    x = one("broadcast", arguments["tensors"])
    fields = {"root": _root(arguments)}
    return Described("broadcast", [x], _words("tensor", x), fields)


def _allgather(arguments: Arguments) -> Described:
    into, x = tensor_list(arguments["outputs"]), one("all_gather", arguments["inputs"])
    alike = [x] if _are_alike(into) else into
    words = [*_words("tensor_list", into), *_words("tensor", x)]
    return Described("all_gather", alike, words)


def _allgather_coalesced(arguments: Arguments) -> Described:
    lists, tensors = arguments["outputs"], arguments["inputs"]
    alike: list[torch.Tensor] = []
    for i, x in enumerate(tensors):
        of_ranks = [each[i] for each in lists]
        alike += [x] if _are_alike(of_ranks) else of_ranks
    words = [*_words("output_tensor_lists", lists), *_words("input_tensors", tensors)]
    return Described("all_gather_coalesced", alike, words)


def _all_gather_single(arguments: Arguments) -> Described:
    out, x = arguments["output"], arguments["input"]
    words = [*_words("output", out), *_words("input", x)]
    return Described("all_gather_single", [x], words)


def _all_gather_single_coalesced(arguments: Arguments) -> Described:
    outs, tensors = arguments["outputs"], arguments["inputs"]
    words = [*_words("outputs", outs), *_words("inputs", tensors)]
    return Described("all_gather_single_coalesced", tensors, words)


def _reduce_scatter(arguments: Arguments) -> Described:
    out, parts = (
        one("reduce_scatter", arguments["outputs"]),
        tensor_list(arguments["inputs"]),
    )
    alike = [out] if _are_alike(parts) else parts
    words = [*_words("output", out), *_words("input_list", parts)]
    return Described("reduce_scatter", alike, words, {"op": _op(arguments)})


def _reduce_scatter_single(arguments: Arguments) -> Described:
    out, x = arguments["output"], arguments["input"]
    words = [*_words("output", out), *_words("input", x)]
    fields = {"op": _op(arguments)}
    return Described("reduce_scatter_single", [x, out], words, fields)


def _reduce_scatter_single_coalesced(arguments: Arguments) -> Described:
    outs, tensors = arguments["outputs"], arguments["inputs"]
    words = [*_words("outputs", outs), *_words("inputs", tensors)]
    fields = {"op": _op(arguments)}
    alike = [*tensors, *outs]
    return Described("reduce_scatter_single_coalesced", alike, words, fields)


def _gather(arguments: Arguments) -> Described:
    x = one("gather", arguments["inputs"])
    words = [
        *_words("tensor", x),
        *_words("gather_list", tensor_list(arguments["outputs"])),
    ]
    return Described("gather", [x], words, {"root": _root(arguments)})


def _gather_single(arguments: Arguments) -> Described:
    out, x = arguments["output"], arguments["input"]
    words = [*_words("tensor", x), *_words("gather_tensor", out)]
    return Described("gather_single", [x], words, {"root": _root(arguments)})


def _scatter(arguments: Arguments) -> Described:
    out = one("scatter", arguments["outputs"])
    parts = tensor_list(arguments["inputs"])
    words = [*_words("tensor", out), *_words("scatter_list", parts)]
    return Described("scatter", [out], words, {"root": _root(arguments)})


def _all_to_all_single(arguments: Arguments) -> Described:
    out, x = arguments["output"], arguments["input"]
    splits = {name: _sizes(arguments.get(name)) for name in _SPLITS}
    words = [*_words("output", out), *_words("input", x)]
    words += [f"{name}={sizes}" for name, sizes in splits.items() if sizes]
    how = "given" if any(splits.values()) else "none"
    name = "all_to_all_single"
    return Described(name, [x], words, {"splits": how}, only_types=True)


def _alltoall(arguments: Arguments) -> Described:
    outs, tensors = arguments["outputs"], arguments["inputs"]
    words = [*_words("output_tensor_list", outs), *_words("input_tensor_list", tensors)]
    return Described("all_to_all", tensors, words, only_types=True)


def _barrier(arguments: Arguments) -> Described:
    return Described("barrier", [], [], only_types=True)


DESCRIBED: dict[str, Callable[[Arguments], Described]] = {
    "allreduce": _allreduce,
    "allreduce_coalesced": _allreduce_coalesced,
    "reduce": _reduce,
    "broadcast": _broadcast,
    "allgather": _allgather,
    "allgather_coalesced": _allgather_coalesced,
    "all_gather_single": _all_gather_single,
    "_allgather_base": _all_gather_single,
    "all_gather_single_coalesced": _all_gather_single_coalesced,
    "allgather_into_tensor_coalesced": _all_gather_single_coalesced,
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_single": _reduce_scatter_single,
    "_reduce_scatter_base": _reduce_scatter_single,
    "reduce_scatter_single_coalesced": _reduce_scatter_single_coalesced,
    "reduce_scatter_tensor_coalesced": _reduce_scatter_single_coalesced,
    "gather": _gather,
    "gather_single": _gather_single,
    "gather_into_tensor": _gather_single,
    "scatter": _scatter,
    "all_to_all_single": _all_to_all_single,
    "alltoall_base": _all_to_all_single,
    "alltoall": _alltoall,
    "barrier": _barrier,
}
"""Functions that describe a call, by the names of a group's methods."""


# -- keys of descriptions ------------------------------------------------------------

_LONGEST = 256
"""Tensors of a list that a key holds."""
_OPS = (dist.ReduceOp, dist.ReduceOp.RedOpType)
_OPTIONS = {
    kind: (hasattr(kind, "reduceOp"), hasattr(kind, "rootRank"))
    for kind in (
        c10d.AllgatherOptions,
        c10d.AllreduceCoalescedOptions,
        c10d.AllreduceOptions,
        c10d.AllToAllOptions,
        c10d.BarrierOptions,
        c10d.BroadcastOptions,
        c10d.GatherOptions,
        c10d.ReduceOptions,
        c10d.ReduceScatterOptions,
        c10d.ScatterOptions,
    )
}
"""Classes of torch's options: has it a reduction, and has it a root?"""


class _NoKeyError(Exception):
    """A call has an argument that no key can hold."""


def key_of(name: str, arguments: Arguments) -> Hashable:
    """Return a key of a call: calls with equal keys have equal fields.

    None for a call of unusual arguments, which is to be described each time.
    """
    key: list[Hashable] = [name]
    known = _FACTS_OF_TYPES if name in _ONLY_TYPES else _FACTS
    try:
        for argument, value in arguments.items():
            facts = known.get(argument)
            if facts is not None:
                key += argument, facts(value)
    except _NoKeyError:
        return None
    return tuple(key)


def _facts_of_tensors(value: Any) -> Hashable:
    """Return what fields hold of a tensor, or of all tensors of a list."""
    if isinstance(value, list):
        if len(value) > _LONGEST:
            raise _NoKeyError
        return tuple([_facts_of_tensors(each) for each in value])
    types = _facts_of_types(value)
    if (layout := value.layout) is torch.strided:
        return value.shape, types
    return value.shape, types, layout, value.sparse_dim()


def _facts_of_types(value: Any) -> Hashable:
    """Return what fields hold of a tensor whose shape may differ."""
    if not isinstance(value, torch.Tensor):
        raise _NoKeyError
    return value.dtype, value.is_cpu or value.device.type


def _facts_of_options(value: Any) -> Hashable:
    """Return reduction and root of options, or of what stands in their place."""
    kind = type(value)
    if (has := _OPTIONS.get(kind)) is not None:
        op = _facts_of_op(value.reduceOp) if has[0] else None
        return kind, op, value.rootRank if has[1] else None
    if kind in _OPS:
        return _facts_of_op(value)
    if value is None or kind is int:
        return value  # type: ignore[no-any-return]
    raise _NoKeyError


def _facts_of_op(op: Any) -> str:
    if (name := PLAIN.get(hash(op))) is not None:
        return name
    try:
        return reduction_of(op).name
    except UsageError:  # the description raises it in its turn
        raise _NoKeyError from None


def _facts_of_splits(value: Any) -> bool:
    """Return whether there are any: their numbers are in words only."""
    if value is not None and not isinstance(value, list | tuple | np.ndarray):
        raise _NoKeyError
    return value is not None and len(value) > 0


_FACTS: dict[str, Callable[[Any], Hashable]] = {
    **dict.fromkeys(
        ("tensors", "outputs", "inputs", "output", "input"), _facts_of_tensors
    ),
    **dict.fromkeys(("opts", "root", "op"), _facts_of_options),
    **dict.fromkeys(_SPLITS, _facts_of_splits),
}
"""Functions that return what fields hold of an argument; others are not in fields."""
_ONLY_TYPES = ("all_to_all_single", "alltoall_base")
"""Calls whose tensors have other lengths in every step where tokens are routed."""
_FACTS_OF_TYPES = {
    name: _facts_of_types if facts is _facts_of_tensors else facts
    for name, facts in _FACTS.items()
}
