# SPDX-License-Identifier: Apache-2.0
"""A module whose branches run on different ranks.

Source: sub-graph parallelism of LBANN (Van Essen et al.), with branches in the place of
parts of a graph.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import nn

from commrt.comm import Communicator
from commrt.errors import RefusedError, UsageError, shown
from commrt.group.agreed_calls import fact_number
from commrt.layers.branches.alike import (
    check_apart,
    check_equal,
    check_initialized,
    check_join,
    facts_of,
)
from commrt.layers.branches.exchange import exchanged, gathered, part_of, tied
from commrt.layers.branches.placement import Placement, place
from commrt.layers.experts.rows import Copies, spread
from commrt.layers.process_grid import ProcessGrid
from commrt.layers.samples.agreement import agreed
from commrt.layers.spatial.windows import Range, meet
from commrt.layers.tensor3d.whole_state import WholeState, load_own

__all__ = ["Branches"]

Tensor: TypeAlias = torch.Tensor
Branch: TypeAlias = nn.Module | Callable[[], nn.Module]
Join: TypeAlias = str | Callable[[dict[str, Tensor]], Tensor]
Form: TypeAlias = tuple[tuple[int, ...], torch.dtype]
"""Shape of a branch's output for one sample, and its type."""
_POSITIVE = (1 << 63) - 1


