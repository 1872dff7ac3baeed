# SPDX-License-Identifier: Apache-2.0
"""Layers on grids of four axes against torch's, on ranks as threads."""

from __future__ import annotations

import copy
import math
import random
from typing import Any

import pytest
import torch
from recorded import logs_of
from tensor3d_cases import (
    NEAR,
    Grid,
    axes_of,
    batches_of,
    compare,
    drawn_in,
    filled,
    grids_of,
)
from torch import nn
from torch.nn import functional

import commrt.trace
from commrt.errors import UsageError
from commrt.layers.process_grid import ProcessGrid
from commrt.layers.tensor3d import (
    Attention3d,
    ChannelConv,
    ChannelConv2d,
    Embedding3d,
    Features,
    Form,
    Linear3d,
    cut_sequence,
    load_state_dict,
    local_heads,
    sequence_parallel,
    whole_sequence,
)
from commrt.local import run

GRIDS = grids_of(2, 3, 4, 6, 8)


@pytest.mark.full(sample=4)
@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("grid", GRIDS)
def test_linear_has_the_result_and_gradients_of_one_process(
    grid: Grid, transpose: bool, seed: int
) -> None:
    rng = random.Random(f"{seed} {grid} {transpose}")
    inputs, outputs = rng.choice((1, 5, 7, 8)), rng.choice((1, 3, 8, 10))
    serial = filled(nn.Linear(inputs, outputs, bias=rng.random() < 0.7), seed)
    form = Form(transpose=transpose)
    found = compare(
        serial,
        grid,
        lambda layer, places: Linear3d.from_linear(layer, places, form),
        batches_of(grid, seed, *rng.choice(((2,), (0, 3), (1, 2))), inputs),
        passes=rng.choice((1, 2)),
    )
    assert max(found.values()) < NEAR, found


@pytest.mark.full(sample=4)
@pytest.mark.parametrize("sections", [(), (4, 6, 2)])
@pytest.mark.parametrize("grid", GRIDS)
def test_cut_features_join_two_layers(
    grid: Grid, sections: tuple[int, ...], seed: int
) -> None:
    between = Features(sections, 2) if sections else None
    serial = filled(nn.Sequential(nn.Linear(7, 12), nn.GELU(), nn.Linear(12, 5)), seed)

    def build(model: Any, places: ProcessGrid) -> nn.Module:
        first = Form(whole_output=False, outputs=between)
        second = Form(transpose=True, whole_input=False, inputs=between)
        model[0] = Linear3d.from_linear(model[0], places, first)
        model[2] = Linear3d.from_linear(model[2], places, second)
        return model

    found = compare(serial, grid, build, batches_of(grid, seed, 3, 7))
    assert max(found.values()) < NEAR, found


def test_an_input_without_a_batch_is_one_sample(seed: int) -> None:
    found = compare(
        filled(nn.Linear(4, 6), seed),
        (1, 2, 1, 2),
        lambda layer, places: Linear3d.from_linear(layer, places),
        [drawn_in(seed, 4), drawn_in(seed + 1, 4)],
    )
    assert max(found.values()) < NEAR, found


CONVOLUTIONS: list[tuple[int, dict[str, Any]]] = [
    (1, {"kernel_size": 3, "padding": "same"}),
    (2, {"kernel_size": 1}),
    (2, {"kernel_size": (3, 2), "padding": 1, "stride": 2, "bias": False}),
    (2, {"kernel_size": 2, "padding": "same"}),
    (2, {"kernel_size": 3, "padding": (1, 2), "padding_mode": "circular"}),
    (3, {"kernel_size": 2, "dilation": 2, "padding": "valid"}),
]


@pytest.mark.full(sample=4)
@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("number", range(len(CONVOLUTIONS)))
@pytest.mark.parametrize("grid", GRIDS)
def test_convolutions_are_cut_in_their_channels(
    grid: Grid, number: int, transpose: bool, seed: int
) -> None:
    rng = random.Random(f"{seed} {grid} {number}")
    dims, arguments = CONVOLUTIONS[number]
    inputs, outputs = rng.choice((1, 3, 6)), rng.choice((2, 5, 8))
    made = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[dims]
    serial = filled(made(inputs, outputs, **arguments), seed)
    batches = batches_of(grid, seed, 1, inputs, *(6, 5, 4)[:dims])
    if rng.random() < 0.2:
        batches = [each[0] for each in batches]
    found = compare(
        serial,
        grid,
        lambda layer, places: ChannelConv(layer, places, Form(transpose=transpose)),
        batches,
    )
    assert max(found.values()) < NEAR, found


