# SPDX-License-Identifier: Apache-2.0
"""Models of torch's layers become models on a grid."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from small_gpt import SmallGpt, lines
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
from torch.nn.utils import parametrizations

from commrt.errors import UsageError
from commrt.layers.process_grid import ProcessGrid
from commrt.layers.tensor3d import (
    ChannelConv,
    ChannelConv2d,
    Embedding3d,
    Linear3d,
    auto_parallelize,
    broadcast_parameters,
    clip_grad_norm_,
    load_state_dict,
    overlap_communication,
    parallelize,
    sequence_parallel,
    state_dict,
    sync_gradients,
)
from commrt.local import run


class Net(nn.Module):
    """Convolutions, a perceptron and layers that stay whole."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3, padding=1)
        self.norm = nn.GroupNorm(2, 6)
        self.deep = nn.Conv2d(6, 6, 3, groups=3)
        self.up = nn.ConvTranspose2d(6, 6, 2)
        self.last = nn.Conv2d(6, 5, 1)
        self.head = nn.Sequential(
            *(nn.Linear(5, 9), nn.GELU(), nn.Linear(9, 7)),
            *(nn.LayerNorm(7), nn.Linear(7, 4)),
        )

    def forward(self, x: Any) -> Any:
        """Return the mean over the picture, behind the head."""
        x = self.up(self.deep(self.norm(self.conv(x)).relu()))
        return self.head(self.last(x).mean((2, 3)))


@pytest.mark.full(sample=3)
@pytest.mark.parametrize("grid", grids_of(2, 3, 4, 8))
def test_a_network_has_the_gradients_of_one_process(grid: Grid, seed: int) -> None:
    found = compare(
        filled(Net(), seed), grid, parallelize, batches_of(grid, seed, 1, 3, 6, 5)
    )
    assert max(found.values()) < NEAR, found


def test_layers_are_replaced_and_pairs_found() -> None:
    def main(comm: Any) -> None:
        with ProcessGrid(comm, {"y": 2, "x": 2}) as grid:
            net = parallelize(Net(), grid)
            assert type(net.deep) is nn.Conv2d
            assert type(net.norm) is nn.GroupNorm
            assert isinstance(net.conv, ChannelConv)
            assert isinstance(net.up, ChannelConv)
            named = parallelize(Net(), grid, only=["deep"])
            assert isinstance(named.deep, ChannelConv)
            assert type(named.conv) is nn.Conv2d
            first, _, second, _, third = net.head
            assert not first.form.whole_output
            assert not second.form.whole_input
            assert second.roles.transpose
            assert third.form.whole_input
            # Square grids send as much either way: transposition alternates.
            assert net.conv.roles.transpose != net.up.roles.transpose
            alone = parallelize(nn.Linear(4, 4), grid)
            assert isinstance(alone, Linear3d)

    run(4, main)


@pytest.mark.parametrize(
    ("shape", "axes", "transpose"),
    [
        ((64, 8), {"x": 4}, True),
        ((8, 64), {"x": 4}, False),
        ((64, 8), {"y": 4}, False),
        ((8, 64), {"y": 4}, True),
    ],
)
def test_transposition_is_the_one_that_sends_less(
    shape: tuple[int, int], axes: dict[str, int], transpose: bool
) -> None:
    """One sends n and 2 k forth and back, the other one k and 2 n."""

    def main(comm: Any) -> bool:
        with ProcessGrid(comm, axes) as grid:
            layer = parallelize(nn.Linear(*shape), grid)
            return bool(layer.roles.transpose)

    assert run(4, main) == [transpose] * 4


def test_only_chosen_paths_are_replaced() -> None:
    def main(comm: Any) -> None:
        with ProcessGrid(comm, {"x": 2}) as grid:
            model = parallelize(SmallGpt(), grid, only=["blocks.1.*"])
            for path, module in model.named_modules():
                if type(module) is nn.Linear:
                    assert not path.startswith("blocks.1.")
                if isinstance(module, Linear3d):
                    assert path.startswith("blocks.1.")
            assert model.head.weight is model.table.weight

    run(2, main)


def test_ranks_take_the_parameters_of_the_first_one(seed: int) -> None:
    def main(comm: Any) -> Any:
        own = filled(Net(), seed + comm.rank)
        with ProcessGrid(comm, {"data": 2, "x": 2}) as grid:
            return state_dict(parallelize(own, grid))

    right = filled(Net(), seed).state_dict()
    for found in run(4, main):
        assert all(torch.equal(found[name], each) for name, each in right.items())