class Branches(nn.Module, WholeState):  # type: ignore[misc]
    """Branches that take the same samples, and whose outputs are joined.

        pair = Branches({"near": make_near, "far": make_far}, comm, sizes=[1, 3])
        y = pair(x)
        loss(y).backward()
        sync_gradients(model)

    Each branch has ranks of its own, and samples are cut evenly among these. Parameters
    of a branch lie on its ranks alone. With more branches than ranks, ranks have
    several, about the same cost on each.

    Args:
        branches: modules by name, or functions that return them. A function is called
            on the branch's ranks alone, so no other one needs its memory. A module maps
            samples to outputs one by one: (n, ...) to (n, ...).
        comm: the ranks.
        sizes: ranks of each branch, in sum all; None: by ``costs``.
        costs: of each branch, such as its floating-point operations; None: equal.
        join: "sum", "concat" along ``dim``, or a function of all outputs by name.
        dim: of "concat"; not 0, which is that of samples.
        samples: "own": each rank has samples of its own, any number, also none. "all":
            all ranks have the same samples, bit for bit, and get all outputs.

    All ranks call the module, and the backward pass of its output. An input needs a
    gradient on all ranks or on none. On one rank it is the plain module.

    Pattern, for n samples of this rank, of F bytes each, of N of all ranks, B branches
    with outputs of D bytes for a sample, and P ranks, of which this one computes m
    samples for branches with D_own bytes:

    - "own", forward: an ``allgather`` of 24 P, an ``alltoallv`` of samples, F for each
      sample and rank that computes it, an ``allgather`` of 16 P, and an ``alltoallv``
      of m D_own; backward: two ``alltoallv`` of the same bytes the other way;
    - "all", forward: the same ``allgather``, and an ``allgatherv`` of N outputs of
      all branches; backward: an ``allreduce`` of N F, where the input needs a gradient.

    Collective when it is made: ranks of a branch take the parameters and buffers of the
    first of them, by a ``bcast`` of each. Raises UsageError for arguments that do not
    fit, on all ranks.
    """

    def __init__(
        self,
        branches: Mapping[str, Branch],
        comm: Communicator,
        *,
        sizes: Sequence[int] | None = None,
        costs: Sequence[float] | None = None,
        join: Join = "sum",
        dim: int = -1,
        samples: str = "own",
    ) -> None:
        super().__init__()
        if not isinstance(comm, Communicator):
            raise UsageError(f"Branches: comm={shown(comm)} must be a communicator")

        self.names: tuple[str, ...] = ()
        self.samples, self._join, self._dim = samples, join, dim
        self.placement = Placement(())
        self.branch_comm: Communicator | None = None
        """The ranks that have this rank's branch; None: it has it alone."""
        self._forms: dict[tuple[int, ...], dict[str, Form]] = {}
        self._grid = ProcessGrid(comm, {"branch": 0})
        self._ranks = self._grid.comm if comm.size > 1 else None
        try:
            self._build(branches, comm, sizes, costs)
        except BaseException:
            self.close()
            raise

    def _build(
        self,
        branches: Mapping[str, Branch],
        comm: Communicator,
        sizes: Sequence[int] | None,
        costs: Sequence[float] | None,
    ) -> None:
        """Place and make this rank's branches; collective."""
        facts: dict[str, list[str]] = {}

        def made() -> tuple[tuple[Placement, dict[str, nn.Module]], int, list[str]]:
            placement = _placed(branches, comm.size, sizes, costs)
            for name in branches:
                _check_name(self, name)
            join, dim = self._join, self._dim
            _check_join(join, dim, self.samples)
            own = [[*branches][at] for at in placement.of(comm.rank)]
            modules = {name: _module_of(name, branches[name]) for name in own}
            check_apart({**branches, **modules})
            for at in placement.of(comm.rank):
                if len(placement.ranks[at]) > 1:
                    check_initialized([*branches][at], modules[[*branches][at]])
            facts.update({name: facts_of(each) for name, each in modules.items()})
            number = fact_number([*facts.values()]) & _POSITIVE
            said = join if isinstance(join, str) else "a function"
            texts = [f"branches {[*branches]}", f"ranks {placement.ranks}"]
            texts.append(f"join={said!r}, {dim}, {self.samples}")
            return (placement, modules), number, texts

        (placement, modules), numbers = agreed("Branches", comm, made)
        many = [ranks for ranks in placement.ranks if len(ranks) > 1]
        if any(len({numbers[rank] for rank in ranks}) > 1 for ranks in many):
            check_equal(comm.allgather_object(facts))
        self.placement, self.names = placement, tuple(branches)
        first = min(placement.of(comm.rank))
        color = first if len(placement.ranks[first]) > 1 else None
        if self._ranks is not None:
            self.branch_comm = self._ranks.split(color, name=f"{comm.name}.branch")
        for name, module in modules.items():
            self.add_module(name, module)
            self._make_equal(module)

    def _make_equal(self, module: nn.Module) -> None:
        """Take the parameters and buffers of the branch's first rank."""
        for each in [*module.parameters(), *module.buffers()]:
            if self.branch_comm is not None and each.numel():
                given = each.detach()
                usable = given.contiguous()
                self.branch_comm.bcast(usable, root=0)
                if usable.data_ptr() != given.data_ptr():
                    given.copy_(usable)

    @property
    def grid(self) -> ProcessGrid:
        """The ranks, along one axis."""
        return self._grid

    def close(self) -> None:
        """Free the communicators of the module; local."""
        comm, self.branch_comm = self.branch_comm, None
        try:
            if comm is not None:
                comm.free()
        finally:
            self._grid.free()

    # -- samples there and outputs back ------------------------------------------------

    def forward(self, x: Tensor) -> Tensor:
        """Return the joined outputs of this rank's samples; collective.

        Raises UsageError for an input that does not fit, or differs from other ranks'.
        An error of a branch is raised on its rank, and RefusedError with the branch's
        name on all others.
        """
        comm = self._ranks
        if comm is None:
            _check_input(x)
            outputs = {name: self._run(name, x) for name in self.names}
            check_join(
                {name: tuple(y.shape[1:]) for name, y in outputs.items()},
                self._join,
                self._dim,
            )
            return self._joined(outputs)

        def check() -> tuple[int, int, list[str]]:
            _check_input(x)
            needs = x.requires_grad and torch.is_grad_enabled()
            texts = [f"samples of {tuple(x.shape[1:])}, {x.dtype}, gradient: {needs}"]
            same = [f"{len(x)} samples"] if self.samples == "all" else []
            return 1, len(x), [*texts, *same]

        _, numbers = agreed("Branches", comm, check)
        if self.samples == "all":
            num_samples, owned = len(x), [(0, len(x))] * comm.size
        else:
            num_samples = sum(numbers)
            ends = np.cumsum([0, *numbers]).tolist()
            owned = [*itertools.pairwise(ends)]
        computed = self.placement.samples(num_samples, comm.size)
        rows = self._rows(x, comm, owned, computed)
        outputs, error = self._outputs(rows, num_samples)
        forms = self._agreed_forms(comm, outputs, error)
        widths = [
            sum(math.prod(forms[name][0]) for name in self._names_of(rank))
            for rank in range(comm.size)
        ]
        (dtype,) = {dtype for _, dtype in forms.values()}
        flat = self._flat(rows, outputs, dtype)
        if self.samples == "all":
            counts = [
                (high - low) * width
                for (low, high), width in zip(computed, widths, strict=True)
            ]
            flat = gathered(flat, comm, counts)
        else:
            mine = computed[comm.rank]
            sends = [_shared(mine, other) * widths[comm.rank] for other in owned]
            counts = [
                _shared(owned[comm.rank], theirs) * width
                for theirs, width in zip(computed, widths, strict=True)
            ]
            flat = exchanged(flat, comm, sends, counts)
        return self._joined(self._taken_apart(flat, counts, widths, forms, len(x)))

    def _names_of(self, rank: int) -> list[str]:
        return [self.names[at] for at in self.placement.of(rank)]

    def _rows(
        self,
        x: Tensor,
        comm: Communicator,
        owned: Sequence[Range],
        computed: Sequence[Range],
    ) -> Tensor:
        """Return the samples that this rank computes."""
        low, high = computed[comm.rank]
        if self.samples == "all":
            return part_of(x, comm, low, high)
        mine = owned[comm.rank]
        each = x.shape[1:].numel()
        sends = [_shared(mine, theirs) for theirs in computed]
        source = [torch.arange(*meet(mine, theirs)) - mine[0] for theirs in computed]
        copies = Copies.of(torch.cat(source).to(x.device), len(x), comm.size)
        recvs = [_shared(computed[comm.rank], other) * each for other in owned]
        flat = exchanged(
            spread(x, copies).reshape(-1), comm, [n * each for n in sends], recvs
        )
        return flat.view(high - low, *x.shape[1:])

    def _outputs(
        self, rows: Tensor, num_samples: int
    ) -> tuple[dict[str, Tensor], tuple[str, Exception] | None]:
        """Return the outputs of this rank's branches, or the error of one."""
        outputs = {}
        for name in self._names_of(self._grid.rank):
            if len(rows) == 0 and num_samples:
                continue  # other ranks of the branch have samples, and tell the form
            try:
                outputs[name] = self._run(name, rows)
            except Exception as error:  # noqa: BLE001  the others wait to hear of it
                return outputs, (name, error)
        return outputs, None

    def _run(self, name: str, rows: Tensor) -> Tensor:
        output: Tensor = getattr(self, name)(rows)
        is_tensor = isinstance(output, torch.Tensor) and output.dim() > 0
        if not is_tensor or len(output) != len(rows):
            found = shown(output)
            if isinstance(output, torch.Tensor):
                found = f"a tensor of shape {tuple(output.shape)}"
            raise UsageError(
                f"Branches: branch {name!r} returned {found} for {len(rows)} samples; "
                f"expected a tensor whose first dimension is that of the samples"
            )
        return output

    def _agreed_forms(
        self,
        comm: Communicator,
        outputs: Mapping[str, Tensor],
        error: tuple[str, Exception] | None,
    ) -> dict[str, Form]:
        """Return the form of each branch's output; raise an error of any branch."""
        own = {name: (tuple(y.shape[1:]), y.dtype) for name, y in outputs.items()}
        number = fact_number(sorted(own.items(), key=str)) & _POSITIVE
        every = np.empty((comm.size, 2), np.int64)
        comm.allgather(np.array([error is not None, number]), out=every)
        if every[:, 0].any():
            failed = None if error is None else f"{error[0]!r}: {error[1]!r}"
            said = comm.allgather_object(failed)
            if error is not None:
                raise error[1]
            rank = int(np.flatnonzero(every[:, 0])[0])
            raise RefusedError(
                f"Branches: on rank {rank} branch {said[rank]}; so the call "
                f"ends on all ranks"
            )
        key = tuple(every[:, 1].tolist())
        if key not in self._forms:
            found: dict[str, Form] = {}
            for rank, forms in enumerate(comm.allgather_object(own)):
                for name, form in forms.items():
                    if found.setdefault(name, form) != form:
                        raise UsageError(
                            f"Branches: branch {name!r} returned {form} for a sample "
                            f"on rank {rank}, and {found[name]} on another rank"
                        )
            if len({dtype for _, dtype in found.values()}) > 1:
                raise UsageError(
                    f"Branches: outputs have several types: {found}; they must be equal"
                )
            check_join(
                {name: shape for name, (shape, _) in found.items()},
                self._join,
                self._dim,
            )
            self._forms[key] = found
        return self._forms[key]

    def _flat(
        self, rows: Tensor, outputs: Mapping[str, Tensor], dtype: torch.dtype
    ) -> Tensor:
        """Return the outputs of this rank's branches, sample by sample."""
        if outputs:
            columns = [
                y.reshape(len(y), math.prod(y.shape[1:])) for y in outputs.values()
            ]
            flat = torch.cat(columns, 1).reshape(-1)
        else:
            flat = rows.new_empty(0, dtype=dtype)
        if torch.is_grad_enabled():
            # The backward pass sends on all ranks; this one may train nothing.
            if not flat.requires_grad:
                flat = flat.detach().requires_grad_()
            flat = tied(flat, rows)
        return flat

    def _taken_apart(
        self,
        flat: Tensor,
        counts: Sequence[int],
        widths: Sequence[int],
        forms: Mapping[str, Form],
        num_samples: int,
    ) -> dict[str, Tensor]:
        """Return the outputs of each branch for this rank's samples."""
        parts: dict[str, list[Tensor]] = {name: [] for name in self.names}
        for rank, part in enumerate(flat.split([*counts])):
            names = self._names_of(rank)
            columns = [math.prod(forms[name][0]) for name in names]
            rows = part.view(-1, widths[rank]) if widths[rank] else None
            pieces = (
                [part.new_empty(0, 0)] * len(names)
                if rows is None
                else rows.split(columns, 1)
            )
            for name, piece in zip(names, pieces, strict=True):
                parts[name].append(piece)
        return {
            name: torch.cat([each.reshape(-1) for each in parts[name]]).view(
                num_samples, *forms[name][0]
            )
            for name in self.names
        }

    def _joined(self, outputs: dict[str, Tensor]) -> Tensor:
        if callable(self._join):
            return self._join(outputs)
        if self._join == "concat":
            return torch.cat([*outputs.values()], self._dim)
        total: Tensor = functools.reduce(operator.add, outputs.values())
        return total

    def __deepcopy__(self, memo: Mapping[int, Any]) -> Branches:
        """Raise UsageError: a copy needs communicators, which all ranks must make."""
        raise UsageError(
            "Branches: copy.deepcopy, which is local, cannot make the communicators "
            "that a copy needs; make another Branches of the same branches on all "
            "ranks, and load this one's state into it (load_state_dict)"
        )

    def extra_repr(self) -> str:
        """Return the branches' ranks, for ``print(model)``."""
        ranks = zip(self.names, self.placement.ranks, strict=True)
        return ", ".join(f"{name}: ranks {[*each]}" for name, each in ranks)

    # -- state of the serial module ----------------------------------------------------

    def has_elsewhere(self, name: str) -> bool:
        """Return whether an entry of the state is of another rank's branch; local."""
        branch = name.split(".")[0]
        return branch in self.names and branch not in self._modules

    def gathered(self) -> dict[str, Any]:
        """Return the state of all branches; collective.

        Bytes: a ``bcast`` of each tensor from the first rank of its branch.
        """
        own = {
            name: value.detach().clone() if isinstance(value, torch.Tensor) else value
            for name, value in self.state_dict(keep_vars=True).items()
        }
        if self._ranks is None:
            return own
        found: dict[str, Any] = {}
        for branch, ranks in zip(self.names, self.placement.ranks, strict=True):
            mine = {k: v for k, v in own.items() if k.split(".")[0] == branch}
            facts = [
                (name, value.shape, value.dtype, value.device.type)
                if isinstance(value, torch.Tensor)
                else (name, value)
                for name, value in mine.items()
            ]
            for name, *fact in self._ranks.bcast_object(facts, root=ranks[0]):
                if len(fact) == 1:
                    found[name] = fact[0]
                    continue
                shape, dtype, device = fact
                value = mine.get(name)
                if value is None:
                    value = torch.empty(shape, dtype=dtype, device=device)
                found[name] = value.contiguous()
                self._ranks.bcast(found[name], root=ranks[0])
        return found

    def _load_from_state_dict(self, *given: Any) -> None:
        """Load as torch does; branches of other ranks may be in the state."""
        load_own(self, super()._load_from_state_dict, *given)


