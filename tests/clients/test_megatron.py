# SPDX-License-Identifier: Apache-2.0
"""Megatron-core on commrt: tensor and sequence parallel layers, 1F1B, on the CPU.

It knows only CUDA and NCCL, for which ``cuda_on_cpu`` answers.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import cuda_on_cpu
import pytest
import torch
import torch.distributed as dist
from client_calls import Calls, calls
from client_programs import DEADLINE_S, Program
from client_training import STEPS, alone, optimizer_of
from torch import nn

import commrt

PROGRAM = Program("megatron-core", "megatron-core", "megatron")
pytestmark = PROGRAM.marks
WORDS, HIDDEN, LENGTH, SEQUENCES = 24, 12, 8, 4
E = 4
"""Bytes of an element."""


def fill(weight: torch.Tensor) -> torch.Tensor:
    """Give a whole matrix its first values, which follow from its shape."""
    generator = torch.Generator().manual_seed(1000 * weight.shape[0] + weight.shape[1])
    with torch.no_grad():
        return weight.copy_(0.3 * torch.randn(weight.shape, generator=generator))


def text(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return words, and those that follow them; [position, sequence]."""
    generator = torch.Generator().manual_seed(200 + step)
    words = torch.randint(0, WORDS, (LENGTH, SEQUENCES), generator=generator)
    return words, (words * 5 + 3) % WORDS


# -- in one process ------------------------------------------------------------------


class Plain(nn.Module):
    """What the parallel models compute, in torch's own layers."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, HIDDEN)
        self.up = nn.Linear(HIDDEN, 4 * HIDDEN)
        self.down = nn.Linear(4 * HIDDEN, HIDDEN)
        self.out = nn.Linear(HIDDEN, WORDS, bias=False)
        for layer in (self.words, self.up, self.down, self.out):
            fill(layer.weight)
        for biased in (self.up, self.down):
            nn.init.zeros_(biased.bias)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Return logits; [position, sequence, word]."""
        hidden = self.words(words)
        hidden = hidden + self.down(torch.tanh(self.up(hidden)))
        found: torch.Tensor = self.out(hidden)
        return found


def plain_loss(model: nn.Module, step: int) -> torch.Tensor:
    words, following = text(step)
    logits = model(words).flatten(0, 1)
    return nn.functional.cross_entropy(logits, following.flatten())


# -- tensor and sequence parallel ----------------------------------------------------


def started(**sizes: int) -> None:
    """Start as a program for NCCL does."""
    cuda_on_cpu.answer()
    dist.init_process_group("nccl")
    assert dist.get_backend() == "commrt"
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(**sizes)


def configuration(**more: Any) -> Any:
    from megatron.core import ModelParallelConfig

    config = ModelParallelConfig(
        use_cpu_initialization=True, params_dtype=torch.float32, **more
    )
    config.hidden_size = HIDDEN
    return config