@pytest.mark.parametrize("grid", [(1, 1, 2, 2), (2, 1, 1, 2), (1, 2, 1, 1)])
def test_code_of_users_makes_layers_of_the_grid(grid: Grid, seed: int) -> None:
    serial = filled(SmallGpt(), seed)
    text = lines(seed, 4)
    serial(text).backward()

    def main(comm: Any) -> None:
        with ProcessGrid(comm, axes_of(grid)) as places:
            with auto_parallelize(places):
                model = SmallGpt().double()
            plain = nn.ModuleList([nn.Linear(2, 2)])
            assert type(plain[0]) is nn.Linear
            assert isinstance(model.table, Embedding3d)
            assert model.head.weight is model.table.weight
            assert not any(type(each) is nn.Linear for each in model.modules())
            load_state_dict(model, serial.state_dict())
            model(text).backward()
            sync_gradients(model)
            right = nn.utils.get_total_norm(
                [each.grad for each in serial.parameters() if each.grad is not None]
            )
            found = clip_grad_norm_(model, 1e9)
            assert float(found) == pytest.approx(float(right), rel=1e-9)

    run(math.prod(grid), main)


def test_replicas_of_users_models_can_be_made_equal() -> None:
    def main(comm: Any) -> Any:
        with ProcessGrid(comm, {"data": 2, "x": 2}) as grid:
            with auto_parallelize(grid):
                model = Net()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter += comm.rank
            broadcast_parameters(model)
            return state_dict(model)

    first, *others = run(4, main)
    for other in others:
        assert all(torch.equal(first[name], other[name]) for name in first)


def test_a_layer_turns_for_the_table_that_it_shares(seed: int) -> None:
    def main(comm: Any) -> None:
        with ProcessGrid(comm, {"y": 2, "x": 2}) as grid:
            table = Embedding3d(8, 6, grid=grid, dtype=torch.float64)
            head = Linear3d(6, 8, grid=grid, transpose=True, dtype=torch.float64)
            serial = nn.Linear(6, 8).double()
            load_state_dict(serial, state_dict(head) or {})
            head.weight = table.weight
            assert not head.roles.transpose
            whole = state_dict(table)
            assert whole is not None
            serial.weight = nn.Parameter(whole["weight"])
            x = drawn_in(seed, 3, 6)
            torch.testing.assert_close(head(x), serial(x), rtol=0, atol=NEAR)
            other = Linear3d(6, 8, grid=grid, transpose=True, whole_output=False)
            with pytest.raises(UsageError, match="that cuts it otherwise"):
                other.weight = table.weight
            with pytest.raises(UsageError, match="must all be layers of the grid"):
                other.weight = nn.Parameter(torch.ones(8, 6))

    run(4, main)


class Odd(nn.Linear):
    """A subclass, whose forward may be another one."""


def _tied() -> nn.Module:
    model = nn.ModuleDict({"one": nn.Linear(4, 4), "other": Odd(4, 4)})
    model["other"].weight = model["one"].weight
    return model


def _hooked() -> nn.Module:
    layer = nn.Linear(4, 4)
    layer.register_forward_hook(lambda module, given, y: y)
    return nn.ModuleDict({"one": layer})


@pytest.mark.parametrize(
    ("make", "only", "says"),
    [
        (Net, ["norm"], "norm, a GroupNorm, cannot .* only Linear"),
        (Net, ["head.9"], "no module 'head.9'"),
        (lambda: nn.ModuleDict({"a": Odd(4, 4)}), ["a"], "a, a Odd, cannot"),
        (_tied, ["one"], "one, a Linear, .* shares a parameter with other.weight"),
        (_hooked, ["one"], "one, a Linear, .* has hooks"),
        (
            lambda: nn.ModuleDict({"e": nn.Embedding(4, 4, max_norm=1.0)}),
            ["e"],
            "e, a Embedding, .* max_norm",
        ),
        (
            lambda: nn.ModuleDict({"w": parametrizations.weight_norm(nn.Linear(4, 4))}),
            ["w"],
            "w, a ParametrizedLinear, cannot",
        ),
    ],
)
def test_layers_that_cannot_be_replaced_are_named(
    make: Any, only: list[str], says: str
) -> None:
    def main(comm: Any) -> None:
        with ProcessGrid(comm, {"x": 2}) as grid:
            model = make()
            before = copy.deepcopy([*model.state_dict()])
            with pytest.raises(UsageError, match=says):
                parallelize(model, grid, only=only)
            assert [*model.state_dict()] == before
            parallelize(model, grid)  # leaves them whole

    run(2, main)