GROUPED: list[tuple[str, int, int, dict[str, Any]]] = [
    ("Conv2d", 6, 9, {"kernel_size": 3, "groups": 3, "padding": 1}),
    ("Conv2d", 8, 8, {"kernel_size": 3, "groups": 8, "padding_mode": "reflect"}),
    ("Conv1d", 4, 6, {"kernel_size": 2, "groups": 2, "stride": 2, "bias": False}),
    ("ConvTranspose1d", 4, 3, {"kernel_size": 3, "stride": 2}),
    ("ConvTranspose2d", 3, 5, {"kernel_size": 3, "stride": 2, "output_padding": 1}),
    ("ConvTranspose2d", 6, 9, {"kernel_size": 2, "groups": 3, "padding": 1}),
    ("ConvTranspose3d", 5, 2, {"kernel_size": 2, "dilation": 2, "bias": False}),
]


@pytest.mark.full(sample=4)
@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("number", range(len(GROUPED)))
@pytest.mark.parametrize("grid", GRIDS)
def test_groups_and_transposed_convolutions_are_cut(
    grid: Grid, number: int, transpose: bool, seed: int
) -> None:
    name, inputs, outputs, arguments = GROUPED[number]
    made = getattr(nn, name)
    serial = filled(made(inputs, outputs, **arguments), seed)
    batches = batches_of(grid, seed, 1, inputs, *(6, 5, 4)[: int(name[-2])])
    found = compare(
        serial,
        grid,
        lambda layer, places: ChannelConv(layer, places, Form(transpose=transpose)),
        batches,
    )
    assert max(found.values()) < NEAR, found


@pytest.mark.parametrize("grid", [(1, 1, 2, 2), (1, 2, 1, 2)])
def test_groups_send_the_gatherings_of_the_docstring(grid: Grid) -> None:
    def main(comm: Any) -> None:
        with ProcessGrid(comm, axes_of(grid)) as places:
            serial = nn.Conv2d(8, 12, 3, groups=4, padding=1).double()
            conv = ChannelConv(serial, places)
            x = torch.ones(2, 8, 5, 5, dtype=torch.float64, requires_grad=True)
            comm.barrier()
            conv(x).sum().backward()
            comm.barrier()

    with commrt.trace.record() as recording:
        run(4, main)
    _, z, y, x = grid
    places, weight = x * y, 12 * 2 * 9 // (x * y) * 8
    whole = [("allgatherv", 2 * 12 * 25 * 8), ("allgatherv", 2 * 8 * 25 * 8)]
    along_z = [
        *[("allgatherv", weight)] * 2,
        ("reduce_scatterv", weight),
        ("allreduce", 12 // places * 8),
    ]
    expected = sorted(whole + (along_z if z > 1 else []))
    for log in logs_of(recording):
        calls = [(call.op, call.nbytes) for call in log.operations]
        first, last = (at for at, (op, _) in enumerate(calls) if op == "barrier")
        assert sorted(calls[first + 1 : last]) == expected


@pytest.mark.full(sample=4)
@pytest.mark.parametrize("padding_idx", [None, 2])
@pytest.mark.parametrize("grid", GRIDS)
def test_embeddings_are_cut_in_rows_and_features(
    grid: Grid, padding_idx: int | None, seed: int
) -> None:
    rng = random.Random(f"{seed} {grid}")
    rows, columns = rng.choice((3, 11)), rng.choice((1, 6))
    serial = filled(nn.Embedding(rows, columns, padding_idx), seed)
    draws = torch.Generator().manual_seed(seed)
    batches = [
        torch.randint(rows, shape, generator=draws)
        for shape in [(4, 3), (0,), (5,), ()] * 2
    ][: grid[0] * grid[1]]
    found = compare(
        serial,
        grid,
        lambda table, places: Embedding3d.from_embedding(table, places),
        batches,
    )
    assert max(found.values()) < NEAR, found


class Attention(nn.Module):
    """The serial attention that a layer on a grid has the parameters of."""

    def __init__(self, width: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head = heads, kv_heads, width // heads
        self.qkv = nn.Linear(width, width + 2 * kv_heads * self.head)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Any) -> Any:
        sizes = [self.heads * self.head, *[self.kv_heads * self.head] * 2]
        q, k, v = (
            each.unflatten(-1, (-1, self.head)).transpose(1, 2)
            for each in self.qkv(x).split(sizes, -1)
        )
        k, v = (
            each.repeat_interleave(self.heads // self.kv_heads, 1) for each in (k, v)
        )
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).flatten(2))