class Parallel(nn.Module):
    """The model in Megatron's layers: all of their collectives are in it."""

    def __init__(self, config: Any) -> None:
        from megatron.core import tensor_parallel as layers

        super().__init__()
        self.is_split = config.sequence_parallel
        how = {"config": config, "init_method": fill}
        self.words = layers.VocabParallelEmbedding(
            WORDS, HIDDEN, reduce_scatter_embeddings=self.is_split, **how
        )
        self.up = layers.ColumnParallelLinear(HIDDEN, 4 * HIDDEN, **how)
        self.down = layers.RowParallelLinear(
            4 * HIDDEN,
            HIDDEN,
            bias=True,
            input_is_parallel=True,
            skip_bias_add=False,
            **how,
        )
        self.out = layers.ColumnParallelLinear(HIDDEN, WORDS, bias=False, **how)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the logits."""
        # Where the positions are split, its own transposition is done by Megatron.
        hidden = self.words(words.t() if self.is_split else words)
        hidden = hidden + self.down(torch.tanh(self.up(hidden)[0]))[0]
        found: torch.Tensor = self.out(hidden)[0]
        return found


def tensor_parallel(size: int, folder: str) -> list[list[float]]:
    """Train without and with the positions split, too."""
    started(tensor_model_parallel_size=size)
    found = []
    for split in (False, True):
        with commrt.trace.record(f"{folder}/{split}"):
            found.append(trained_in_parallel(size, split))
    return found


def trained_in_parallel(size: int, sequence_parallel: bool) -> list[float]:
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    replicas = parallel_state.get_data_parallel_world_size()
    replica = parallel_state.get_data_parallel_rank()
    config = configuration(
        tensor_model_parallel_size=size, sequence_parallel=sequence_parallel
    )
    model = Parallel(config)
    optimizer = optimizer_of(model.parameters())
    losses = []
    for step in range(STEPS):
        words, following = (each.chunk(replicas, 1)[replica] for each in text(step))
        optimizer.zero_grad()
        loss = vocab_parallel_cross_entropy(model(words), following).mean()
        loss.backward()
        finish(model)
        optimizer.step()
        losses.append(loss.item())
    return losses


def finish(model: nn.Module) -> None:
    """Sum what each rank has for its positions only, and average replicas."""
    from megatron.core import parallel_state

    for parameter in model.parameters():
        if getattr(parameter, "sequence_parallel", False):
            group = parallel_state.get_tensor_model_parallel_group()
            dist.all_reduce(parameter.grad, group=group)
        dist.all_reduce(
            parameter.grad,
            op=dist.ReduceOp.AVG,
            group=parallel_state.get_data_parallel_group(),
        )


def tensor_formula(ranks: int, size: int, is_split: bool, rank: int) -> Calls:
    """Return what the parallel layers call, and what replicas sum their gradients in.

    Each has the bytes of its activations, the words' positions times HIDDEN. Without
    split positions: an allreduce of what the embedding and the row parallel layer
    return, and of the gradient of what each column parallel layer was given. With them,
    each of these is a reduce_scatter, with an allgather where the other direction needs
    the whole; and a column parallel layer gathers its input again for the gradient of
    its weight: a pair of layers has 5 calls.
    """
    peers, replicas = groups_of(ranks, size, rank)
    nbytes = E * LENGTH * SEQUENCES // len(replicas) * HIDDEN
    layers = "layers.forward", "layers.backward"
    gather, scatter = ("allgather", peers, nbytes), ("reduce_scatter", peers, nbytes)
    if is_split:
        found = calls("mappings._reduce_scatter_along_first_dim", *scatter, times=2)
        found += calls("mappings._gather_along_first_dim", *gather, times=2)
        found += calls(layers[0], *gather, times=2)
        found += calls(layers[1], *gather, times=2) + calls(
            layers[1], *scatter, times=2
        )
    else:
        found = calls("mappings._reduce", "allreduce", peers, nbytes, times=2)
        found += calls(layers[1], "allreduce", peers, nbytes, times=2)
    cut = (WORDS * HIDDEN, 4 * HIDDEN * HIDDEN, 4 * HIDDEN, 4 * HIDDEN * HIDDEN)
    mine = [E * count // size for count in (*cut, WORDS * HIDDEN)] + [E * HIDDEN]
    found += calls("test_megatron.finish", "allreduce", replicas, *mine)
    return times(STEPS, found)


def tensor_beside(ranks: int, size: int, is_split: bool, rank: int) -> Calls:
    """Return what the loss needs, and the bias that split positions have parts of."""
    peers, replicas = groups_of(ranks, size, rank)
    words = E * LENGTH * SEQUENCES // len(replicas)
    # The largest logit, that of the right word, the sum of exponentials.
    found = calls("cross_entropy.forward", "allreduce", peers, words, times=3)
    if is_split:
        found += calls("test_megatron.finish", "allreduce", peers, E * HIDDEN)
    return times(STEPS, found)


def groups_of(ranks: int, size: int, rank: int) -> tuple[range, range]:
    """Return the ranks that have parts of the same layers, and the replicas' ranks."""
    first = rank - rank % size
    return range(first, first + size), range(rank % size, ranks, size)


