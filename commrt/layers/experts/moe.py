# SPDX-License-Identifier: Apache-2.0
"""A mixture of experts over a grid with the axes data, expert and tensor."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn

from commrt.comm import Communicator
from commrt.errors import UsageError, shown
from commrt.layers.agreed_seed import agreed_seed
from commrt.layers.experts.balance import (
    Load,
    capacity_of,
    kept,
    router_losses,
)
from commrt.layers.experts.mlp import MlpExperts
from commrt.layers.experts.owned import ModuleExperts
from commrt.layers.experts.roles import ExpertRoles
from commrt.layers.experts.route import Arrivals, Route
from commrt.layers.experts.router import Choice, Router
from commrt.layers.experts.rows import collect, collect_weighted, spread
from commrt.layers.experts.trips import arrived, moved, sent
from commrt.layers.process_grid import ProcessGrid
from commrt.layers.tensor3d.grid_module import GridModule
from commrt.layers.tensor3d.roles import Along
from commrt.layers.tensors.moves import summed_backward

__all__ = ["Mixture", "MoE"]

Tensor: TypeAlias = torch.Tensor


class Mixture(NamedTuple):
    """A mixture's output, losses and counts."""

    output: Tensor
    """Like the input."""
    balance_loss: Tensor | None
    """The load-balancing loss of all ranks' tokens; None without losses."""
    z_loss: Tensor | None
    """The router's z-loss of all ranks' tokens; None without losses."""
    expert_counts: Tensor | None
    """(experts,): choices of each expert by all ranks' tokens, before any is dropped;
    None without losses and capacity. In memory of the host."""
    num_dropped: int
    """Choices of all ranks that experts had no room for."""


