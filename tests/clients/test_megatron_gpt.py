# SPDX-License-Identifier: Apache-2.0
"""A whole GPT of Megatron-core on commrt, tensor and sequence parallel, on the CPU.

Its transformer layers are those of ``get_gpt_layer_local_spec``, which need no
Transformer Engine; its replicas are Megatron's own DistributedDataParallel. What each
layer calls is held to the formulas, call by call.
"""

from __future__ import annotations

import dataclasses
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
LAYERS, WORDS, HIDDEN, HEADS, INNER = 2, 24, 16, 4, 40
LENGTH, SEQUENCES = 8, 4
E = 4
"""Bytes of an element."""


def fill(weight: torch.Tensor) -> torch.Tensor:
    """Give a whole matrix its first values, which follow from its shape."""
    generator = torch.Generator().manual_seed(1000 * weight.shape[0] + weight.shape[1])
    with torch.no_grad():
        return weight.copy_(0.3 * torch.randn(weight.shape, generator=generator))


def text(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return words, and those that follow them; [sequence, position]."""
    generator = torch.Generator().manual_seed(400 + step)
    words = torch.randint(0, WORDS, (SEQUENCES, LENGTH), generator=generator)
    return words, (words * 5 + 3) % WORDS


# -- in one process ------------------------------------------------------------------


class Layer(nn.Module):
    """A transformer layer in torch's own words: attention and two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(HIDDEN) for _ in range(2))
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.project = nn.Linear(HIDDEN, HIDDEN)
        self.up = nn.Linear(HIDDEN, INNER)
        self.down = nn.Linear(INNER, HIDDEN)
        for linear in (self.qkv, self.project, self.up, self.down):
            fill(linear.weight)
            nn.init.zeros_(linear.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return numbers of the same shape, [sequence, position, number]."""
        # A head's queries, keys and values lie beside each other.
        heads = self.qkv(self.norms[0](x)).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        found = nn.functional.scaled_dot_product_attention(
            *heads.chunk(3, dim=-1), is_causal=True
        )
        x = x + self.project(found.transpose(1, 2).flatten(2))
        inner = nn.functional.gelu(self.up(self.norms[1](x)))
        return x + self.down(inner)  # type: ignore[no-any-return]


class Plain(nn.Module):
    """What the parallel model computes."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, HIDDEN)
        self.positions = nn.Embedding(LENGTH, HIDDEN)
        self.layers = nn.Sequential(*(Layer() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(HIDDEN)
        self.out = nn.Linear(HIDDEN, WORDS, bias=False)
        for layer in (self.words, self.positions, self.out):
            fill(layer.weight)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Return logits; [sequence, position, word]."""
        x = self.words(words) + self.positions.weight
        found: torch.Tensor = self.out(self.norm(self.layers(x)))
        return found


def plain_loss(model: nn.Module, step: int) -> torch.Tensor:
    words, following = text(step)
    logits = model(words).flatten(0, 1)
    return nn.functional.cross_entropy(logits, following.flatten())


# -- in parallel ---------------------------------------------------------------------


class SplitNorm(nn.LayerNorm):
    """torch's, for positions that are split: Megatron's own wrapper refuses them.

    As its fused one does, it marks its weights, whose gradients are of the positions of
    one rank.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__(hidden_size, eps=eps)
        for weight in (self.weight, self.bias):
            weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


def gpt(config: Any) -> Any:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    spec: Any = get_gpt_layer_local_spec()
    if config.sequence_parallel:
        norms = {"input_layernorm": SplitNorm, "pre_mlp_layernorm": SplitNorm}
        spec.submodules = dataclasses.replace(spec.submodules, **norms)
        spec = TransformerBlockSubmodules([spec] * LAYERS, SplitNorm)
    return GPTModel(config, spec, WORDS, LENGTH)


def train(size: int, folder: str) -> list[list[float]]:
    """Train without and with the positions split, too."""
    cuda_on_cpu.answer()
    dist.init_process_group("nccl")
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=size)
    model_parallel_cuda_manual_seed(5)
    found = []
    for split in (False, True):
        with commrt.trace.record(f"{folder}/{split}"):
            found.append(trained(size, split))
    return found


def trained(size: int, sequence_parallel: bool) -> list[float]:
    from megatron.core import parallel_state
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.transformer import TransformerConfig

    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        ffn_hidden_size=INNER,
        num_attention_heads=HEADS,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=size,
        sequence_parallel=sequence_parallel,
        use_cpu_initialization=True,
        params_dtype=torch.float32,
        init_method=fill,
        output_layer_init_method=fill,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
    )
    replicated = DistributedDataParallelConfig(average_in_collective=True)
    model = DistributedDataParallel(config, replicated, gpt(config))
    optimizer = optimizer_of(model.parameters())
    replicas = parallel_state.get_data_parallel_world_size()
    replica = parallel_state.get_data_parallel_rank()
    ahead = torch.ones(1, 1, LENGTH, LENGTH).triu(1).bool()
    losses = []
    for step in range(STEPS):
        words, following = (each.chunk(replicas)[replica] for each in text(step))
        model.zero_grad_buffer()
        places = torch.arange(LENGTH).expand_as(words)
        loss = model(words, places, ahead, labels=following).mean()
        loss.backward()
        finalize_model_grads([model])
        for parameter in model.parameters():
            parameter.grad = parameter.main_grad
        optimizer.step()
        # Megatron adds what is in .grad to its own buffer.
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


# -- what it calls -------------------------------------------------------------------


def formula(ranks: int, size: int, is_split: bool, rank: int) -> Calls:
    """Return what the layers call, and what replicas sum their gradients in.

    Each has b·s·h·e bytes. Without split positions: 4 allreduces a layer, 2 forwards
    and 2 backwards, one forwards for the embedding, one backwards for the logits. With
    them a pair of a column and a row parallel layer, of which a layer has two, has 2
    gathers of what the column parallel one was given (forwards, and again for the
    gradient of its weight), one of the gradient of what the row parallel one returns,
    and 2 reduce-scatters; the logits' layer has what a column parallel one has. The
    embedding sums whole positions, as those have to be added, and gathers gradients.
    """
    first = rank - rank % size
    peers, replicas = range(first, first + size), range(rank % size, ranks, size)
    nbytes = E * LENGTH * SEQUENCES // len(replicas) * HIDDEN
    gather, scatter = ("allgather", peers, nbytes), ("reduce_scatter", peers, nbytes)
    found = calls("mappings._reduce", "allreduce", peers, nbytes)
    if is_split:
        along = "mappings._gather_along_first_dim"
        found += calls(along, *gather, times=2 * LAYERS + 1)
        found += calls(
            "mappings._reduce_scatter_along_first_dim", *scatter, times=2 * LAYERS
        )
        found += calls("layers.forward", *gather, times=2 * LAYERS + 1)
        found += calls("layers.backward", *gather, times=2 * LAYERS + 1)
        found += calls("layers.backward", *scatter, times=2 * LAYERS + 1)
    else:
        again = ("allreduce", peers, nbytes)
        found += calls("mappings._reduce", *again, times=2 * LAYERS)
        found += calls("layers.backward", *again, times=2 * LAYERS + 1)
    place = "param_and_grad_buffer.start_grad_sync"
    found += calls(place, "allreduce", replicas, E * parameters(size))
    return times(STEPS, found)


def beside(ranks: int, size: int, is_split: bool, rank: int) -> Calls:
    """Return what the loss needs, and the weights of which ranks have split positions.

    These are the norms' and the biases of row parallel layers, as one.
    """
    first = rank - rank % size
    peers, replicas = range(first, first + size), ranks // size
    words = E * LENGTH * SEQUENCES // replicas
    found = calls("cross_entropy.forward", "allreduce", peers, words, times=3)
    if is_split:
        marked = LAYERS * (4 + 2) * HIDDEN + 2 * HIDDEN
        place = "finalize_model_grads._allreduce_layernorm_grads"
        found += calls(place, "allreduce", peers, E * marked)
    return times(STEPS, found)


def parameters(size: int) -> int:
    """Return how many parameters a rank has of the model."""
    cut = HIDDEN * (3 * HIDDEN + 3) + HIDDEN * HIDDEN + (HIDDEN + 1) * INNER
    cut += INNER * HIDDEN
    whole = 2 * HIDDEN + 4 * HIDDEN
    outside = 2 * WORDS * HIDDEN // size + LENGTH * HIDDEN + 2 * HIDDEN
    return LAYERS * (cut // size + whole) + outside


def times(count: int, each: Calls) -> Calls:
    """Return calls so many times."""
    return Calls({call: count * n for call, n in each.items()})


@pytest.mark.parametrize(("ranks", "size"), [(2, 2), (4, 4), (4, 2)])
def test_a_gpt(
    torchrun: Any, compare: Any, account: Any, tmp_path: Path, ranks: int, size: int
) -> None:
    got = torchrun(
        *(ranks, train), deadline_s=DEADLINE_S, size=size, folder=str(tmp_path)
    )
    want = alone(Plain(), plain_loss)
    kinds = [f"GPT, {how} parallel over {size}" for how in ("tensor", "sequence")]
    for kind, is_split, *each in zip(kinds, (False, True), *got, strict=True):
        compare(f"{PROGRAM}, {kind}", want, each)
        mine = [partial(each, ranks, size, is_split) for each in (formula, beside)]
        account(f"{PROGRAM}, {kind}", tmp_path / str(is_split), *mine)