@pytest.mark.full(sample=4)
@pytest.mark.parametrize(
    ("grid", "heads"),
    [
        (grid, heads)
        for grid in GRIDS
        for heads in ((4, 4), (3, 3), (8, 4), (1, 1))
        # Keys lie on the rank of their queries, or the layer refuses them.
        if heads[0] == heads[1] or heads[1] % grid[3] == 0
    ],
)
def test_attention_has_whole_heads_on_each_rank(
    grid: Grid, heads: tuple[int, int], seed: int
) -> None:
    width = heads[0] * 2
    serial = filled(Attention(width, *heads), seed)

    def build(model: Any, places: ProcessGrid) -> nn.Module:
        made = Attention3d(
            *(width, heads[0]),
            grid=places,
            num_kv_heads=heads[1],
            is_causal=True,
            dtype=torch.float64,
        )
        load_state_dict(made, model.state_dict())
        low, high = local_heads(heads[0], places)
        assert made.sizes[0] == 2 * (high - low)
        return made

    found = compare(serial, grid, build, batches_of(grid, seed, 1, 5, width))
    assert max(found.values()) < NEAR, found


@pytest.mark.full(sample=4)
@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("grid", GRIDS)
def test_a_cut_sequence_comes_together_in_the_layer(
    grid: Grid, transpose: bool, seed: int
) -> None:
    length = 2 * grid[2] * grid[3]
    serial = filled(nn.Linear(6, 9), seed)
    before, after = ("y", "x") if transpose else ("x", "y")
    form = Form(transpose=transpose, sequence_dim=1)
    found = compare(
        serial,
        grid,
        lambda layer, places: Linear3d.from_linear(layer, places, form),
        batches_of(grid, seed, 1, length, 6),
        part_of_input=lambda x, places: cut_sequence(x, places, before),
        whole_output=lambda y, places: whole_sequence(y, places, after),
    )
    assert max(found.values()) < NEAR, found


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_sequences_stay_cut_between_normalizations(ranks: int, seed: int) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(8)
            self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

        def forward(self, x: Any) -> Any:
            return x + self.down(functional.gelu(self.up(self.norm(x))))

    def build(model: Any, places: ProcessGrid) -> nn.Module:
        model.up = Linear3d.from_linear(
            model.up, places, Form(whole_output=False, sequence_dim=1)
        )
        model.down = Linear3d.from_linear(
            model.down, places, Form(transpose=True, whole_input=False, sequence_dim=1)
        )
        sequence_parallel(model.norm, "x")
        return copy.deepcopy(model)  # copies keep the note

    grid = (2, 1, 1, ranks)
    found = compare(
        filled(Block(), seed),
        grid,
        build,
        batches_of(grid, seed, 2, 3 * ranks, 8),
        part_of_input=lambda x, places: cut_sequence(x, places),
        whole_output=lambda y, places: whole_sequence(y, places),
    )
    assert max(found.values()) < NEAR, found


def test_one_rank_has_the_bits_of_torch(seed: int) -> None:
    def main(comm: Any) -> None:
        draws = torch.Generator().manual_seed(seed)
        x = torch.randn(5, 3, 17, generator=draws)
        picture = torch.randn(2, 3, 9, 8, generator=draws)
        with ProcessGrid(comm, {"data": 1, "x": 1}) as grid:
            torch.manual_seed(seed)
            mine = [
                Linear3d(17, 11, grid=grid),
                ChannelConv2d(3, 5, 3, padding=1, grid=grid),
                Embedding3d(10, 4, grid=grid),
            ]
            torch.manual_seed(seed)
            theirs = [nn.Linear(17, 11), nn.Conv2d(3, 5, 3, padding=1)]
            theirs.append(nn.Embedding(10, 4))
            inputs = [x, picture, torch.tensor([[1, 9], [0, 1]])]
            for layer, serial, given in zip(mine, theirs, inputs, strict=True):
                both = []
                for module in (layer, serial):
                    own = given.clone()
                    if own.is_floating_point():
                        own.requires_grad_()
                    y = module(own)
                    y.square().sum().backward()
                    gradients = [each.grad for each in module.parameters()]
                    both.append([y, *gradients, *([own.grad] * own.requires_grad)])
                for one, other in zip(*both, strict=True):
                    assert torch.equal(one, other)

    run(1, main)


def test_new_layers_are_equal_on_all_ranks_whatever_their_seeds() -> None:
    def main(comm: Any) -> Any:
        with ProcessGrid(comm, {"data": 2, "y": 2}) as grid:
            layer = Linear3d(6, 4, grid=grid)  # all threads share torch's generator
            return [cut.whole(getattr(layer, n)) for n, cut in layer.cuts.items()]

    first, *others = run(4, main)
    for other in others:
        for one, two in zip(first, other, strict=True):
            assert torch.equal(one, two)


