# SPDX-License-Identifier: Apache-2.0
"""The choice for a call of torch.distributed on commrt, and its reason."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from commrt.errors import UsageError
from commrt.select.policy import Explanation
from commrt.torch.group_options import commrt_name
from commrt.torch.joined_group import Joins
from commrt.torch.operands import KNOWN
from commrt.torch.per_call import ASKED
from commrt.torch.reductions import reduction_of
from commrt.vocabulary.operations import operation, rule_nbytes

if TYPE_CHECKING:
    from commrt.comm import Communicator

__all__ = ["explain"]

_WHAT = "commrt.torch.explain"
_DEVICES = {"cpu": "host", "cuda": "cuda"}
"""commrt's names of kinds of devices, by torch's."""


def explain(
    tensor: torch.Tensor,
    op: Any = "all_reduce",
    group: dist.ProcessGroup | None = None,
    *,
    reduction: Any = dist.ReduceOp.SUM,
    root: int = 0,
) -> Explanation:
    """Return what a call would run, why, and what was rejected; print it.

    Nothing is sent. Within ``commrt.torch.using`` it is the answer for a call there.

    Args:
        tensor: what this rank gives to the call; of a scatter what it gets.
        op: the operation, by torch's name or commrt's, or the function itself.
        group: of commrt's; None for the default group.
        reduction: of operations that reduce.
        root: in the group, of operations that have one.
    """
    chosen: Any = dist.group.WORLD if group is None else group
    comm = _communicator_of(chosen, tensor.device)
    coll = commrt_name(_WHAT, op)
    if tensor.layout is not torch.strided:
        raise UsageError(
            f"{_WHAT}: a tensor of layout {tensor.layout}: sparse allreduce chooses by "
            f"what the ranks hold, as the call is made"
        )
    if tensor.device.type not in _DEVICES:
        raise UsageError(
            f"{_WHAT}: a tensor on {tensor.device}: a call would refuse it; expected "
            f"one on {' or '.join(_DEVICES)}"
        )
    spec = operation(coll)
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    if spec.reduces and real.dtype not in KNOWN:
        raise UsageError(
            f"{_WHAT}: {coll} does not reduce {real.dtype}; expected one of "
            f"{', '.join(sorted(str(known) for known in KNOWN))}: cast the tensor"
        )
    dtype = KNOWN.get(real.dtype, "uint8")  # of what is only moved, the bytes are
    nbytes = tensor.nbytes * (comm.size if spec.rule_bytes == "block" else 1)
    return comm.explain(
        coll,
        rule_nbytes(coll, nbytes, comm.size),
        dtype=dtype,
        op=reduction_of(reduction).name if spec.reduces else "sum",
        root=root,
        device=_DEVICES[tensor.device.type],
        **(ASKED.get() or {}),
    )


def _communicator_of(group: dist.ProcessGroup, device: torch.device) -> Communicator:
    """Return commrt's communicator of a group, or of a device's backend in a group."""
    if isinstance(group, Joins):
        return group.communicator
    backend = None
    if isinstance(group, dist.ProcessGroup):
        with contextlib.suppress(RuntimeError):  # no backend for this device
            backend = group._get_backend(device)
    if not isinstance(backend, Joins):
        raise UsageError(
            f"{_WHAT}: {group!r}: expected a group of commrt's, such as the default "
            f"group after init_process_group('commrt')"
        )
    return backend.communicator
