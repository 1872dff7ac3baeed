# SPDX-License-Identifier: Apache-2.0
"""A step of a mixture of experts beside DeepSpeed's, in one launch.

    torchrun --nproc-per-node 2 -m commrt.bench.experts
    torchrun --nproc-per-node 4 -m commrt.bench.experts --widths 512 --experts 7,8

A step is the forward and the backward pass of one layer, and the sum of the router's
gradient over ranks. Weights, tokens and the output's gradient are the same for all
ways, and float32; an expert is a perceptron with gelu, without biases. Tokens choose
their experts in two ways:

- ``drawn``: by random tokens and a random router, and no choice is dropped.
- ``even``: each expert gets as many tokens as each other one from every rank. Layers
  have a capacity factor of 1, so DeepSpeed's sends no padding. That is its best case.

Under both rules DeepSpeed's layer and commrt's are the same function. Outputs, and
gradients of tokens, of the router and of experts, are compared before anything is
timed. DeepSpeed runs over groups of gloo and over groups of commrt. ``alone`` is
commrt's layer where each rank has all experts for itself: it computes as much, and
sends nothing.

All ways take turns, block by block, so that they meet the same machine. Times are
medians over blocks, in microseconds for a step, of rank 0. ``ratio`` is that of
commrt's time to each other one's, the median over blocks. Numbers of experts that ranks
do not divide are refused by DeepSpeed, and measured without it.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from commrt.bench.in_process_group import names_of, report
from commrt.bench.step_turns import in_turns, table
from commrt.errors import UsageError

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from commrt.layers.process_grid import ProcessGrid

__all__ = ["Workload", "main", "measure", "step_on", "workloads"]

ROUTINGS = ("drawn", "even")
"""How tokens choose their experts."""


class Workload(NamedTuple):
    """A layer and its tokens."""

    width: int
    """Features of a token."""
    hidden: int
    """Hidden features of an expert."""
    experts: int
    top_k: int
    tokens: int
    """Tokens of each rank."""
    routing: str
    """One of ``ROUTINGS``."""

    @property
    def name(self) -> str:
        """The first column of the table."""
        return (
            f"{self.tokens}x{self.width}, {self.hidden} hidden, "
            f"{self.experts} experts, top {self.top_k}, {self.routing}"
        )

    @property
    def capacity_factor(self) -> float | None:
        """Of both layers; None: they drop nothing."""
        return 1.0 if self.routing == "even" else None


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print a table; collective over the ranks that torchrun started."""
    parser = argparse.ArgumentParser(prog="python -m commrt.bench.experts")
    for name, default, text in (
        ("widths", "256,512,1024", "features of a token"),
        ("tokens", "256,1024", "tokens of each rank"),
        ("experts", "4,8", "experts of all ranks"),
        ("top-k", "2", "experts of a token, 1 or 2"),
    ):
        parser.add_argument(
            f"--{name}",
            type=_numbers,
            default=_numbers(default),
            help=f"{text}, with commas between them (default: {default})",
        )
    parser.add_argument(
        "--routing",
        type=names_of(ROUTINGS),
        default=list(ROUTINGS),
        help=f"how tokens choose (default: {','.join(ROUTINGS)})",
    )
    parser.add_argument(
        "--expansion",
        type=float,
        default=2.0,
        help="hidden features of an expert for each feature of a token (default: 2)",
    )
    parser.add_argument(
        "--alone", action="store_true", help="without DeepSpeed, which may be missing"
    )
    parser.add_argument("--blocks", type=int, default=15, help="turns of each way")
    parser.add_argument("--out", help="write all times to this file")
    given = parser.parse_args(argv)
    if given.blocks < 1:
        parser.error(f"--blocks {given.blocks}: expected a number from 1")
    wanted = workloads(
        *(given.widths, given.tokens, given.experts, given.top_k, given.routing),
        expansion=given.expansion,
    )
    report(
        lambda: measure(wanted, given.blocks, with_deepspeed=not given.alone),
        _text,
        given.out,
    )
    return 0


def _numbers(text: str) -> list[int]:
    numbers = [int(word) for word in text.split(",")]
    if min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"{text}: expected numbers from 1")
    return numbers