def test_copies_work_on_the_same_grid(seed: int) -> None:
    def main(comm: Any) -> None:
        with ProcessGrid(comm, {"z": 2, "x": 2}) as grid:
            layer = Linear3d.from_linear(filled(nn.Linear(4, 6), seed), grid)
            other = copy.deepcopy(layer)
            assert other.grid is grid
            assert other.weight.grid_cut is layer.weight.grid_cut
            assert other.weight is not layer.weight
            assert other.product is not layer.product
            x = drawn_in(seed, 3, 4)
            assert torch.equal(layer(x), other(x))

    run(4, main)


@pytest.mark.parametrize(
    ("axes", "says"),
    [({"row": 2}, "the axis 'row'"), ({"x": 1, "pipe": 2}, "the axis 'pipe'")],
)
def test_grids_with_other_axes_are_refused(axes: dict[str, int], says: str) -> None:
    def main(comm: Any) -> None:
        with ProcessGrid(comm, axes) as grid:
            with pytest.raises(UsageError, match=says):
                Linear3d(4, 4, grid=grid)
            with pytest.raises(UsageError, match=says):
                Attention3d(4, 2, grid=grid)

    run(math.prod(axes.values()), main)


def test_what_is_no_grid_is_refused() -> None:
    with pytest.raises(UsageError, match="must be a ProcessGrid"):
        Linear3d(4, 4, grid=None)


def test_inputs_that_do_not_fit_are_refused_before_anything_is_sent() -> None:
    def main(comm: Any) -> None:
        with ProcessGrid(comm, {"y": 2, "x": 1}) as grid:
            linear = Linear3d(4, 6, grid=grid)
            with pytest.raises(UsageError, match="must have 4 features"):
                linear(torch.ones(2, 5))
            with pytest.raises(UsageError, match="meets a weight of type"):
                linear(torch.ones(2, 4, dtype=torch.float64))
            conv = ChannelConv2d(4, 6, 1, grid=grid)
            with pytest.raises(UsageError, match="must have 4 channels"):
                conv(torch.ones(2, 3, 5, 5))
            table = Embedding3d(4, 6, grid=grid)
            with pytest.raises(UsageError, match="must lie in 0 to 3"):
                table(torch.tensor([4]))
            cut = Linear3d(4, 6, grid=grid, sequence_dim=0)
            with pytest.raises(UsageError, match="cannot be cut over 2 ranks"):
                cut(torch.ones(3, 4))
            with pytest.raises(UsageError, match="cannot be cut into 2 equal pieces"):
                cut_sequence(torch.ones(1, 3), grid, "y")

    run(2, main)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda grid: Linear3d(-1, 4, grid=grid), "in_features=-1"),
        (lambda grid: Linear3d(4, 4, grid=grid, inputs=Features((3,))), "3 features"),
        (lambda grid: Features((4, 3), 2), "section of 3 features"),
        (lambda grid: Features([4]), "must be a tuple"),
        (lambda grid: sequence_parallel(nn.LayerNorm(4), "row"), "must be among data"),
        (lambda grid: Attention3d(6, 4, grid=grid), "must divide embed_dim"),
        (
            lambda grid: Attention3d(8, 4, num_kv_heads=1, grid=grid),
            "must be divisible by the 2 ranks",
        ),
        (
            lambda grid: ChannelConv2d(
                4, 4, 1, groups=2, grid=grid, form=Form(whole_output=False)
            ),
            "groups=2: input and output must be whole",
        ),
        (
            lambda grid: Embedding3d.from_embedding(
                nn.Embedding(4, 4, sparse=True), grid
            ),
            "use sparse=False",
        ),
    ],
)
def test_layers_that_do_not_fit_are_refused(make: Any, says: str) -> None:
    def main(comm: Any) -> None:
        with (
            ProcessGrid(comm, {"x": 2}) as grid,
            pytest.raises(UsageError, match=says),
        ):
            make(grid)

    run(2, main)


@pytest.mark.parametrize("grid", grids_of(2, 8))
def test_a_rank_stores_its_share_of_the_weight(grid: Grid) -> None:
    def main(comm: Any) -> int:
        with ProcessGrid(comm, axes_of(grid)) as places:
            return Linear3d(16, 24, grid=places).weight.numel()

    stored = run(math.prod(grid), main)
    assert stored == [16 * 24 * grid[0] // math.prod(grid)] * len(stored)
