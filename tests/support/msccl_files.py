# SPDX-License-Identifier: Apache-2.0
"""Small files of MSCCL, of the shapes that msccl-tools writes, and changes of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

__all__ = ["FILES", "MscclText", "changed_line", "without_step"]

Place = tuple[str, int]
"""Buffer and offset."""
_NOWHERE: Place = ("i", -1)


@dataclass
class Line:
    """One step, before all waits for it are known."""

    type: str
    src: Place
    dst: Place
    count: int
    wait: tuple[int, int]


@dataclass
class Block:
    """One thread block."""

    send: int
    recv: int
    channel: int
    lines: list[Line] = field(default_factory=list)

    def step(
        self,
        kind: str,
        src: Place = _NOWHERE,
        dst: Place = _NOWHERE,
        count: int = 1,
        wait: tuple[int, int] = (-1, -1),
    ) -> int:
        """Add a step; return its number."""
        self.lines.append(Line(kind, src, dst, count, wait))
        return len(self.lines) - 1


class MscclText:
    """Writes a file."""

    def __init__(
        self, coll: str, size: int, chunks: int, in_place: bool, scratch: int = 0
    ) -> None:
        self.coll, self.size, self.chunks = coll, size, chunks
        self.in_place, self.scratch = in_place, scratch
        self.gpus: list[list[Block]] = [[] for _ in range(size)]

    def block(
        self, rank: int, send: int = -1, recv: int = -1, channel: int = 0
    ) -> Block:
        """Add a thread block to a GPU."""
        self.gpus[rank].append(Block(send, recv, channel))
        return self.gpus[rank][-1]

    def text(self) -> str:
        """Return the file."""
        share = self.chunks // self.size
        num_in = share if self.coll == "allgather" else self.chunks
        num_out = share if self.coll == "reduce_scatter" else self.chunks
        place = int(self.in_place)
        lines = [
            f'<algo name="test_{self.coll}" proto="Simple" nchannels="2" '
            f'nchunksperloop="{self.chunks}" ngpus="{self.size}" coll="{self.coll}" '
            f'inplace="{place}" outofplace="{1 - place}" minBytes="0" maxBytes="0">'
        ]
        for rank, blocks in enumerate(self.gpus):
            awaited = {line.wait for block in blocks for line in block.lines}
            lines.append(
                f'  <gpu id="{rank}" i_chunks="{num_in}" o_chunks="{num_out}" '
                f's_chunks="{self.scratch}">'
            )
            for number, block in enumerate(blocks):
                lines.append(
                    f'    <tb id="{number}" send="{block.send}" recv="{block.recv}" '
                    f'chan="{block.channel}">'
                )
                lines += [
                    f'      <step s="{at}" type="{one.type}" srcbuf="{one.src[0]}" '
                    f'srcoff="{one.src[1]}" dstbuf="{one.dst[0]}" '
                    f'dstoff="{one.dst[1]}" cnt="{one.count}" depid="{one.wait[0]}" '
                    f'deps="{one.wait[1]}" hasdep="{int((number, at) in awaited)}"/>'
                    for at, one in enumerate(block.lines)
                ]
                lines.append("    </tb>")
            lines.append("  </gpu>")
        return "\n".join([*lines, "</algo>", ""])


def ring_allreduce(size: int) -> str:
    """Return a ring in place: sums pass on, and are kept from the last hop on."""
    made = MscclText("allreduce", size, 2 * size, in_place=True)
    for rank in range(size if size > 1 else 0):
        for channel in (0, 1):
            ahead, back = (rank + 1) % size, (rank - 1) % size
            block = made.block(rank, ahead, back, channel)

            def chunk(hop: int, rank: int = rank, channel: int = channel) -> Place:
                return "i", (rank - hop) % size * 2 + channel

            block.step("s", chunk(0), chunk(0))
            for hop in range(1, size - 1):
                block.step("rrs", chunk(hop), chunk(hop))
            block.step("rrcs", chunk(size - 1), chunk(size - 1))
            for hop in range(size - 2):
                block.step("rcs", chunk(hop), chunk(hop))
            block.step("r", chunk(size - 2), chunk(size - 2))
    return made.text()


def all_pairs_allreduce(size: int) -> str:
    """Return an all-pairs sum in place: by scratch, added in one thread block."""
    made = MscclText("allreduce", size, size, in_place=True, scratch=size)
    for rank in range(size):
        adding = made.block(rank)
        peers = [peer for peer in range(size) if peer != rank]
        for place, peer in enumerate(peers):
            block = made.block(rank, peer, peer)
            block.step("s", ("i", peer), ("s", rank))
            block.step("r", ("i", rank), ("s", peer))
            # Chunk `peer` may be overwritten only when it has left: by its own block.
            adding.step("nop", wait=(place + 1, 1))
        for peer in peers:
            adding.step("re", ("s", peer), ("i", rank))
        for place, peer in enumerate(peers):
            block = made.gpus[rank][place + 1]
            wait = (0, len(adding.lines) - 1)
            block.step("s", ("i", rank), ("i", rank), wait=wait)
            block.step("r", ("i", peer), ("i", peer))
    return made.text()


def direct_allgather(size: int) -> str:
    """Return a direct allgather out of place, of three chunks in one message."""
    made = MscclText("allgather", size, 3 * size, in_place=False)
    for rank in range(size):
        made.block(rank).step("cpy", ("i", 0), ("o", 3 * rank), 3)
        for peer in range(size):
            if peer != rank:
                block = made.block(rank, peer, peer)
                block.step("s", ("i", 0), ("o", 3 * rank), 3)
                block.step("r", ("i", 0), ("o", 3 * peer), 3)
    return made.text()


def ring_allgather(size: int) -> str:
    """Return a ring allgather in place, where input is a part of the output."""
    made = MscclText("allgather", size, size, in_place=True)
    for rank in range(size if size > 1 else 0):
        block = made.block(rank, (rank + 1) % size, (rank - 1) % size)
        block.step("s", ("i", 0), ("o", rank))
        for hop in range(1, size - 1):
            block.step("rcs", ("o", (rank - hop) % size), ("o", (rank - hop) % size))
        block.step("r", ("i", 0), ("o", (rank + 1) % size))
    return made.text()


def ring_reduce_scatter(size: int, in_place: bool) -> str:
    """Return a ring that sums, and keeps the own share."""
    made = MscclText("reduce_scatter", size, size, in_place)
    for rank in range(size):
        if size == 1:
            made.block(0).step("cpy", ("i", 0), ("o", 0))
            continue
        block = made.block(rank, (rank + 1) % size, (rank - 1) % size)
        block.step("s", ("i", (rank - 1) % size), ("i", (rank - 1) % size))
        for hop in range(2, size):
            block.step("rrs", ("i", (rank - hop) % size), ("i", (rank - hop) % size))
        block.step("rrc", ("i", rank), ("o", 0))
    return made.text()


def direct_alltoall(size: int) -> str:
    """Return a direct alltoall, two chunks for each pair."""
    made = MscclText("alltoall", size, 2 * size, in_place=False)
    for rank in range(size):
        made.block(rank).step("cpy", ("i", 2 * rank), ("o", 2 * rank), 2)
        for peer in range(size):
            if peer != rank:
                block = made.block(rank, peer, peer)
                for one in (0, 1):
                    block.step("s", ("i", 2 * peer + one), ("o", 2 * rank + one))
                    block.step("r", ("i", 0), ("o", 2 * peer + one))
    return made.text()


def chain_broadcast(size: int) -> str:
    """Return a chain from rank 0 on."""
    made = MscclText("broadcast", size, 4, in_place=False)
    made.block(0).step("cpy", ("i", 0), ("o", 0), 4)
    for rank in range(size if size > 1 else 0):
        ahead = rank + 1 if rank + 1 < size else -1
        block = made.block(rank, ahead, rank - 1)
        for chunk in range(4):
            if rank == 0:
                block.step("s", ("i", chunk), ("o", chunk))
            else:
                kind = "rcs" if ahead > 0 else "r"
                block.step(kind, ("o", chunk), ("o", chunk))
    return made.text()


def chain_reduce(size: int) -> str:
    """Return a chain from the last rank to rank 0."""
    made = MscclText("reduce", size, 2, in_place=False)
    for rank in range(size):
        if size == 1:
            made.block(0).step("cpy", ("i", 0), ("o", 0), 2)
            continue
        block = made.block(rank, rank - 1, rank + 1 if rank + 1 < size else -1)
        kind = "s" if rank + 1 == size else "rrs" if rank else "rrc"
        block.step(kind, ("i", 0), ("o", 0), 2)
    return made.text()


FILES: dict[str, Callable[[int], str]] = {
    "ring_allreduce": ring_allreduce,
    "all_pairs_allreduce": all_pairs_allreduce,
    "direct_allgather": direct_allgather,
    "ring_allgather": ring_allgather,
    "ring_reduce_scatter": lambda size: ring_reduce_scatter(size, False),
    "ring_reduce_scatter_in_place": lambda size: ring_reduce_scatter(size, True),
    "direct_alltoall": direct_alltoall,
    "chain_broadcast": chain_broadcast,
    "chain_reduce": chain_reduce,
}
"""Files by name, for each number of ranks."""


def changed_line(text: str, line: int, change: Callable[[str], str]) -> str:
    """Return the text with one line changed; lines count from 1."""
    lines = text.splitlines()
    lines[line - 1] = change(lines[line - 1])
    return "\n".join([*lines, ""])


def without_step(text: str, line: int) -> str:
    """Return the text without the step on a line: later ones take its number.

    Those that waited for it or for later ones wait for the step before.
    """
    lines = text.splitlines()
    block, gpu_end = _block_of(lines, line - 1), _end_of_gpu(lines, line - 1)
    number = int(_value(lines[line - 1], "s"))
    begin = max(at for at in range(line) if "<gpu" in lines[at])
    for at in range(begin, gpu_end):
        if "<step" not in lines[at]:
            continue
        if int(_value(lines[at], "depid")) == block:
            lines[at] = _lowered(lines[at], "deps", number)
        if _block_of(lines, at) == block:
            lines[at] = _lowered(lines[at], "s", number)
    del lines[line - 1]
    return "\n".join([*lines, ""])


def _lowered(line: str, key: str, above: int) -> str:
    value = int(_value(line, key))
    if value < above or (key == "s" and value == above) or value == 0:
        return line
    return re.sub(rf' {key}="\d+"', f' {key}="{value - 1}"', line)


def _value(line: str, key: str) -> str:
    found = re.search(rf' {key}="(-?\d+)"', line)
    assert found is not None, line
    return found[1]


def _block_of(lines: list[str], at: int) -> int:
    return int(_value(next(_backwards(lines, at, "<tb")), "id"))


def _backwards(lines: list[str], at: int, tag: str) -> Iterator[str]:
    return (lines[one] for one in range(at, -1, -1) if tag in lines[one])


def _end_of_gpu(lines: list[str], at: int) -> int:
    return next(one for one in range(at, len(lines)) if "</gpu>" in lines[one])