def workloads(
    widths: Sequence[int],
    tokens: Sequence[int],
    experts: Sequence[int],
    top_k: Sequence[int],
    routings: Sequence[str],
    *,
    expansion: float = 2.0,
) -> list[Workload]:
    """Return all workloads of some sizes.

    Raises UsageError for more than two experts of a token, for more than there are, and
    for even choices of tokens that experts do not divide.
    """
    made = [
        Workload(width, max(1, round(expansion * width)), number, k, count, routing)
        for routing, number, k, width, count in itertools.product(
            routings, experts, top_k, widths, tokens
        )
    ]
    for each in made:
        if each.top_k > 2 or each.top_k > each.experts:
            raise UsageError(
                f"experts: top_k={each.top_k} of {each.experts} experts; expected 1 or "
                f"2, and no more than there are"
            )
        if each.routing == "even" and (
            each.tokens % each.experts or each.width < each.experts
        ):
            raise UsageError(
                f"experts: {each.tokens} tokens of {each.width} features cannot choose "
                f"{each.experts} experts evenly; give a multiple, and a feature for "
                f"each expert, or --routing drawn"
            )
    return made


def measure(
    wanted: Sequence[Workload],
    blocks: int,
    *,
    with_deepspeed: bool = True,
    least_s: float = 0.05,
) -> list[dict[str, Any]]:
    """Return the times of blocks, in µs for a step, by workload and way.

    Args:
        wanted: the workloads.
        blocks: turns of each way.
        with_deepspeed: False: commrt's ways alone.
        least_s: how long a block is to last about.

    Raises UsageError on one rank, and where DeepSpeed is missing.
    """
    import torch
    import torch.distributed as dist

    from commrt.bench import peer_deepspeed
    from commrt.layers.process_grid import ProcessGrid

    torch.set_num_threads(1)
    everyone: Any = dist.group.WORLD
    if dist.get_world_size() == 1:
        raise UsageError("experts: 1 rank; start two at least: one rank sends nothing")
    groups: dict[str, dist.ProcessGroup] = {}
    if with_deepspeed:
        peer_deepspeed.begin()
        groups = {"gloo": dist.new_group(backend="gloo"), "commrt": everyone}
    comm = everyone.communicator
    rows = []
    with (
        comm.split(comm.rank) as own,
        ProcessGrid(comm, {"expert": 0}) as grid,
        ProcessGrid(own, {"expert": 0}) as alone,
    ):
        for workload in wanted:
            ways, refusal = _ways(workload, grid, alone, groups)
            steps = {name: way.step for name, way in ways.items()}
            times = in_turns(steps, blocks=blocks, least_s=least_s)
            row = {"workload": workload.name, **workload._asdict(), "us": times}
            rows.append(row | ({"refusal": refusal} if refusal else {}))
    return rows


def _ways(
    workload: Workload,
    grid: ProcessGrid,
    alone: ProcessGrid,
    groups: Mapping[str, dist.ProcessGroup],
) -> tuple[dict[str, _Way], str | None]:
    """Return the ways, of equal results, and why DeepSpeed refuses the workload.

    Args:
        workload: the sizes.
        grid: all ranks.
        alone: this rank.
        groups: all ranks, for DeepSpeed's layer.
    """

    rank = grid.rank
    ours = _Commrts(workload, grid, rank)
    state = ours.state()
    ways: dict[str, _Way] = {"commrt": ours}
    refusal = None
    try:
        for name, group in groups.items():
            ways[f"DeepSpeed, {name}"] = _DeepSpeeds(workload, group, state)
    except AssertionError as error:
        refusal = str(error)
    right = [each.clone() for each in ours.results()]
    for other in [*ways.values()][1:]:
        _check_close(other.results(), right)
    ways["alone"] = _Commrts(workload, alone, rank, state)
    found = ways["alone"].results()[:2]
    _check_close(found, right[:2])
    return ways, refusal


def _check_close(found: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> None:
    """Raise AssertionError where a tensor is off by more than a part of its largest."""
    import torch

    for one, other in zip(found, right, strict=True):
        largest = float(other.abs().max()) if other.numel() else 0.0
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4 * largest)


class _Way:
    """A layer and its step."""

    x: torch.Tensor
    step: Callable[[], torch.Tensor]

    def gradients(self) -> list[torch.Tensor]:
        """Return gradients of the router and of this rank's experts."""
        raise NotImplementedError

    def results(self) -> list[torch.Tensor]:
        """Return the output and all gradients of a step."""
        output = self.step()
        gradient = self.x.grad
        assert gradient is not None
        return [output.detach(), gradient, *self.gradients()]