@pytest.mark.parametrize(
    ("pairs", "says"),
    [
        ({"head.0": "head.9"}, "'head.0' is 1 linear layers .* 'head.9' is 0"),
        ({"head.0": "head.4"}, "head.0 has 9 outputs, and head.4 has 7 inputs"),
    ],
)
def test_pairs_that_do_not_fit_are_refused(pairs: dict[str, str], says: str) -> None:
    def main(comm: Any) -> None:
        with (
            ProcessGrid(comm, {"x": 2}) as grid,
            pytest.raises(UsageError, match=says),
        ):
            parallelize(Net(), grid, pairs=pairs)

    run(2, main)


def test_models_without_layers_of_a_grid_are_refused() -> None:
    def main(comm: Any) -> None:
        plain = nn.Linear(2, 2)
        with pytest.raises(UsageError, match="no layer of a grid"):
            sync_gradients(plain)
        with pytest.raises(UsageError, match="no layer of a grid"):
            overlap_communication(plain)
        with pytest.raises(UsageError, match="pass grid"):
            clip_grad_norm_(plain.parameters(), 1.0)
        with pytest.raises(UsageError, match="must be a module"):
            sync_gradients([plain])
        with (
            ProcessGrid(comm, {"x": 1}) as grid,
            ProcessGrid(comm, {"x": 1}) as other,
        ):
            with pytest.raises(UsageError, match="must be above 0"):
                clip_grad_norm_(plain.parameters(), 0.0, grid=grid)
            two = nn.ModuleList([Linear3d(2, 2, grid=grid)])
            two.append(ChannelConv2d(2, 2, 1, grid=other))
            with pytest.raises(UsageError, match="layers of two grids"):
                sync_gradients(two)

    run(1, main)


def test_parts_whose_parents_read_their_weights_stay_whole() -> None:
    """torch's encoder layers compute with them, past their ``forward``, in eval()."""

    def main(comm: Any) -> None:
        with ProcessGrid(comm, {"x": 2}) as grid:
            layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
            model = nn.Sequential(layer, nn.Linear(8, 4))
            parallelize(model, grid, broadcast=False)
            assert type(model[0].linear1) is nn.Linear
            assert isinstance(model[1], Linear3d)
            with auto_parallelize(grid):
                made = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
            assert type(made.linear1) is nn.Linear
            with pytest.raises(UsageError, match="its parent, a TransformerEncoder"):
                parallelize(layer, grid, only=["linear1"])

    run(2, main)


def test_cut_gradients_of_a_marked_block_are_not_summed_along_its_axis() -> None:
    def main(comm: Any) -> None:
        with ProcessGrid(comm, {"x": 2}) as grid:
            up = Linear3d(4, 6, grid=grid, whole_output=False)
            block = nn.Sequential(nn.LayerNorm(4), up)
            sequence_parallel(block, "x")
            block(torch.ones(3, 4) * (1 + comm.rank)).square().sum().backward()
            before, norm = up.weight.grad.clone(), block[0].bias.grad.clone()
            sync_gradients(block)
            assert torch.equal(up.weight.grad, before)
            total = comm.allreduce(norm.numpy())
            assert torch.allclose(block[0].bias.grad, torch.from_numpy(total))

    run(2, main)


@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular", "zeros"])
def test_ranks_without_channels_pad_as_the_others(mode: str) -> None:
    def main(comm: Any) -> None:
        with ProcessGrid(comm, {"y": 2}) as grid:
            conv = nn.Conv2d(1, 3, 3, padding=1, padding_mode=mode)
            with torch.no_grad():
                for each in conv.parameters():
                    each.fill_(0.5)
            x = torch.arange(20.0).reshape(1, 1, 4, 5)
            expected = conv(x)
            cut = parallelize(conv, grid, broadcast=False)
            assert torch.allclose(cut(x), expected)

    run(2, main)


def test_gradients_that_are_sparse_are_refused_before_anything_is_sent() -> None:
    def main(comm: Any) -> None:
        with ProcessGrid(comm, {"data": 2}) as grid:
            model = nn.Sequential(nn.Embedding(4, 3, sparse=True))
            first = nn.Linear(3, 2)
            whole = nn.ModuleList([first, model])
            first(model(torch.tensor([1, 2]))).sum().backward()
            before = first.weight.grad.clone()
            begun = comm.stats().operations
            with pytest.raises(UsageError, match="is sparse"):
                sync_gradients(whole, grid, bucket_nbytes=1)
            assert torch.equal(first.weight.grad, before)
            assert comm.stats().operations == begun

    run(2, main)