def times(count: int, each: Calls) -> Calls:
    """Return calls so many times."""
    return Calls({call: count * n for call, n in each.items()})


@pytest.mark.parametrize(("ranks", "size"), [(2, 2), (4, 4), (4, 2)])
def test_tensor_parallel(
    torchrun: Any, compare: Any, account: Any, tmp_path: Path, ranks: int, size: int
) -> None:
    got = torchrun(
        *(ranks, tensor_parallel),
        deadline_s=DEADLINE_S,
        size=size,
        folder=str(tmp_path),
    )
    want = alone(Plain(), plain_loss)
    how = f"parallel over {size}"
    kinds = (f"tensor {how}", f"tensor and sequence {how}")
    for kind, is_split, *each in zip(kinds, (False, True), *got, strict=True):
        compare(f"{PROGRAM}, {kind}", want, each)
        formula = partial(tensor_formula, ranks, size, is_split)
        beside = partial(tensor_beside, ranks, size, is_split)
        account(f"{PROGRAM}, {kind}", tmp_path / str(is_split), formula, beside)


# -- 1F1B ----------------------------------------------------------------------------


class Stage(nn.Module):
    """One layer of a pipeline; the last one has what becomes the loss."""

    def __init__(self, config: Any, number: int) -> None:
        super().__init__()
        self.config = config
        self.layer = stage_layer(number)
        self.given: torch.Tensor | None = None

    def set_input_tensor(self, tensors: list[torch.Tensor | None]) -> None:
        """Take what the stage before it has made."""
        self.given = tensors[0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what the next stage is given."""
        x = x if self.given is None else self.given
        found: torch.Tensor = torch.tanh(self.layer(x))
        return found


def stage_layer(number: int) -> nn.Linear:
    torch.manual_seed(60 + number)
    return nn.Linear(HIDDEN, HIDDEN)


def rows(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return input and what shall come out; [position, sequence, number]."""
    generator = torch.Generator().manual_seed(300 + step)
    x = torch.randn(LENGTH, SEQUENCES, HIDDEN, generator=generator)
    return x, torch.sin(2 * x).roll(1, dims=2)


def piped_loss(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    return (got - want).square().mean()


def one_forward_one_backward(stages: int, folder: str) -> list[list[float]]:
    """Train with messages in batches, and each alone."""
    started(pipeline_model_parallel_size=stages)
    found = []
    for batched in (True, False):
        with commrt.trace.record(f"{folder}/{batched}"):
            found.append(piped(stages, batched))
    return found


def piped(stages: int, batched: bool) -> list[float]:
    from megatron.core import parallel_state
    from megatron.core.enums import ModelType
    from megatron.core.pipeline_parallel import get_forward_backward_func

    config = configuration(
        pipeline_model_parallel_size=stages,
        pipeline_dtype=torch.float32,
        batch_p2p_comm=batched,
    )
    model: Any = Stage(config, parallel_state.get_pipeline_model_parallel_rank())
    model.model_type = ModelType.encoder_or_decoder
    replicas = parallel_state.get_data_parallel_world_size()
    replica = parallel_state.get_data_parallel_rank()

    def forward(data: Iterator[Any], of: Any) -> Any:
        x, want = next(data)

        def loss(got: torch.Tensor) -> Any:
            value = piped_loss(got, want)
            return value, {"loss": value.detach().clone()}

        return of(x), loss

    optimizer = optimizer_of(model.parameters())
    losses = []
    microbatches = SEQUENCES // replicas
    for step in range(STEPS):
        x, y = (each.chunk(replicas, 1)[replica] for each in rows(step))
        pieces = zip(x.split(1, 1), y.split(1, 1), strict=True)
        optimizer.zero_grad()
        found = get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=pieces,
            model=model,
            num_microbatches=microbatches,
            seq_length=LENGTH,
            micro_batch_size=1,
        )
        for parameter in model.parameters():
            group = parallel_state.get_data_parallel_group()
            dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG, group=group)
        optimizer.step()
        # Only the last stage knows the loss.
        mine = torch.tensor(sum(float(each["loss"]) for each in found) / microbatches)
        last = parallel_state.get_pipeline_model_parallel_last_rank()
        dist.broadcast(
            mine, last, group=parallel_state.get_pipeline_model_parallel_group()
        )
        losses.append(mine.item())
    return losses


