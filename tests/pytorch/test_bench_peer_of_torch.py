# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks' peer ``torch_nccl`` calls, this torch's functions take."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.distributed as dist

from commrt.bench.peer_torch_nccl import TorchNcclPeer

COUNT = 8


class Signatures:
    """torch.distributed; calls are held against its functions' parameters alone."""

    def __init__(self) -> None:
        self.called: dict[str, dict[str, Any]] = {}

    def __getattr__(self, name: str) -> Callable[..., Any]:
        signature = inspect.signature(getattr(dist, name))

        def call(*given: Any, **named: Any) -> Any:
            self.called[name] = dict(signature.bind(*given, **named).arguments)
            return SimpleNamespace(wait=lambda: None)

        return call


def test_its_calls_fit_this_torch() -> None:
    has = Signatures()
    cuda = SimpleNamespace(
        set_device=lambda device: None,
        ExternalStream=lambda handle, device: inspect.signature(
            torch.cuda.ExternalStream.__new__
        ).bind(torch.cuda.ExternalStream, handle, device),
        set_stream=lambda stream: None,
    )
    library = SimpleNamespace(
        cuda=cuda,
        device=torch.device,
        as_tensor=lambda array, device: torch.zeros(array.size),
    )
    memory = SimpleNamespace(
        device=SimpleNamespace(ordinal=0),
        stream=SimpleNamespace(handle=16),
        drain=lambda: None,
    )
    peer = SimpleNamespace(comm=SimpleNamespace(rank=1, size=2), memory=memory)
    peer.rank, peer.size, peer.agree = 1, 2, lambda value: value
    made = TorchNcclPeer(cast(Any, peer), library, has)
    told = has.called["init_process_group"]
    assert (told["backend"], told["rank"], told["world_size"]) == ("nccl", 1, 2)
    x, out = SimpleNamespace(size=COUNT), SimpleNamespace(size=2 * COUNT)
    for coll, name in (
        ("allreduce", "all_reduce"),
        ("bcast", "broadcast"),
        ("reduce", "reduce"),
        ("allgather", "all_gather_into_tensor"),
        ("reduce_scatter", "reduce_scatter_tensor"),
        ("alltoall", "all_to_all_single"),
    ):
        ends = (out, x) if coll == "reduce_scatter" else (x, out)
        made.bind(coll, *cast(Any, ends), 1)()
        told = has.called[name]
        assert "async_op" not in told
        if "output" in told or "output_tensor" in told:
            output = told.get("output", told.get("output_tensor"))
            assert output.numel() == ends[1].size
        root = {"bcast": "src", "reduce": "dst"}.get(coll)
        assert root is None or told[root] == 1
        made.bind_outstanding(coll, cast(Any, [ends]), 1)()
        assert has.called[name]["async_op"] is True
    made.close()
    assert has.called["destroy_process_group"] == {}