class MoE(GridModule):
    """A mixture of experts, of which each token takes k.

        grid = ProcessGrid(comm, {"data": 1, "expert": 0, "tensor": 1})
        moe = MoE(512, 7, 2048, grid=grid, top_k=2, num_shared=1)
        mixture = moe(x)
        loss = task_loss(mixture.output) + 0.01 * mixture.balance_loss
        loss.backward()
        sync_gradients(moe)

    Ranks along ``data`` and ``expert`` have tokens of their own, any number, also none.
    Those along ``tensor`` have the same ones, bit for bit. All ranks call the layer and
    its backward pass, and an input needs a gradient on all ranks or on none.

    Args:
        d_model: features of a token.
        num_experts: any number; place i of p along ``expert`` has those from
            i * num_experts // p on.
        d_hidden: hidden features of each expert; None with ``expert``.
        grid: the ranks.
        top_k: experts of each token.
        capacity_factor: None: no choice is dropped. Else an expert takes
            ceil(capacity_factor * k * T / num_experts) of the T tokens of all ranks,
            the first ones that choose it, in the order of ranks along ``data`` and
            ``expert``, ``data`` the slower one. Weights of other choices stay.
        normalize_weights: True: a token's k weights are divided by their sum.
        num_shared: experts that every token takes besides, with the weight 1. Each rank
            has them all, and computes while tokens travel.
        activation: of experts with ``d_hidden``: "swiglu", "gelu" or "relu".
        expert: returns the module of an expert by its number, in place of ``d_hidden``;
            it is called for this rank's experts. Shared ones have the numbers from
            ``num_experts`` on. Ranks along ``tensor`` all compute whole experts.
        losses: False: no losses, and without a capacity nothing is sent for them.
        device, dtype: of the parameters; ``expert`` makes its own.

    Shapes: input (..., d_model), output the same. Parameters: ``router.weight``;
    ``experts.gate``, ``experts.up`` and ``experts.down``, and those of ``shared``, of
    (experts, d_hidden, d_model), which ``MlpExperts`` cuts; or those of ``expert``.

    Pattern, on p ranks along ``expert`` with at most m experts each, for a rank that
    sends R rows and gets Q, makes C choices and gets B of them, has T tokens, and
    elements of e bytes. R is at most T min(k, p), since a token travels once to each
    rank that has any of its experts:

    - forward, along ``expert``: an ``alltoall`` of 8 p (1 + m), and ``alltoallv`` of
      4 C for the choices, C e for weights, R d_model e for tokens, Q d_model e for
      outputs;
    - backward, along ``expert``: ``alltoallv`` of R d_model e and Q d_model e, and of
      B e for weights;
    - along ``tensor``, with ``d_hidden``: an ``allreduce`` of T d_model e forward; of
      T d_model e and T k e backward;
    - over ``data`` and ``expert``, with losses or a capacity: an ``allgather`` of 8
      bytes for each expert and rank; with losses an ``allreduce`` of num_experts + 1
      elements, and again backward.

    An axis of one rank sends nothing, and on one rank the layer has the bits of a plain
    loop over experts. A token's outputs are added in the order of experts.

    Collective when it is made: ranks draw the same parameters, from a seed of the first
    rank. Raises UsageError for a grid or sizes that do not fit.
    """

    roles: ExpertRoles

    def __init__(
        self,
        d_model: int,
        num_experts: int,
        d_hidden: int | None = None,
        *,
        grid: ProcessGrid,
        top_k: int = 1,
        capacity_factor: float | None = None,
        normalize_weights: bool = False,
        num_shared: int = 0,
        activation: str = "swiglu",
        expert: Callable[[int], nn.Module] | None = None,
        losses: bool = True,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(ExpertRoles(grid))
        _check_sizes(d_model, num_experts, d_hidden, top_k, num_shared)
        _check_capacity(capacity_factor)
        if (d_hidden is None) == (expert is None):
            raise UsageError(
                "MoE: give d_hidden, the hidden features of each expert, or expert, a "
                "function that returns a module; one of the two"
            )
        if expert is not None and not callable(expert):
            raise UsageError(f"MoE: expert={shown(expert)} must be a function")
        self.d_model, self.num_experts = d_model, num_experts
        self.capacity_factor, self.losses = capacity_factor, bool(losses)
        seed = agreed_seed(grid.comm)
        self.router = Router(
            *(d_model, num_experts, top_k),
            normalize=bool(normalize_weights),
            generator=torch.Generator().manual_seed(seed),
            device=device,
            dtype=dtype,
        )

        def made(numbers: range, along: Along) -> MlpExperts | ModuleExperts:
            if expert is not None:
                return ModuleExperts(expert, numbers, self.roles, along)
            assert d_hidden is not None
            return MlpExperts(
                *(len(numbers), d_model, d_hidden),
                roles=self.roles,
                along=along,
                activation=activation,
                seed=seed + 4 * numbers.start + 1,
                device=device,
                dtype=dtype,
            )

        self.experts = made(range(num_experts), self.roles.experts)
        shared = range(num_experts, num_experts + num_shared)
        self.shared = made(shared, self.roles.nobody) if num_shared else None
        self._are_summands = expert is None and self.roles.tensor.size > 1

    def forward(self, x: Tensor) -> Mixture:
        """Return the layer's output and losses; collective.

        Raises UsageError for other features, or another type than the router's, before
        anything is sent.
        """
        self._check(x)
        tokens = x.reshape(-1, self.d_model)
        choice = self.router(tokens)
        load = None
        if self.losses or self.capacity_factor is not None:
            load = Load.of(choice.experts, self.num_experts, self.roles.tokens)
        is_kept, num_dropped = self._kept(choice, load)
        output = self._mixed(tokens, choice, is_kept)
        balance = z = None
        if self.losses and load is not None:
            balance, z = router_losses(choice, load, self.roles.tokens)
        total = None if load is None else load.total
        return Mixture(output.view(x.shape), balance, z, total, num_dropped)

    def _kept(self, choice: Choice, load: Load | None) -> tuple[Tensor | None, int]:
        """Return which choices experts have room for, and how many they have not."""
        if self.capacity_factor is None or load is None:
            return None, 0
        top_k = self.router.top_k
        capacity = capacity_of(
            self.capacity_factor, load.num_tokens, top_k, self.num_experts
        )
        num_dropped = int((load.total - capacity).clamp(min=0).sum())
        return kept(choice.experts, load, capacity), num_dropped

    def _mixed(self, x: Tensor, choice: Choice, is_kept: Tensor | None) -> Tensor:
        """Return the weighted outputs of the experts, and of the shared ones."""
        route = Route(choice.experts, is_kept, self.num_experts, self.roles.experts)
        weights = choice.weights
        if self._are_summands:
            # Ranks along the axis compute with parts of an expert, so each has a part
            # of the gradient.
            x = summed_backward(x, self.roles.grid, ("tensor",))
            weights = summed_backward(weights, self.roles.grid, ("tensor",))
        rows = sent(spread(x, route.tokens), route.rows_trip)
        factors = sent(
            weights.reshape(-1).index_select(0, route.choices), route.weights_trip
        )
        shared = self._shared(x)  # while tokens travel
        arrivals = route.arrivals()
        rows = arrived(rows, route.rows_trip)
        factors = arrived(factors, route.weights_trip)
        rows = self._computed(rows, factors, arrivals)
        y = collect(moved(rows, route.rows_trip.mirrored()), route.tokens)
        for output in shared:
            y = y + output
        if self._are_summands:
            y = _Whole.apply(y, self.roles.tensor.comm)
        return y

    def _shared(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return the output of each shared expert."""
        if self.shared is None:
            return ()
        number = self.shared.num_experts
        outputs = self.shared(x.repeat(number, 1), (len(x),) * number)
        parts: tuple[Tensor, ...] = outputs.split([len(x)] * number)
        return parts

    def _computed(self, rows: Tensor, factors: Tensor, arrivals: Arrivals) -> Tensor:
        """Return for each row the weighted sum of its experts' outputs."""
        copies = spread(rows, arrivals.copies)
        outputs = self.experts(copies, arrivals.counts).to(rows.dtype)
        factors = factors.index_select(0, arrivals.order)
        summed = collect_weighted(outputs, factors, arrivals.copies)
        if torch.is_grad_enabled() and not summed.requires_grad:
            # The backward pass sends on all ranks, or on none; this one may have no
            # expert that is trained.
            summed = summed.detach().requires_grad_()
        return summed

    def _check(self, x: Tensor) -> None:
        if not isinstance(x, torch.Tensor):
            raise UsageError(f"MoE: x={shown(x)} must be a tensor of torch")
        if x.dim() == 0 or x.shape[-1] != self.d_model:
            raise UsageError(
                f"MoE: input of shape {tuple(x.shape)} must have {self.d_model} "
                f"features in its last dimension"
            )
        dtype = self.router.weight.dtype
        if x.dtype != dtype and not torch.is_autocast_enabled(x.device.type):
            raise UsageError(
                f"MoE: input of type {x.dtype} meets weights of type {dtype}; convert "
                f"one of them, or use torch.autocast"
            )

    def extra_repr(self) -> str:
        """Return the layer's capacity and grid, for ``print(model)``."""
        factor, shape = self.capacity_factor, self.roles.grid.shape
        return f"capacity_factor={factor}, grid={shape}"


class _Whole(torch.autograd.Function):  # type: ignore[misc]
    """The sum of all ranks' summands, which all of them get, and its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Communicator) -> Tensor:
        total = x.detach().clone(memory_format=torch.contiguous_format)
        comm.allreduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def _check_sizes(
    d_model: int, num_experts: int, d_hidden: int | None, top_k: int, num_shared: int
) -> None:
    """Raise UsageError for numbers that are none."""
    least = {"d_model": 1, "num_experts": 1, "d_hidden": 0, "top_k": 1, "num_shared": 0}
    given = {
        "d_model": d_model,
        "num_experts": num_experts,
        "d_hidden": 0 if d_hidden is None else d_hidden,
        "top_k": top_k,
        "num_shared": num_shared,
    }
    for name, number in given.items():
        if type(number) is not int or number < least[name]:
            raise UsageError(
                f"MoE: {name}={shown(number)} must be an integer of at least "
                f"{least[name]}"
            )
    if top_k > num_experts:
        raise UsageError(
            f"MoE: top_k={top_k} is more than num_experts={num_experts}; a token takes "
            f"each expert once at most"
        )


def _check_capacity(factor: float | None) -> None:
    is_number = isinstance(factor, int | float) and not isinstance(factor, bool)
    if factor is None or (is_number and math.isfinite(factor) and factor > 0):
        return
    raise UsageError(
        f"MoE: capacity_factor={shown(factor)} must be a number above 0, or None, "
        f"which drops nothing"
    )