def pipeline_formula(ranks: int, stages: int, batched: bool, rank: int) -> Calls:
    """Return a message per micro-batch, boundary and direction, and gradients' sums."""
    line, replicas = stages_of(ranks, stages, rank)
    at, microbatches = line.index(rank), SEQUENCES // len(replicas)
    place = f"p2p_communication.{'_batched_p2p_ops' if batched else '_p2p_ops'}"
    found: Calls = Calls()
    for other in [*line[max(at - 1, 0) : at], *line[at + 1 : at + 2]]:
        nbytes = E * LENGTH * HIDDEN
        found += calls(place, "send", (rank, other), nbytes, times=microbatches)
        found += calls(place, "recv", (other, rank), nbytes, times=microbatches)
    mine = (E * HIDDEN * HIDDEN, E * HIDDEN)
    found += calls("test_megatron.piped", "allreduce", replicas, *mine)
    return times(STEPS, found)


def pipeline_beside(ranks: int, stages: int, rank: int) -> Calls:
    """Return how the last stage tells the loss: a call of the test's own."""
    line, _ = stages_of(ranks, stages, rank)
    return calls("test_megatron.piped", "bcast", line, E, times=STEPS)


def stages_of(ranks: int, stages: int, rank: int) -> tuple[range, range]:
    """Return the ranks of a pipeline, and those that have the same stage."""
    replicas = ranks // stages
    first = rank - rank % replicas
    return range(rank % replicas, ranks, replicas), range(first, first + replicas)


@pytest.mark.parametrize(("ranks", "stages"), [(2, 2), (4, 4), (4, 2)])
def test_pipeline(
    torchrun: Any, compare: Any, account: Any, tmp_path: Path, ranks: int, stages: int
) -> None:
    got = torchrun(
        *(ranks, one_forward_one_backward),
        deadline_s=DEADLINE_S,
        stages=stages,
        folder=str(tmp_path),
    )
    whole = nn.Sequential()
    for number in range(stages):
        whole.extend([stage_layer(number), nn.Tanh()])

    def loss(model: nn.Module, step: int) -> torch.Tensor:
        x, want = rows(step)
        return piped_loss(model(x), want)

    want = alone(whole, loss)
    kinds = ("messages in batches", "messages alone")
    for kind, batched, *losses in zip(kinds, (True, False), *got, strict=True):
        what = f"{PROGRAM}, 1F1B of {stages} stages, {kind}"
        compare(what, want, losses)
        formula = partial(pipeline_formula, ranks, stages, batched)
        beside = partial(pipeline_beside, ranks, stages)
        account(what, tmp_path / str(batched), formula, beside)


# -- experts on several ranks --------------------------------------------------------

EXPERTS, K = 4, 2