class _Commrts(_Way):
    """commrt's layer.

    Args:
        workload: the sizes.
        grid: the ranks with other experts.
        rank: says which tokens are this rank's.
        state: weights of all experts; None: those of the workload.
    """

    def __init__(
        self,
        workload: Workload,
        grid: ProcessGrid,
        rank: int,
        state: dict[str, Any] | None = None,
    ) -> None:
        import torch

        from commrt.layers.experts import MoE, load_state_dict, sync_gradients

        torch.manual_seed(3)  # the layer draws from a seed of the first rank
        self.moe = moe = MoE(
            *(workload.width, workload.experts, workload.hidden),
            grid=grid,
            top_k=workload.top_k,
            capacity_factor=workload.capacity_factor,
            normalize_weights=workload.top_k > 1,
            activation="gelu",
            losses=False,
        )
        if state is not None:
            load_state_dict(moe, state)
        elif workload.routing == "even":
            with torch.no_grad():
                moe.router.weight.copy_(_even_router(workload))
        self.x, gradient = _tokens(workload, rank)

        def step() -> torch.Tensor:
            self.x.grad = None
            moe.zero_grad()
            output = moe(self.x).output
            output.backward(gradient)
            sync_gradients(moe, average=False)
            return output

        self.step = step

    def state(self) -> dict[str, Any]:
        """Return the weights of all experts; collective."""
        from commrt.layers.experts import state_dict

        whole = state_dict(self.moe)
        assert whole is not None  # all ranks get it
        return whole

    def gradients(self) -> list[torch.Tensor]:
        experts = self.moe.experts
        return [self.moe.router.weight.grad, experts.up.grad, experts.down.grad]


def step_on(workload: Workload, grid: ProcessGrid) -> Callable[[], list[torch.Tensor]]:
    """Return a step of commrt's layer, which returns its output and gradients.

    Args:
        workload: the layer and its tokens.
        grid: the ranks that share the experts, along its axis ``expert``.
    """
    return _Commrts(workload, grid, grid.rank).results


class _DeepSpeeds(_Way):
    """DeepSpeed's layer on the ranks of a group, with the weights of all experts."""

    def __init__(
        self, workload: Workload, group: dist.ProcessGroup, state: dict[str, Any]
    ) -> None:
        import torch.distributed as dist

        from commrt.bench import peer_deepspeed

        self.made = made = peer_deepspeed.layer(
            *(workload.width, workload.hidden, workload.experts, workload.top_k),
            group,
            capacity_factor=workload.capacity_factor,
        )
        peer_deepspeed.load(made, state, dist.get_rank())
        self._router = made.deepspeed_moe.gate.wg.weight
        self.x, gradient = _tokens(workload, dist.get_rank())

        def step() -> torch.Tensor:
            self.x.grad = None
            made.zero_grad()
            output: torch.Tensor = made(self.x)[0]
            output.backward(gradient)
            dist.all_reduce(self._router.grad, group=group)
            return output

        self.step = step

    def gradients(self) -> list[torch.Tensor]:
        import torch

        experts = self.made.deepspeed_moe.experts.deepspeed_experts
        ups = torch.stack([each.up.weight.grad for each in experts])
        downs = torch.stack([each.down.weight.grad.T for each in experts])
        return [self._router.grad, ups, downs]


def _tokens(workload: Workload, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a rank's tokens and the gradient of their outputs."""
    import torch

    draws = torch.Generator().manual_seed(rank)
    shape = workload.tokens, workload.width
    x, gradient = (torch.randn(shape, generator=draws) for _ in range(2))
    if workload.routing == "even":
        # The i-th token is the likeliest to go to the expert i, then to i + 1.
        number = torch.arange(workload.tokens)
        x[:, : workload.experts] = 0
        x[number, number % workload.experts] = 2
        if workload.experts > 1:
            x[number, (number + 1) % workload.experts] = 1
    return x.requires_grad_(), gradient / workload.tokens


def _even_router(workload: Workload) -> torch.Tensor:
    """Return the router that reads an expert's logit from a feature."""
    import torch

    return torch.eye(workload.experts, workload.width)


def _text(rows: Sequence[dict[str, Any]]) -> str:
    """Return a table of the rows with DeepSpeed, and one of those without."""
    texts = []
    for is_refused in (False, True):
        some = [row for row in rows if ("refusal" in row) == is_refused]
        if some:
            texts.append(table(some, "workload"))
        if is_refused and some:
            texts.append(f"DeepSpeed refuses these: {some[0]['refusal']}")
    return "\n".join(texts)


if __name__ == "__main__":
    sys.exit(main())
