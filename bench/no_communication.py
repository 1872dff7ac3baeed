# SPDX-License-Identifier: Apache-2.0
"""A process group that moves nothing: a rank's own values stand for everybody's.

For the time of a training step without communication. Results are those of a job whose
ranks all have the same values, but that nothing is added up. torch's own "fake" group
cannot serve DDP, whose reducer wants a result of every future.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["BACKEND", "register"]

BACKEND = "commrt_no_communication"


def register() -> None:
    """Let torch know the backend; once in a process."""
    if BACKEND in dist.Backend.backend_list:
        return

    def made(options: Any, _: Any) -> _NoCommunication:
        return _NoCommunication(options.group_rank, options.group_size)

    dist.Backend.register_backend(BACKEND, made, extended_api=True, devices=["cpu"])


class _Done(dist.Work):  # type: ignore[misc]  # torch is not looked into
    """Work that has been done."""

    def __init__(self, outputs: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._outputs = list(outputs)

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> Any:
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(self._outputs)
        return future


class _NoCommunication(dist.ProcessGroup):  # type: ignore[misc]
    """Has the methods that DDP and FSDP2 call."""

    def __init__(self, rank: int, size: int) -> None:
        dist.ProcessGroup.__init__(self, rank, size)
        self._rank, self._size = rank, size
        self._name = self._desc = ""

    def getBackendName(self) -> str:  # noqa: N802  torch's name
        return BACKEND

    def getGroupName(self) -> str:  # noqa: N802
        return self._name

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self._name = name

    def getGroupDesc(self) -> str:  # noqa: N802
        return self._desc

    def setGroupDesc(self, desc: str) -> None:  # noqa: N802
        self._desc = desc

    _set_group_name, _set_group_desc = setGroupName, setGroupDesc
    group_name, group_desc = property(getGroupName), property(getGroupDesc)

    def allreduce(self, tensors: Any, opts: Any = None) -> _Done:
        return _Done(tensors)

    def broadcast(self, tensors: Any, opts: Any = None) -> _Done:
        return _Done(tensors)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> _Done:
        for out in outputs[0]:
            out.copy_(inputs[0])
        return _Done(outputs[0])

    def all_gather_single(self, output: Any, input: Any, opts: Any = None) -> _Done:
        # All parts are filled: what memory held before could be slow to compute with.
        for part in output.view(self._size, -1):
            if part.data_ptr() != input.data_ptr():
                part.copy_(input.reshape(-1))
        return _Done([output])

    _allgather_base = all_gather_single

    def reduce_scatter_single(self, output: Any, input: Any, opts: Any = None) -> _Done:
        output.view(-1).copy_(input.view(self._size, -1)[self._rank])
        return _Done([output])

    _reduce_scatter_base = reduce_scatter_single

    def barrier(self, opts: Any = None) -> _Done:
        return _Done([])
