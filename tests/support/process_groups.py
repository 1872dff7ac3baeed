# SPDX-License-Identifier: Apache-2.0
"""For tests of process groups: one scenario on two backends, and what differs.

Runs on torchrun's ranks, whose processes have everything of torch at hand.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

LIMIT = timedelta(seconds=300)
Scenario = Callable[[], Any]
_KEPT: list[Any] = []
"""Groups of gloo: one whose last reference goes with a future's callback is destroyed
by its own thread, which ends the process ("Resource deadlock avoided")."""


@contextmanager
def job(backend: str = "commrt", name: str = "job", **options: Any) -> Iterator[int]:
    """Give this process's rank in a default group, which ends with the context."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.PrefixStore(f"{name}/{backend}", _store())
    limit = options.pop("timeout", LIMIT)
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=size, timeout=limit, **options
    )
    if backend == "gloo":
        _KEPT.append(dist.group.WORLD)
    try:
        yield rank
    finally:
        dist.destroy_process_group()


def _store() -> Any:
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.TCPStore(host, port, is_master=False, timeout=LIMIT)


def differences(scenarios: list[Scenario], tolerance: float = 1e-5) -> list[str]:
    """Run scenarios on gloo and on commrt; return what differs, by their names."""
    found = []
    for scenario in scenarios:
        results = []
        for backend in ("gloo", "commrt"):
            with job(backend, scenario.__name__):
                torch.manual_seed(1234)
                try:
                    results.append(scenario())
                except Exception as error:  # noqa: BLE001  names the scenario
                    found.append(f"{scenario.__name__} on {backend}: {error!r}")
                    results.append(None)
        if None not in results:
            where = unequal(*results, tolerance)
            found += [f"{scenario.__name__}: {one}" for one in where]
    return found


def unequal(a: Any, b: Any, tolerance: float, where: str = "result") -> list[str]:
    """Return where two nested results differ."""
    if isinstance(a, dict):
        parts = [(f"{where}[{key!r}]", a[key], b.get(key)) for key in a]
    elif isinstance(a, list | tuple) and isinstance(b, list | tuple):
        if len(a) != len(b):
            return [f"{where}: {len(a)} and {len(b)} items"]
        pairs = enumerate(zip(a, b, strict=True))
        parts = [(f"{where}[{i}]", one, other) for i, (one, other) in pairs]
    else:
        return [] if _same(a, b, tolerance) else [f"{where}: {a} and {b}"]
    return [text for name, x, y in parts for text in unequal(x, y, tolerance, name)]


def _same(a: Any, b: Any, tolerance: float) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        if (a.dtype, a.shape, a.layout) != (b.dtype, b.shape, b.layout):
            return False
        a, b = a.detach().to_dense(), b.detach().to_dense()
        if a.dtype in (torch.float16, torch.bfloat16):
            # A mean is scaled first here, and last by gloo: it is rounded once more.
            tolerance = max(tolerance, torch.finfo(a.dtype).eps)
        return bool(torch.allclose(a, b, rtol=tolerance, atol=tolerance))
    if isinstance(a, float) and isinstance(b, float):
        return abs(a - b) <= tolerance * max(1.0, abs(a))
    return bool(a == b)