def _shared(one: Range, other: Range) -> int:
    low, high = meet(one, other)
    return high - low


def _check_input(x: Tensor) -> None:
    if not isinstance(x, torch.Tensor) or x.dim() == 0:
        raise UsageError(
            f"Branches: x={shown(x)} must be a tensor whose first dimension is that of "
            f"the samples"
        )


def _module_of(name: str, branch: Branch) -> nn.Module:
    made = branch if isinstance(branch, nn.Module) else branch()
    if not isinstance(made, nn.Module):
        raise UsageError(
            f"Branches: branch {name!r} returned {shown(made)}; expected a module of "
            f"torch"
        )
    return made


def _check_name(module: nn.Module, name: Any) -> None:
    """Raise UsageError for a name that a module cannot give a child."""
    is_text = type(name) is str and name != "" and "." not in name
    if not is_text or hasattr(module, name):
        raise UsageError(
            f"Branches: the name {shown(name)} must be a text without dots that no "
            f"attribute of a module has"
        )


def _check_join(join: Any, dim: Any, samples: Any) -> None:
    if not callable(join) and join not in ("sum", "concat"):
        raise UsageError(
            f"Branches: join={shown(join)} must be 'sum', 'concat' or a function"
        )
    if type(dim) is not int or dim == 0:
        raise UsageError(
            f"Branches: dim={shown(dim)} must be an integer, and not 0: that is the "
            f"dimension of samples"
        )
    if samples not in ("own", "all"):
        raise UsageError(f"Branches: samples={shown(samples)} must be 'own' or 'all'")


