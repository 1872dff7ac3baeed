# SPDX-License-Identifier: Apache-2.0
"""Lowering: from a schedule's program to the engine's instructions.

    value = inputs[0] ⊕ inputs[1] ⊕ …;  every output = value

The steps are read once, in order. On the way

- a copy is only noted; reads of its destination read its source instead, and what is
  left of it at the end becomes a further output of the instruction that made the value;
- a receive and receive-and-reduces into one block join into one instruction with many
  inputs, in rank order, the local contribution at its own rank's place;
- a send becomes a further output of the instruction that wrote its block, or of an
  earlier send of the same block, so one payload serves all receivers.

Then local outputs that nobody reads are dropped (of a ring's partial sums only the
messages remain), and dependencies are inferred afresh from what is left.

Messages keep the numbers that the program's order gives them, whatever instruction
carries them. Fusing never makes an instruction wait for something that could wait for
it: inputs join only while nothing has read the result or overwritten the other inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from commrt.errors import ScheduleError
from commrt.schedule.dependencies import DependencyTracker, locations
from commrt.schedule.ir import Op, RankProgram, Schedule, Slice, Space, Step

__all__ = ["LOCAL", "MESSAGE", "Lowered", "lower"]

LOCAL, MESSAGE = 0, 1
"""Kinds of inputs and outputs."""

Entry = tuple[int, int, int, int]
"""kind, then space, lo, hi or peer, k, 0."""
Table = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Lowered:
    """The engine's form of one rank's program: docs/internals/schedules.md."""

    rank: int
    spaces: tuple[Space, ...]
    """Spaces of the program; scratch that fusion made superfluous has length 0."""
    inputs: Table
    input_ptr: Table
    outputs: Table
    output_ptr: Table
    deps: Table
    dep_ptr: Table
    messages_in: dict[int, int]
    """Messages per fragment from each peer."""
    messages_out: dict[int, int]
    """Messages per fragment to each peer."""
    num_publishes: int
    """Instructions with at least one message output."""

    def __len__(self) -> int:
        return len(self.dep_ptr) - 1

    def inputs_of(self, index: int) -> list[Entry]:
        """Return the inputs of instruction ``index``."""
        return _rows(self.inputs, self.input_ptr, index)

    def outputs_of(self, index: int) -> list[Entry]:
        """Return the outputs of instruction ``index``."""
        return _rows(self.outputs, self.output_ptr, index)

    def deps_of(self, index: int) -> list[int]:
        """Return the instructions that instruction ``index`` waits for."""
        found: list[int] = self.deps[
            self.dep_ptr[index] : self.dep_ptr[index + 1]
        ].tolist()
        return found


def _rows(table: Table, ptr: Table, index: int) -> list[Entry]:
    return [tuple(row) for row in table[ptr[index] : ptr[index + 1]].tolist()]


@dataclass
class _Instruction:
    inputs: list[Entry]
    outputs: list[Entry]
    joins: bool = False
    """A receive, reducing or not, that may take more inputs."""
    after: set[int] = field(default_factory=set)
    """Instructions that the author asked to wait for."""

    def local_inputs(self) -> list[Slice]:
        return [Slice(*entry[1:]) for entry in self.inputs if entry[0] == LOCAL]

    def local_outputs(self) -> list[Slice]:
        return [Slice(*entry[1:]) for entry in self.outputs if entry[0] == LOCAL]


Block = tuple[int, int]
"""space, block."""


class _Lowering:
    def __init__(self, program: RankProgram, can_fuse: Callable[[int], bool]) -> None:
        self.rank = program.rank
        self.program = program
        self.can_fuse = can_fuse
        self.instructions: list[_Instruction] = []
        self.messages_in: dict[int, int] = {}
        self.messages_out: dict[int, int] = {}
        self._first = locations(program.spaces)
        self._writer: dict[int, int] = {}
        self._reader: dict[int, int] = {}
        # Noted copies: destination block -> (source block, instructions before it).
        self._copies: dict[Block, tuple[Block, int]] = {}
        self._copied_from: dict[int, set[Block]] = {}
        self._sent_from: dict[Slice, int] = {}
        self._sent_ends: dict[Block, set[int]] = {}
        self._of_step: dict[int, int] = {}

    def run(self) -> None:
        handlers = {
            Op.SEND: self._send,
            Op.RECV: self._recv,
            Op.RRED: self._rred,
            Op.RED: self._red,
            Op.COPY: self._copy,
        }
        for index, step in enumerate(self.program.steps):
            if step.peer == self.rank:
                raise ScheduleError(
                    f"{self.program.describe_step(index)}: a message to itself; use "
                    f"copy"
                )
            made = handlers[step.op](step)
            if made is not None:
                self._of_step[index] = made
                self._wait_for(made, step)
        self._finish_copies()

    def _wait_for(self, made: int, step: Step) -> None:
        """Honour the author's ``after``; a predecessor that was a copy has no part."""
        for other in step.after:
            if other in self._of_step:
                before = self._of_step[other]
                self.instructions[made].after.add(before)
                # It must not wait for more than its own messages: others wait for it.
                self.instructions[before].joins = False

    # Where blocks are, and who touched them.

    def _blocks(self, where: Slice) -> range:
        first = self._first[where.space]
        return range(first + where.lo, first + where.hi)

    def _emit(
        self, inputs: list[Entry], outputs: list[Entry], joins: bool = False
    ) -> int:
        index = len(self.instructions)
        made = _Instruction(inputs, outputs, joins)
        self.instructions.append(made)
        for where in made.local_inputs():
            self._note(self._reader, where, index)
        for where in made.local_outputs():
            self._note(self._writer, where, index)
        return index

    def _note(self, table: dict[int, int], where: Slice, index: int) -> None:
        for block in self._blocks(where):
            table[block] = max(table.get(block, -1), index)

    def _maker(self, where: Slice) -> int | None:
        """Return the instruction one of whose local outputs is exactly ``where``."""
        makers = {self._writer.get(block, -1) for block in self._blocks(where)}
        if len(makers) != 1 or (maker := makers.pop()) < 0:
            return None
        made = where in self.instructions[maker].local_outputs()
        return maker if made else None

    def _unchanged_since(self, where: Slice, index: int) -> bool:
        return all(
            self._writer.get(block, -1) <= index for block in self._blocks(where)
        )

    def _may_also_write(self, index: int, src: Slice, dst: Slice) -> bool:
        """Return whether instruction ``index``, which has src, may also write dst.

        A noted copy has seen no access to ``dst`` since; those before it count.
        """
        blocks = self._blocks(dst)
        if blocks == self._blocks(src) and dst.space != src.space:
            return True  # in[i] to out[i]: in place it changes nothing
        if any(self._writer.get(block, -1) >= index for block in blocks):
            return False
        last = max(self._reader.get(block, -1) for block in blocks)
        # Its own operand may be the very same blocks: it is read before it is written.
        own = map(self._blocks, self.instructions[index].local_inputs())
        return last < index or (
            last == index
            and all(r == blocks or not set(r).intersection(blocks) for r in own)
        )

    # Copies are noted, then resolved.

    def _resolve(self, where: Slice) -> Slice:
        """Return the real place of the data of ``where``."""
        space, lo, hi = where
        noted = [self._copies.get((space, block)) for block in range(lo, hi)]
        if not any(noted):
            return where
        if all(noted):
            sources = [copy[0] for copy in noted if copy]
            start = sources[0][1]
            if sources == [(sources[0][0], start + i) for i in range(hi - lo)]:
                return Slice(sources[0][0], start, start + hi - lo)
        self._materialise([(space, block) for block in range(lo, hi)])
        return where

    def _before_write(self, where: Slice) -> None:
        """Forget copies into ``where``; carry out copies from what it overwrites."""
        for block in range(where.lo, where.hi):
            self._forget((where.space, block))
        for location in self._blocks(where):
            if self._copied_from.get(location):
                self._materialise(sorted(self._copied_from[location]))

    def _forget(self, block: Block) -> tuple[Block, int] | None:
        noted = self._copies.pop(block, None)
        if noted is not None:
            (space, source), _ = noted
            self._copied_from[self._first[space] + source].discard(block)
        return noted

    def _materialise(self, blocks: list[Block]) -> None:
        """Carry out noted copies, in runs of blocks with consecutive sources."""
        runs: list[tuple[Slice, Slice, int]] = []
        for block in blocks:
            noted = self._forget(block)
            if noted is None:
                continue
            (space, source), position = noted
            if runs:
                dst, src, seen = runs[-1]
                if (
                    block == (dst.space, dst.hi)
                    and (space, source) == (src.space, src.hi)
                    and seen == position
                ):
                    grown = Slice(src.space, src.lo, src.hi + 1)
                    runs[-1] = (Slice(dst.space, dst.lo, dst.hi + 1), grown, seen)
                    continue
            dst = Slice(block[0], block[1], block[1] + 1)
            runs.append((dst, Slice(space, source, source + 1), position))
        for dst, src, position in runs:
            self._carry_out(dst, src, position)

    def _carry_out(self, dst: Slice, src: Slice, position: int) -> None:
        """Copy src to dst: as outputs of instructions that hold the value, or anew."""
        done = src.lo
        while done < src.hi:
            shift = dst.lo - src.lo
            for end in self._value_ends(src.space, done, src.hi):
                piece = Slice(src.space, done, end)
                target = Slice(dst.space, done + shift, end + shift)
                host = self._host(piece, target, position)
                if host is not None:
                    self.instructions[host].outputs.append((LOCAL, *target))
                    # A term added to one of its outputs would be added to all of them.
                    self.instructions[host].joins = False
                    self._note(self._writer, target, host)
                    break
            else:
                end = done + 1
                while end < src.hi and not self._value_ends(src.space, end, src.hi):
                    end += 1
                piece = Slice(src.space, done, end)
                target = Slice(dst.space, done + shift, end + shift)
                self._emit([(LOCAL, *piece)], [(LOCAL, *target)])
            done = end

    def _value_ends(self, space: int, lo: int, limit: int) -> list[int]:
        """Return the ends of values starting at ``lo``, the longest first."""
        ends = set(self._sent_ends.get((space, lo), ()))
        writer = self._writer.get(self._first[space] + lo, -1)
        if writer >= 0:
            made = self.instructions[writer].local_outputs()
            ends.update(where.hi for where in made if where[:2] == (space, lo))
        return sorted((end for end in ends if end <= limit), reverse=True)

    def _host(self, src: Slice, dst: Slice, position: int) -> int | None:
        """Return an instruction that holds the value of src and may also write dst."""
        maker = self._maker(src)
        if maker is not None and self._may_also_write(maker, src, dst):
            return maker
        sender = self._sent_from.get(src)
        if (
            sender is not None
            and sender >= position
            and self._unchanged_since(src, sender)
            and self._may_also_write(sender, src, dst)
        ):
            return sender
        return None

    def _finish_copies(self) -> None:
        out = [block for block in sorted(self._copies) if self._is_out(block[0])]
        self._materialise(out)

    def _is_out(self, space: int) -> bool:
        return self.program.spaces[space].kind == "out"

    # One handler per kind of step; each returns its instruction, if it made one.

    def _send(self, step: Step) -> int:
        assert step.src is not None
        k = self.messages_out.get(step.peer, 0)
        self.messages_out[step.peer] = k + 1
        message = (MESSAGE, step.peer, k, 0)
        src = self._resolve(step.src)
        fuses = self.can_fuse(step.peer) and not step.after
        host = self._sender(src) if fuses else None
        if host is not None:
            self.instructions[host].outputs.append(message)
            self._note(self._reader, src, host)
            self.instructions[host].joins = False
            return host
        made = self._emit([(LOCAL, *src)], [message])
        if fuses:
            self._sent_from[src] = made
            self._sent_ends.setdefault((src.space, src.lo), set()).add(src.hi)
        return made

    def _sender(self, src: Slice) -> int | None:
        maker = self._maker(src)
        if maker is not None:
            return maker
        sender = self._sent_from.get(src)
        if sender is not None and self._unchanged_since(src, sender):
            return sender
        return None

    def _message_in(self, peer: int) -> Entry:
        k = self.messages_in.get(peer, 0)
        self.messages_in[peer] = k + 1
        return (MESSAGE, peer, k, 0)

    def _recv(self, step: Step) -> int:
        assert step.dst is not None
        message = self._message_in(step.peer)
        self._before_write(step.dst)
        return self._emit([message], [(LOCAL, *step.dst)], joins=True)

    def _rred(self, step: Step) -> int:
        assert step.src is not None
        assert step.dst is not None
        message = self._message_in(step.peer)
        src = self._resolve(step.src)
        if src == step.dst and not step.after and (joined := self._joinable(src)) >= 0:
            self.instructions[joined].inputs.append(message)
            return joined
        self._before_write(step.dst)
        return self._emit([(LOCAL, *src), message], [(LOCAL, *step.dst)], joins=True)

    def _joinable(self, dst: Slice) -> int:
        """Return the receive-and-reduce that made dst if it can take one more input."""
        maker = self._maker(dst)
        if maker is None or not self.instructions[maker].joins:
            return -1
        blocks = self._blocks(dst)
        unread = all(
            self._reader.get(block, -1) <= maker and not self._copied_from.get(block)
            for block in blocks
        )
        inputs = self.instructions[maker].local_inputs()
        whole = all(self._unchanged_since(where, maker) for where in inputs)
        return maker if unread and whole else -1

    def _red(self, step: Step) -> int:
        assert step.src is not None
        assert step.dst is not None
        inputs = [(LOCAL, *self._resolve(step.dst)), (LOCAL, *self._resolve(step.src))]
        self._before_write(step.dst)
        return self._emit(inputs, [(LOCAL, *step.dst)])

    def _copy(self, step: Step) -> int | None:
        assert step.src is not None
        assert step.dst is not None
        dst = step.dst
        if step.src == dst or self._resolve(step.src) == dst:
            return None
        self._before_write(dst)
        # Only now: carrying out what read the destination may have moved the source.
        src = self._resolve(step.src)
        position = len(self.instructions)
        for offset in range(src.hi - src.lo):
            source = (src.space, src.lo + offset)
            block = (dst.space, dst.lo + offset)
            self._copies[block] = (source, position)
            location = self._first[src.space] + source[1]
            self._copied_from.setdefault(location, set()).add(block)
        return None


