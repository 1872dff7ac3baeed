# SPDX-License-Identifier: Apache-2.0
"""One forward pass through all blocks, and the backward pass that follows it.

``torch.autograd.graph.saved_tensors_hooks`` hand over every tensor that autograd saves,
so the graph is that of plain torch, and so are its bits. A hook on each block's output
says when the block's backward pass begins.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from commrt.errors import UsageError
from commrt.layers.out_of_core.costs import Mode
from commrt.layers.out_of_core.entries import Entry, Use, storage_key, version_of
from commrt.layers.out_of_core.near import NearMemory
from commrt.layers.out_of_core.planner import Plan
from commrt.layers.out_of_core.replay import Replay
from commrt.layers.out_of_core.values import tensors_of

__all__ = ["Pass"]

Tensor: TypeAlias = torch.Tensor


class _Pack:
    """A tensor that autograd has saved, in the place of the tensor."""

    def __init__(self, owner: Pass, block: int, use: Use, entry: Entry | None) -> None:
        self._pass, self.block = owner, block
        self.use: Use | None = use
        self.entry = entry
        """None: the use is always near, or has to be recomputed."""

    def __del__(self) -> None:
        self._pass.released(self.block, self.use, self.entry)


class _Block:
    """One block of a pass."""

    def __init__(self, module: nn.Module, mode: Mode) -> None:
        self.module, self.mode = module, mode
        self.uses: dict[Entry, int] = {}
        """Entries of its saved tensors, and how many of these they have."""
        self.packs: list[Any] = []
        """Weak references to what is to be recomputed, in the order of saving."""
        self.num_alive = 0
        self.inputs: list[tuple[Use, Entry | None, bool]] = []
        """Of a block to recompute: with their entries, and whether they need
        gradients."""
        self.is_tuple = False
        self.replay: Replay | None = None
        self.copies: Entry | None = None
        """The copies of buffers."""

    def holds(self, entry: Entry | None) -> bool:
        """Return whether an entry is that of an input, held for a recomputation."""
        return entry is not None and any(entry is own for _, own, _ in self.inputs)


class Pass:
    """A forward pass and its backward passes.

    Args:
        modules: the blocks.
        plan: a mode for each of them.
        near: for all passes.
        check: raises an error if a backward pass must not begin.
        record: is told what happens to which block.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        plan: Plan,
        near: NearMemory,
        check: Callable[[], None],
        record: Callable[[str, int], None],
    ) -> None:
        self._plan, self._near = plan, near
        self._check, self._record = check, record
        self._blocks = [
            _Block(module, mode if cost.saved_nbytes or cost.output_nbytes else "keep")
            for module, mode, cost in zip(modules, plan.modes, plan.costs, strict=True)
        ]
        self._entries: dict[int, Entry] = {}  # near ones, by the key of their storage
        self._resident: set[int | None] = set()
        self._open: int | None = None
        self._is_abandoned = False

    @property
    def is_alive(self) -> bool:
        """True while autograd holds any of its saved tensors."""
        is_held = any(block.num_alive for block in self._blocks)
        return is_held and not self._is_abandoned

    # -- forward -----------------------------------------------------------------

    def forward(self, value: Any) -> Any:
        """Return the output of the last block."""
        self._resident = {storage_key(x) for x in tensors_of(value, "the input")}
        try:
            for number in range(len(self._blocks)):
                value = self._forward(number, value)
        except BaseException:
            self.abandon()
            raise
        for entry in self._entries.values():
            entry.is_pinned = False
        self._entries.clear()
        return value

    def _forward(self, number: int, value: Any) -> Any:
        block, cost = self._blocks[number], self._plan.costs[number]
        inputs = tensors_of(value, f"the input of block {number}")
        owned = sum(each.nbytes for each in self._entries.values())
        self._near.make_room(max(0, cost.forward_nbytes(block.mode) - owned))
        self._record("forward", number)
        resident = {storage_key(x) for x in block.module.parameters()}
        resident |= {storage_key(x) for x in block.module.buffers()}
        resident |= self._resident
        is_replayed = block.mode == "recompute"
        if is_replayed:
            block.is_tuple = isinstance(value, tuple)
            self._hold_inputs(number, inputs)
        versions = [version_of(x) for x in inputs]

        def pack(tensor: Tensor) -> _Pack:
            return self._packed(number, tensor, resident, is_replayed=is_replayed)

        with saved_tensors_hooks(pack, self._unpacked):
            value = block.module(value)
        if is_replayed and versions != [version_of(x) for x in inputs]:
            raise UsageError(
                f"OutOfCore: block {number} changes its input in place, so it cannot "
                f"be recomputed; set inplace=False in its first layers, or give modes "
                f"that keep or swap it"
            )
        outputs = tensors_of(value, f"the output of block {number}")
        self._end_forward(number, inputs, outputs)
        return value

    def _end_forward(
        self, number: int, inputs: Sequence[Tensor], outputs: Sequence[Tensor]
    ) -> None:
        """Hand the output's entries on to the next block, and let others leave."""
        block = self._blocks[number]
        for output in outputs:
            is_handed_on = any(output is x for x in inputs)
            # A hook of a leaf, such as a parameter, would outlive this pass.
            if output.requires_grad and not is_handed_on and not output.is_leaf:
                output.register_hook(lambda _: self._begin(number))
        if not block.num_alive:
            self._release_inputs(block)
        is_last = number + 1 == len(self._blocks)
        results = {storage_key(output) for output in outputs}
        leaving = []
        for key, entry in [*self._entries.items()]:
            if key in results and not is_last:
                entry.owner = number + 1
                continue
            entry.is_pinned = False
            del self._entries[key]
            if key not in results:  # the program holds the last output
                leaving.append(entry)
        if block.mode == "swap" and leaving:
            self._record("store", number)
            self._near.leave(leaving)

    def _hold_inputs(self, number: int, inputs: Sequence[Tensor]) -> None:
        block = self._blocks[number]
        for x in inputs:
            use = Use(x)
            key = storage_key(x)
            is_free = key in self._resident or key is None
            entry = None if is_free else self._entry(number, x, use)
            block.inputs.append((use, entry, x.requires_grad))
        block.replay = Replay(block.module, [x.device for x in inputs])
        nbytes = sum(each.nbytes for each in block.replay.buffers.values())
        if nbytes:
            copies = Entry(nbytes, number)
            copies.is_pinned = True  # they never leave
            self._near.add(copies)
            block.copies = copies

    def _packed(
        self,
        number: int,
        tensor: Tensor,
        resident: Collection[int | None],
        *,
        is_replayed: bool,
    ) -> _Pack:
        block, use, key = self._blocks[number], Use(tensor), storage_key(tensor)
        block.num_alive += 1
        if key in resident or key is None:
            pack = _Pack(self, number, use, None)
        elif is_replayed and not block.holds(self._entries.get(key)):
            use.leave()
            pack = _Pack(self, number, use, None)
            pack.use = None
        else:
            pack = _Pack(self, number, use, self._entry(number, tensor, use))
        if is_replayed:
            block.packs.append(weakref.ref(pack))
        return pack

    def _entry(self, number: int, tensor: Tensor, use: Use) -> Entry:
        """Return the entry of the tensor's storage, with one use more."""
        key = storage_key(tensor)
        assert key is not None
        entry = self._entries.get(key)
        if entry is None:
            entry = Entry(tensor.untyped_storage().nbytes(), number)
            entry.is_pinned = True
            entry.uses.append(use)
            self._near.add(entry)
            self._entries[key] = entry
        else:
            entry.uses.append(use)
        entry.owner = max(entry.owner, number)
        uses = self._blocks[number].uses
        uses[entry] = uses.get(entry, 0) + 1
        return entry

    # -- backward ----------------------------------------------------------------

    def _begin(self, number: int) -> None:
        """Prepare a block's backward pass: the gradient of its output is there."""
        self._check()
        if torch.is_grad_enabled():
            raise UsageError(
                "OutOfCore: gradients of gradients (create_graph=True) are not there; "
                "leave create_graph out"
            )
        if self._is_abandoned or self._open == number:
            return
        if self._open is not None:
            self._close(self._open)
        self._record("backward", number)
        self._open = number
        self._make_near(number)

    def _make_near(self, number: int) -> None:
        """Bring a block's saved tensors back, and ask for those of earlier blocks."""
        block = self._blocks[number]
        needed = [*block.uses]
        if any(not entry.is_near for entry in needed):
            self._record("load", number)
        for entry in needed:
            entry.is_pinned = True
        self._near.bring(needed, is_needed=True)
        for earlier in range(number - 1, -1, -1):
            begin = self._plan.prefetch[earlier]
            if begin is None:
                continue
            if begin < number:
                break
            wanted = [e for e in self._blocks[earlier].uses if e.owner == earlier]
            is_missing = any(not entry.is_near for entry in wanted)
            if not self._near.bring(wanted, is_needed=False):
                break
            if is_missing:
                self._record("load", earlier)
        self._near.arrive(needed)
        if block.mode == "recompute" and block.num_alive:
            self._recompute(number)

    def _close(self, number: int) -> None:
        """Let go of what a block's backward pass needed, if its graph is retained."""
        block = self._blocks[number]
        before = self._blocks[number - 1].uses if number else {}
        for entry in block.uses:
            entry.is_pinned = False
        if block.mode == "recompute":
            self._drop_replayed(block)
        far = [e for e in block.uses if e.slot is not None and e not in before]
        self._near.leave(far)

    def _unpacked(self, pack: _Pack) -> Tensor:
        """Return a saved tensor to autograd."""
        if self._is_abandoned:
            raise UsageError(
                "OutOfCore: this pass ended with an error, and its saved tensors are "
                "gone; do the forward pass again"
            )
        if pack.use is None or (pack.entry is not None and not pack.entry.is_near):
            self._make_near(pack.block)
        assert pack.use is not None
        if pack.entry is None:
            return pack.use.value(None)
        if pack.entry.coming is not None or pack.entry.leaving is not None:
            self._near.arrive([pack.entry])
        return pack.use.value(pack.entry.storage)

    # -- recomputation -----------------------------------------------------------

    def _recompute(self, number: int) -> None:
        """Do a block's forward pass again, and give its tensors to what is saved."""
        block, cost = self._blocks[number], self._plan.costs[number]
        packs = [reference() for reference in block.packs]
        if all(pack is None or pack.use is not None for pack in packs):
            return
        self._record("recompute", number)
        self._near.make_room(cost.replayed_nbytes - cost.resident_nbytes)
        inputs = tuple(
            use.value(None if entry is None else entry.storage)
            .detach()
            .requires_grad_(needs_gradient)
            for use, entry, needs_gradient in block.inputs
        )
        keys = {}
        for x, (_, entry, _) in zip(inputs, block.inputs, strict=True):
            if entry is not None:
                keys[storage_key(x)] = entry
        self._entries = {key: e for key, e in keys.items() if key is not None}
        at = 0

        def pack(tensor: Tensor) -> None:
            nonlocal at
            at += 1
            found = packs[at - 1] if at <= len(packs) else None
            if found is not None and found.use is None:
                self._adopt(number, found, tensor)

        try:
            with saved_tensors_hooks(pack, _refused):
                assert block.replay is not None
                block.replay(inputs if block.is_tuple else inputs[0])
        finally:
            self._entries = {}
        if at != len(packs):
            raise UsageError(
                f"OutOfCore: block {number} saved {len(packs)} tensors in its forward "
                f"pass, and {at} when it was recomputed; it must do the same each "
                f"time. Give modes that keep or swap it"
            )

    def _adopt(self, number: int, pack: _Pack, tensor: Tensor) -> None:
        use = Use(tensor)
        key = storage_key(tensor)
        pack.use = use
        pack.entry = None if key is None else self._entry(number, tensor, use)

    def _drop_replayed(self, block: _Block) -> None:
        """Let recomputed tensors go, whose graph is retained."""
        for reference in block.packs:
            pack = reference()
            if pack is not None and pack.entry is not None:
                self._drop_use(block, pack.use, pack.entry)
                pack.use = pack.entry = None

    # -- the end -----------------------------------------------------------------

    def released(self, number: int, use: Use | None, entry: Entry | None) -> None:
        """Release a saved tensor of a block, which autograd has released.

        The garbage collector may call this in any thread, amid anything.
        """
        self._near.later(partial(self._forget, number, use, entry))

    def _forget(self, number: int, use: Use | None, entry: Entry | None) -> None:
        if self._is_abandoned:
            return
        block = self._blocks[number]
        if entry is not None:
            self._drop_use(block, use, entry)
        block.num_alive -= 1
        if not block.num_alive:
            self._release_inputs(block)

    def _release_inputs(self, block: _Block) -> None:
        for use, entry, _ in block.inputs:
            if entry is not None:
                self._drop_use(block, use, entry)
        block.inputs.clear()
        block.replay = None
        if block.copies is not None:
            self._near.remove(block.copies)
            block.copies = None

    def _drop_use(self, block: _Block, use: Use | None, entry: Entry) -> None:
        assert use is not None
        if len(entry.uses) > 1:
            entry.uses.remove(use)
        else:
            for key in [k for k, each in self._entries.items() if each is entry]:
                del self._entries[key]
            self._near.remove(entry)
        block.uses[entry] -= 1
        if not block.uses[entry]:
            del block.uses[entry]

    def abandon(self) -> None:
        """Release everything; later calls of autograd raise an error."""
        if self._is_abandoned:
            return
        self._is_abandoned = True
        entries = {entry for block in self._blocks for entry in [*block.uses]}
        entries |= {block.copies for block in self._blocks if block.copies is not None}
        self._near.abandon(entries)
        self._entries.clear()
        for block in self._blocks:
            block.uses.clear()
            block.inputs.clear()
            block.replay = None


def _refused(_: Any) -> Tensor:
    raise AssertionError("the graph of a recomputation is never run backward")
