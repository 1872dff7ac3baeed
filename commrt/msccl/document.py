# SPDX-License-Identifier: Apache-2.0
"""Files of MSCCL: what each thread block of each GPU does, step by step.

The form is that of msccl-tools, which writes it, and of MSCCL's runtimes, which read it
(M. Cowan et al., "MSCCLang: Microsoft Collective Communication Language", ASPLOS 2023):

    <algo name nchunksperloop nchannels ngpus coll proto inplace outofplace ...>
      <gpu id i_chunks o_chunks s_chunks>
        <tb id send recv chan>
          <step s type srcbuf srcoff dstbuf dstoff cnt depid deps hasdep/>

A file is checked here as far as one element tells; ``messages.py`` and the verifier
find what several tell together. Each part keeps its line, for messages.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from commrt.errors import UsageError, shown, suggest
from commrt.files.plain_xml import XmlReader
from commrt.files.read import Kind, read_text
from commrt.files.visible import visible
from commrt.vocabulary.operations import operation

__all__ = ["Algorithm", "Buffer", "Chunks", "Gpu", "Step", "ThreadBlock", "read_msccl"]

Buffer = Literal["i", "o", "s"]
"""Input, output or scratch."""

_FILE = Kind("file of MSCCL", "the XML that msccl-tools writes", 64 << 20, UsageError)
_MOST_NUMBER = 1 << 24
_MOST_SHOWN = 60
_MOST_GPUS = 65_536
_MOST_STEPS = 4_000_000
_MOST_BLOCKS = 1024
"""Most thread blocks of a GPU. A real one runs some hundred at once."""
_MOST_CHUNKS = 1 << 24
"""Most chunks of all buffers together, and of all steps together."""
_COLLECTIVES = {
    "allreduce": "allreduce",
    "allgather": "allgather",
    "reduce_scatter": "reduce_scatter",
    "reducescatter": "reduce_scatter",
    "alltoall": "alltoall",
    "broadcast": "bcast",
    "reduce": "reduce",
}
"""Names of operations there, and those of commrt."""
_TYPES = ("s", "r", "rcs", "rrs", "rrc", "rrcs", "cpy", "re", "nop")
_SENDS = frozenset({"s", "rcs", "rrs", "rrcs"})
_RECEIVES = frozenset({"r", "rcs", "rrs", "rrc", "rrcs"})
_READS = frozenset({"s", "rrs", "rrc", "rrcs", "cpy", "re"})
_WRITES = frozenset({"r", "rcs", "rrc", "rrcs", "cpy", "re"})


@dataclass(frozen=True)
class Chunks:
    """Chunks of one buffer, one behind the other."""

    buffer: Buffer
    lo: int
    num: int


@dataclass(frozen=True)
class Step:
    """One instruction of a thread block."""

    line: int
    number: int
    """Its place in the thread block, from 0."""
    type: str
    src: Chunks | None
    """Chunks that it reads."""
    dst: Chunks | None
    """Chunks that it writes."""
    waits_for: tuple[int, int] | None
    """Thread block and step of this GPU that must be done first."""
    is_awaited: bool
    """True if the step says when it is done, so that others can wait for it."""
    num_chunks: int

    @property
    def sends(self) -> bool:
        """True if a message leaves."""
        return self.type in _SENDS

    @property
    def receives(self) -> bool:
        """True if a message arrives."""
        return self.type in _RECEIVES


@dataclass(frozen=True)
class ThreadBlock:
    """Instructions of a GPU that run in order, with the peers of their messages."""

    line: int
    number: int
    send: int
    """The GPU that its messages go to; -1: none do."""
    recv: int
    """The GPU that its messages come from; -1: none do."""
    channel: int
    steps: list[Step] = field(default_factory=list)


@dataclass(frozen=True)
class Gpu:
    """The work of one GPU."""

    line: int
    rank: int
    scratch: int
    """Chunks of its scratch."""
    sizes: Mapping[Buffer, int]
    """Chunks that the file says each buffer has; 0: it does not use the buffer."""
    blocks: dict[int, ThreadBlock] = field(default_factory=dict)
    """Thread blocks by their numbers."""


@dataclass(frozen=True)
class Algorithm:
    """An algorithm, as a file describes it."""

    source: str
    """The name of the file."""
    line: int
    name: str
    coll: str
    """The operation, as commrt calls it."""
    num_chunks: int
    """Equal chunks that the operation's full vector is cut into."""
    gpus: Sequence[Gpu]
    """By rank."""
    in_place: bool
    """True if it is for calls whose input and output share memory."""
    out_of_place: bool
    """True if it is for calls whose input and output are apart."""

    def wrong(self, line: int, problem: str) -> UsageError:
        """Return the error that says what is wrong on a line."""
        return UsageError(f"{self.source}, line {line}: {problem}")