def _drop_dead(lowering: _Lowering) -> list[int]:
    """Drop outputs nobody reads, then instructions without effect; return the rest."""
    live = {
        (space, block)
        for space, description in enumerate(lowering.program.spaces)
        if description.kind == "out"
        for block in range(description.nblk)
    }
    kept: list[int] = []
    for index in range(len(lowering.instructions) - 1, -1, -1):
        one = lowering.instructions[index]
        outputs = [
            entry
            for entry in one.outputs
            if entry[0] == MESSAGE
            or any((entry[1], block) in live for block in range(*entry[2:]))
        ]
        # A message that is passed on as it came, or that MPI receives, has its length
        # from a local operand alone.
        messages = [entry for entry in one.inputs if entry[0] == MESSAGE]
        relays = outputs and all(e[0] == MESSAGE for e in [*outputs, *one.inputs])
        if not relays and all(lowering.can_fuse(entry[1]) for entry in messages):
            one.outputs = outputs
        for where in one.local_outputs():
            live -= {(where.space, block) for block in range(where.lo, where.hi)}
        if not one.outputs:
            # Its messages must still be taken, its local operands need not be read.
            one.inputs = [entry for entry in one.inputs if entry[0] == MESSAGE]
        if not one.inputs and not one.outputs:
            continue
        for where in one.local_inputs():
            live |= {(where.space, block) for block in range(where.lo, where.hi)}
        kept.append(index)
    return kept[::-1]


