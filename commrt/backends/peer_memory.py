# SPDX-License-Identifier: Apache-2.0
"""Exchange memory of ranks that share a node or a device, opened by CUDA IPC.

Each rank allocates one block on its device: flags, and two halves for what it
publishes. All others open it, once, so that a call exchanges nothing. Closing is
collective, too: memory is freed only when nobody has it open any more.

    exchange = PeerMemory.connect(bootstrap, range(size), device)
    exchange.run(plan, x=x.address, out=out.address, stream=stream)
    exchange.close()
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

from commrt import _native, env
from commrt.backends.stream_programs import StreamPlan
from commrt.bootstrap.base import Bootstrap
from commrt.errors import (
    BackendError,
    CaptureError,
    ClosedError,
    CommError,
    UsageError,
)

__all__ = ["HALF_NBYTES", "PeerMemory"]

HALF_NBYTES = 32 << 20
"""What a rank can publish at once; longer operations go in parts."""
_LINE_NBYTES = 64


class PeerMemory:
    """One rank's part; ``open`` what the others have, then ``run`` programs.

    Calls may come from several threads and are given in turn; all ranks make the same
    calls in the same order.
    """

    def __init__(
        self,
        device: Any,
        rank: int,
        size: int,
        half_nbytes: int = HALF_NBYTES,
        name: str = "ipc",
    ) -> None:
        """Allocate this rank's block and set its flags to 0."""
        if half_nbytes < 1 or half_nbytes % _LINE_NBYTES:
            raise UsageError(
                f"{name}: half_nbytes={half_nbytes} must be a multiple of 64 above 0"
            )
        if not device.memory_flags:
            raise BackendError(
                f"{name}: streams of {device!r} do not write flags or wait for them, "
                f"which peers' kernels are ordered by; use the staged backend"
            )
        self.device, self.rank, self.size, self.name = device, rank, size, name
        self.half_nbytes = half_nbytes
        self._opened: dict[int, int] = {}
        self._native: _native.PeerExchange | None = None
        self._scratch = self._scratch_nbytes = 0
        self._closed = False
        flags = _native.peer_exchange_flags_nbytes(size)
        self.memory = device.alloc(flags + 2 * half_nbytes)
        stream = device.stream_create()
        for at in range(0, flags, _LINE_NBYTES):
            device.write_value32(stream, self.memory + at, 0)
        device.stream_synchronize(stream)
        device.stream_destroy(stream)
        handle, offset = device.ipc_export(self.memory)
        self.handle = json.dumps([handle.hex(), offset])
        """What the others open it by."""

    @classmethod
    def connect(
        cls,
        bootstrap: Bootstrap,
        members: Sequence[int],
        device: Any,
        half_nbytes: int = HALF_NBYTES,
        *,
        timeout_s: float | None = None,
        name: str = "ipc",
    ) -> PeerMemory:
        """Return exchange memory that all ``members`` have opened, or raise on all.

        Collective. Ranks on other nodes, and memory that cannot be shared, are a
        BackendError that names them.
        """
        limit = env.read_float("COMMRT_TIMEOUT_S") if timeout_s is None else timeout_s
        rank, size = list(members).index(bootstrap.rank), len(members)

        def agree(step: str, attempt: Callable[[], str]) -> list[str]:
            """Return what all ranks say; raise if any of them failed."""
            said, error = "", None
            try:
                said = attempt()
            except CommError as exc:
                error = exc
            mine = json.dumps([said, "" if error is None else str(error)])
            blobs = bootstrap.exchange(
                members, f"ipc/{name}/{step}", mine.encode(), limit
            )
            found = [json.loads(blob) for blob in blobs]
            if error is not None:
                raise error
            failed = [f"rank {r}: {why}" for r, (_, why) in enumerate(found) if why]
            if failed:
                raise BackendError(
                    f"{name}: not all ranks could share memory of their devices, so "
                    f"none does: {'; '.join(failed)}"
                )
            return [text for text, _ in found]

        made: list[PeerMemory] = []

        def allocate() -> str:
            made.append(cls(device, rank, size, half_nbytes, name))
            return f"{half_nbytes} {made[0].handle}"

        def open_all() -> str:
            made[0].open([text.partition(" ")[2] for text in handles])
            return ""

        try:
            handles = agree("allocate", allocate)
            halves = {int(text.partition(" ")[0]) for text in handles}
            if len(halves) > 1:
                raise UsageError(f"{name}: ranks have different half_nbytes: {halves}")
            agree("open", open_all)
        except BaseException:
            for one in made:
                one._forget_peers()
                one._free()
            raise
        made[0]._meet = lambda step: bootstrap.exchange(  # type: ignore[method-assign]
            members, f"ipc/{name}/{step}", b"", limit
        )
        return made[0]

    def open(self, handles: Sequence[str]) -> None:
        """Open what all ranks have exported, in rank order."""
        places: list[int] = []
        for peer, text in enumerate(handles):
            if peer == self.rank:
                places.append(self.memory)
                continue
            handle, offset = json.loads(text)
            self._opened[peer] = self.device.ipc_open(bytes.fromhex(handle))
            places.append(self._opened[peer] + offset)
        self._native = _native.make_peer_exchange(
            self.device, self.rank, places, self.half_nbytes
        )

    @property
    def native(self) -> _native.PeerExchange:
        """The native exchange; ClosedError where there is none (any more)."""
        if self._closed or self._native is None:
            raise ClosedError(f"{self.name}: the exchange memory was closed")
        return self._native

    def run(self, plan: StreamPlan, *, x: int, out: int, stream: int) -> None:
        """Give ``plan`` to the device; ``stream`` waits for it, the host does not.

        ``x`` and ``out`` are addresses on the device, and may be the same where the
        operation works in place. Raises CaptureError while the stream is captured.
        """
        self._give(plan, x, out, stream, orders=True)

    def start(self, plan: StreamPlan, *, x: int, out: int, stream: int) -> int:
        """Give ``plan`` to the device; return an event of its end.

        It comes after what ``stream`` was given. The event goes back by ``end``.
        """
        return self._give(plan, x, out, stream, orders=False)

    def end(self, event: int) -> None:
        """Take an event back that ``start`` returned; streams may still wait for it."""
        self.native._give_event(event)

    def _give(
        self, plan: StreamPlan, x: int, out: int, stream: int, *, orders: bool
    ) -> int:
        native = self.native
        if self.device.is_capturing(stream):
            raise CaptureError(
                f"{self.name}: a schedule over exchange memory cannot be captured into "
                f"a graph: its flags count on from call to call, and a replay would "
                f"wait for values that are past. Call it outside of the capture, or "
                f"use NCCL there (backend='nccl')",
                "capturing",
            )
        scratch = self._scratch_for(plan.scratch_nbytes)
        return native._run(plan.program, x, out, scratch, stream, orders)

    def _scratch_for(self, nbytes: int) -> int:
        """Return scratch memory; programs run one behind the other, and share it."""
        if nbytes > self._scratch_nbytes:
            before = self._scratch
            self._scratch = self.device.alloc(nbytes)
            self._scratch_nbytes = nbytes
            if before:
                self.device.free(before)  # waits for who uses it
        return self._scratch

    def give_up(self) -> None:
        """Let this rank's streams go that wait for peers; nothing runs after it.

        What is behind them is worth nothing. Where streams share one hardware queue
        the flags can only be written behind the wait, so nothing is let go there.
        """
        self.native._give_up()

    def close(self) -> None:
        """Wait for all that was given, then close and free. Collective, idempotent."""
        if self._closed:
            return
        if self._native is not None:
            self._native._close()
        self._meet("done")
        self._forget_peers()
        self._meet("closed")
        self._free()

    def _meet(self, step: str) -> object:
        """Meet all ranks; without a bootstrap the caller sees to it."""
        return None

    def _forget_peers(self) -> None:
        for base in self._opened.values():
            self.device.ipc_close(base)
        self._opened.clear()

    def _free(self) -> None:
        self._closed = True
        for address in (self.memory, self._scratch):
            if address:
                self.device.free(address)
        self.memory = self._scratch = 0

    def __enter__(self) -> PeerMemory:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