def read_msccl(path: Path) -> Algorithm:
    """Return what a file of MSCCL says.

    Raises:
        UsageError: the file cannot be read, or is none of MSCCL; the message has the
            line.
    """
    document = XmlReader(str(path))
    reader = _Reader(document)
    document.read(read_text(path, _FILE), reader.start, reader.end)
    return reader.algorithm()


class _Reader:
    """Takes the elements one by one, each within those that are open."""

    def __init__(self, document: XmlReader) -> None:
        self._document = document
        self._head: dict[str, str] = {}
        self._head_line = 0
        self._coll = ""
        self._num_chunks = 0
        self._gpus: dict[int, Gpu] = {}
        self._gpu: Gpu | None = None
        self._block: ThreadBlock | None = None
        self._num_steps = 0
        self._num_all_chunks = self._num_touched = 0
        self._ends: dict[tuple[int, str, int, int], ThreadBlock] = {}
        """The thread block that first had a peer and channel of a GPU."""

    def start(self, tag: str, given: Mapping[str, str]) -> None:
        """Take an element."""
        parents = tuple(self._document.open[:-1])
        takes = {
            (): ("algo", self._begin),
            ("algo",): ("gpu", self._add_gpu),
            ("algo", "gpu"): ("tb", self._add_block),
            ("algo", "gpu", "tb"): ("step", self._add_step),
        }
        expected, take = takes.get(parents, ("", self._begin))
        if tag != expected:
            hint = f"expected <{expected}>" if expected else "a step holds nothing"
            where = f"in <{parents[-1]}>" if parents else "begins the file"
            raise self._document.wrong(f"<{tag}> {where}: {hint}, as MSCCL has it")
        take(given)

    def end(self, tag: str) -> None:
        """Leave an element."""

    def algorithm(self) -> Algorithm:
        """Return what was read."""
        size = self._number_of(self._head, "ngpus")
        source, line = self._document.source, self._head_line
        missing = [rank for rank in range(size) if rank not in self._gpus]
        if missing:
            raise self._document.wrong(
                f"ngpus is {size}, but no <gpu> has the id {missing[0]}", line
            )
        in_place = self._head.get("inplace", "0") == "1"
        return Algorithm(
            source,
            line,
            visible(self._head["name"])[:_MOST_SHOWN],
            self._coll,
            self._num_chunks,
            [self._gpus[rank] for rank in range(size)],
            in_place,
            self._head.get("outofplace", "0" if in_place else "1") == "1",
        )

    def _number(
        self, given: Mapping[str, str], key: str, low: int = 0, high: int = _MOST_NUMBER
    ) -> int:
        text = self._document.needed(given, key)
        value = int(text) if re.fullmatch(r"-?[0-9]{1,9}", text) else low - 1
        if not low <= value <= high:
            raise self._document.wrong(
                f"{key} is {shown(text)}; expected a whole number from {low} to {high}"
            )
        return value

    def _number_of(self, given: Mapping[str, str], key: str) -> int:
        return int(given[key])

    def _flag(self, given: Mapping[str, str], key: str) -> None:
        if given.get(key, "0") not in ("0", "1"):
            raise self._document.wrong(f"{key} is {shown(given[key])}; expected 0 or 1")

    def _begin(self, given: Mapping[str, str]) -> None:
        self._head, self._head_line = dict(given), self._document.line
        self._document.needed(given, "name")
        coll = self._document.needed(given, "coll")
        if coll not in _COLLECTIVES:
            raise self._document.wrong(
                f"coll is {shown(coll)}, whose result commrt does not know; expected "
                f"one of {', '.join(_COLLECTIVES)}{suggest(coll, _COLLECTIVES)}"
            )
        self._coll = _COLLECTIVES[coll]
        size = self._number(given, "ngpus", 1, _MOST_GPUS)
        self._num_chunks = self._number(given, "nchunksperloop", 1)
        for key in ("inplace", "outofplace"):
            self._flag(given, key)
        if given.get("inplace", "0") == given.get("outofplace") == "0":
            raise self._document.wrong(
                "inplace and outofplace are both 0; expected 1 for one of them"
            )
        if operation(self._coll).is_blocked and self._num_chunks % size:
            raise self._document.wrong(
                f"nchunksperloop is {self._num_chunks}; expected a multiple of the "
                f"{size} GPUs, for {self._coll} gives each of them an equal share"
            )

    def _add_gpu(self, given: Mapping[str, str]) -> None:
        size = self._number_of(self._head, "ngpus")
        rank = self._number(given, "id", 0, size - 1)
        if rank in self._gpus:
            raise self._document.wrong(f"gpu {rank} is given twice")
        sizes: dict[Buffer, int] = {
            "i": self._number(given, "i_chunks"),
            "o": self._number(given, "o_chunks"),
            "s": self._number(given, "s_chunks"),
        }
        share, spec = self._num_chunks // size, operation(self._coll)
        expected = {
            "i": share if spec.out_count == "times_size" else self._num_chunks,
            "o": share if spec.out_count == "div_size" else self._num_chunks,
        }
        for buffer in ("i", "o"):
            if sizes[buffer] not in (0, expected[buffer]):
                raise self._document.wrong(
                    f"{buffer}_chunks is {sizes[buffer]}; expected {expected[buffer]} "
                    f"(or 0, if no step uses it), for {self._coll} with "
                    f"nchunksperloop={self._num_chunks} on {size} GPUs"
                )
        self._num_all_chunks += sum(expected.values()) + sizes["s"]
        if self._num_all_chunks > _MOST_CHUNKS:
            raise self._document.wrong(
                f"the buffers of all GPUs have more than {_MOST_CHUNKS:,} chunks"
            )
        self._gpu = Gpu(self._document.line, rank, sizes["s"], sizes)
        self._gpus[rank] = self._gpu

    def _add_block(self, given: Mapping[str, str]) -> None:
        gpu, size = self._gpu, self._number_of(self._head, "ngpus")
        assert gpu is not None  # a <tb> lies in a <gpu>
        block = ThreadBlock(
            self._document.line,
            self._number(given, "id"),
            self._number(given, "send", -1, size - 1),
            self._number(given, "recv", -1, size - 1),
            self._number(given, "chan"),
        )
        if block.number in gpu.blocks:
            raise self._document.wrong(f"tb {block.number} is given twice")
        if gpu.rank in (block.send, block.recv):
            raise self._document.wrong(
                f"a thread block of gpu {gpu.rank} sends to it or receives from it; "
                f"use cpy"
            )
        for key, peer in (("send", block.send), ("recv", block.recv)):
            end = gpu.rank, key, peer, block.channel
            other = self._ends.setdefault(end, block)
            if other is not block and peer >= 0:
                raise self._document.wrong(
                    f"{key}={peer} chan={block.channel} is that of tb {other.number} "
                    f"on line {other.line}, too; expected one thread block for each "
                    f"peer and channel"
                )
        if len(gpu.blocks) == _MOST_BLOCKS:
            raise self._document.wrong(
                f"gpu {gpu.rank} has more than {_MOST_BLOCKS} thread blocks"
            )
        gpu.blocks[block.number] = block
        self._block = block

    def _add_step(self, given: Mapping[str, str]) -> None:
        block, line = self._block, self._document.line
        assert block is not None  # a <step> lies in a <tb>
        self._num_steps += 1
        if self._num_steps > _MOST_STEPS:
            raise self._document.wrong(f"there are more than {_MOST_STEPS:,} steps")
        number = self._number(given, "s")
        if number != len(block.steps):
            raise self._document.wrong(
                f"s is {number}; expected {len(block.steps)}, the next step of tb "
                f"{block.number}"
            )
        kind = self._document.needed(given, "type")
        if kind not in _TYPES:
            raise self._document.wrong(
                f"type is {shown(kind)}; expected one of {', '.join(_TYPES)}"
            )
        for types, peer, what in (
            (_SENDS, block.send, "send"),
            (_RECEIVES, block.recv, "recv"),
        ):
            if kind in types and peer < 0:
                raise self._document.wrong(
                    f"type {kind} needs a peer, but tb {block.number} has {what}=-1"
                )
        count = self._number(given, "cnt", 0 if kind == "nop" else 1)
        self._num_touched += count
        if self._num_touched > _MOST_CHUNKS:
            raise self._document.wrong(
                f"the steps touch more than {_MOST_CHUNKS:,} chunks"
            )
        src = self._chunks(given, "src", count) if kind in _READS else None
        dst = self._chunks(given, "dst", count) if kind in _WRITES else None
        self._flag(given, "hasdep")
        awaited = given.get("hasdep", "0") == "1"
        wait = self._wait(given)
        block.steps.append(Step(line, number, kind, src, dst, wait, awaited, count))

    def _chunks(self, given: Mapping[str, str], end: str, count: int) -> Chunks:
        assert self._gpu is not None  # a <step> lies in a <gpu>
        text = self._document.needed(given, f"{end}buf")
        buffers: dict[str, Buffer] = {"i": "i", "o": "o", "s": "s"}
        if text not in buffers:
            raise self._document.wrong(f"{end}buf is {shown(text)}; expected i, o or s")
        buffer, offset = buffers[text], self._number(given, f"{end}off")
        size = self._gpu.sizes[buffer]
        if offset + count > size:
            raise self._document.wrong(
                f"{end}buf {buffer}, {end}off {offset}, cnt {count} is not within its "
                f"{size} chunks; gpu {self._gpu.rank} has {buffer}_chunks={size}"
            )
        return Chunks(buffer, offset, count)

    def _wait(self, given: Mapping[str, str]) -> tuple[int, int] | None:
        block = self._number(given, "depid", -1)
        step = self._number(given, "deps", -1)
        if block < 0:
            return None
        if step < 0:
            raise self._document.wrong(
                f"it waits for tb {block}, but deps is -1; expected a step of it"
            )
        return block, step