def _rank_order(rank: int) -> Callable[[Entry], int]:
    return lambda entry: rank if entry[0] == LOCAL else entry[1]


def lower(
    schedule: Schedule | RankProgram,
    rank: int | None = None,
    can_fuse: Callable[[int], bool] = lambda peer: True,
) -> Lowered:
    """Return the engine's form of the program of ``rank``.

    Args:
        schedule: a schedule, or the program of one rank.
        rank: whose program; may be left out for a program.
        can_fuse: whether sends to a peer may be outputs of other instructions
            (shared memory) or must be instructions of their own (MPI).
    """
    if isinstance(schedule, RankProgram):
        program = schedule
    elif rank is None:
        raise ScheduleError(
            "lower: a schedule has a program for each rank; pass rank=, to say which "
            "rank's"
        )
    else:
        program = schedule.program(rank)
    lowering = _Lowering(program, can_fuse)
    lowering.run()
    kept = _drop_dead(lowering)
    return _pack(lowering, kept)


def _pack(lowering: _Lowering, kept: list[int]) -> Lowered:
    program = lowering.program
    number = {index: position for position, index in enumerate(kept)}
    tracker = DependencyTracker(program.spaces)
    inputs: list[list[Entry]] = []
    outputs: list[list[Entry]] = []
    deps: list[list[int]] = []
    used: set[int] = set()
    for position, index in enumerate(kept):
        one = lowering.instructions[index]
        reads, writes = one.local_inputs(), one.local_outputs()
        used.update(where.space for where in reads + writes)
        needed = tracker.access(position, reads, writes)
        needed.update(number[other] for other in one.after if other in number)
        needed.discard(position)
        inputs.append(sorted(one.inputs, key=_rank_order(program.rank)))
        outputs.append(one.outputs)
        deps.append(sorted(needed))
    packed_inputs, input_ptr = _csr(inputs)
    packed_outputs, output_ptr = _csr(outputs)
    flat = [dep for one_deps in deps for dep in one_deps]
    return Lowered(
        rank=program.rank,
        spaces=tuple(
            replace(space, scale=(0, 1))
            if space.kind == "tmp" and i not in used
            else space
            for i, space in enumerate(program.spaces)
        ),
        inputs=packed_inputs,
        input_ptr=input_ptr,
        outputs=packed_outputs,
        output_ptr=output_ptr,
        deps=np.array(flat, np.int32),
        dep_ptr=_pointers(deps),
        messages_in=lowering.messages_in,
        messages_out=lowering.messages_out,
        num_publishes=sum(any(e[0] == MESSAGE for e in row) for row in outputs),
    )


def _csr(rows: list[list[Entry]]) -> tuple[Table, Table]:
    flat = [entry for row in rows for entry in row]
    return np.array(flat, np.int32).reshape(-1, 4), _pointers(rows)


def _pointers(rows: list[list[Entry]] | list[list[int]]) -> Table:
    return np.concatenate([[0], np.cumsum([len(row) for row in rows])]).astype(np.int32)