def _placed(branches: Any, size: int, sizes: Any, costs: Any) -> Placement:
    """Return where branches lie; UsageError for numbers that do not fit."""
    if not isinstance(branches, Mapping) or not branches:
        raise UsageError(
            f"Branches: branches={shown(branches)} must be modules by name, at least 1"
        )
    for name, branch in branches.items():
        if not callable(branch):
            raise UsageError(
                f"Branches: branch {name!r} is {shown(branch)}; expected a module, or "
                f"a function that returns one"
            )
    costs = [1.0] * len(branches) if costs is None else [*costs]
    numbers = all(isinstance(cost, int | float) and cost > 0 for cost in costs)
    if len(costs) != len(branches) or not numbers or not math.isfinite(sum(costs)):
        raise UsageError(
            f"Branches: costs={shown(costs)} must be {len(branches)} numbers above 0"
        )
    if sizes is not None:
        sizes = [*sizes]
        fits = all(type(each) is int and each > 0 for each in sizes)
        if not fits or len(sizes) != len(branches) or sum(sizes) != size:
            raise UsageError(
                f"Branches: sizes={shown(sizes)} must be {len(branches)} integers "
                f"above 0 with the sum {size}, the number of ranks; leave them out "
                f"where there are more branches than ranks"
            )
    return place(costs, sizes, size)