class PlainExperts(nn.Module):
    """Each position goes to the ``K`` best experts, in torch's own words."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Parameter(drawn(EXPERTS, HIDDEN, 70))
        self.up = nn.Parameter(torch.stack([drawn(16, HIDDEN, 80 + n) for n in TURN]))
        self.down = nn.Parameter(torch.stack([drawn(HIDDEN, 16, 90 + n) for n in TURN]))
        self.chosen: list[torch.Tensor] = []
        """In each step: how often each sequence's positions go to each expert."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the experts' results, weighed by the router."""
        best = (x @ self.router.T).topk(K, dim=-1)
        ones = nn.functional.one_hot(best.indices, EXPERTS)
        self.chosen.append(ones.sum(dim=(0, 2)))
        weights = (ones * best.values.softmax(-1)[..., None]).sum(dim=-2)
        inner = torch.tanh(torch.einsum("psh,eih->psei", x, self.up))
        return torch.einsum("psei,ehi,pse->psh", inner, self.down, weights)


TURN = range(EXPERTS)


def drawn(rows: int, columns: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 0.4 * torch.randn(rows, columns, generator=generator)


def experts(size: int, folder: str) -> list[float]:
    """Train a layer of experts that are distributed over so many ranks."""
    started(expert_model_parallel_size=size)
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.mlp import MLPSubmodules
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        ffn_hidden_size=16,
        num_attention_heads=1,
        num_moe_experts=EXPERTS,
        moe_router_topk=K,
        moe_router_load_balancing_type="none",
        moe_token_dispatcher_type="alltoall",
        expert_model_parallel_size=size,
        use_cpu_initialization=True,
        params_dtype=torch.float32,
        add_bias_linear=False,
        activation_func=torch.tanh,
        bias_activation_fusion=False,
    )
    kinds = MLPSubmodules(ColumnParallelLinear, RowParallelLinear)
    layer: Any = MoELayer(config, kinds)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mine = layer.experts.local_experts
    with torch.no_grad():
        layer.router.weight.copy_(drawn(EXPERTS, HIDDEN, 70))
        for at, expert in enumerate(mine):
            number = rank % size * len(mine) + at
            expert.linear_fc1.weight.copy_(drawn(16, HIDDEN, 80 + number))
            expert.linear_fc2.weight.copy_(drawn(HIDDEN, 16, 90 + number))
    optimizer = optimizer_of(layer.parameters())
    losses = []
    with commrt.trace.record(folder):
        for step in range(STEPS):
            x, want = (each.chunk(ranks, 1)[rank] for each in rows(step))
            x = x.clone().requires_grad_()
            optimizer.zero_grad()
            loss = piped_loss(layer(x)[0], want)
            loss.backward()
            # Experts have the gradients of all ranks that gave them positions.
            for expert in mine:
                for weight in expert.parameters():
                    weight.grad /= ranks
            dist.all_reduce(layer.router.weight.grad, op=dist.ReduceOp.AVG)
            optimizer.step()
            losses.append(loss.item())
    return losses


def experts_formula(chosen: list[torch.Tensor], size: int, rank: int) -> Calls:
    """Return four all-to-alls a step, and the sum of the router's gradient.

    A rank sends each position to K experts, and their results back to where they came
    from, forwards; and backwards what is the gradient of each.
    """
    each = E * HIDDEN
    found: Calls = Calls()
    for step in chosen:
        per_rank = step.chunk(size)
        sent = int(per_rank[rank].sum())
        mine = slice(rank * EXPERTS // size, (rank + 1) * EXPERTS // size)
        got = int(step[:, mine].sum())
        both = each * sent, each * got
        found += calls("mappings.forward", "alltoall", range(size), *both, times=2)
    router = E * EXPERTS * HIDDEN
    return found + calls(
        *("test_megatron.experts", "allreduce", range(size), router), times=STEPS
    )


@pytest.mark.parametrize("size", [2, 4])
def test_experts(
    torchrun: Any, compare: Any, account: Any, tmp_path: Path, size: int
) -> None:
    folder = tmp_path / "log"
    got = torchrun(
        *(size, experts), deadline_s=DEADLINE_S, size=size, folder=str(folder)
    )
    model = PlainExperts()

    def loss(model: nn.Module, step: int) -> torch.Tensor:
        x, want = rows(step)
        return piped_loss(model(x), want)

    what = f"{PROGRAM}, {EXPERTS} experts over {size}"
    compare(what, alone(model, loss), got)
    # How many positions go to each expert, before they go.
    place = "mappings._gather_along_first_dim_moe"
    beside = calls(place, "allgather", range(size), 8 * EXPERTS * size, times=STEPS)
    account(what, folder, partial(experts_formula, model.chosen, size), beside)
