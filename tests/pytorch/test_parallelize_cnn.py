# SPDX-License-Identifier: Apache-2.0
"""Unmodified networks on tensors that are cut over ranks, against one process."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cnn_networks import ResNet50, UNet3d, cosmoflow, meshnet
from dist_tensor_cases import drawn, off_by
from torch import nn

from commrt.errors import UsageError
from commrt.layers.cnn import ParallelStrategy, parallelize_cnn
from commrt.layers.process_grid import ProcessGrid
from commrt.layers.tensors import DistTensor, Placement
from commrt.local import run

NEAR = 1e-12
TIMES = 4
"""Of what one process's results differ by where it takes its samples in reverse.

Tens of batch normalizations enlarge the roundings of reordered sums.
"""


def parameters_of(model: nn.Module) -> int:
    """Return the number of parameters."""
    return sum(each.numel() for each in model.parameters())


def test_networks_have_the_published_numbers_of_parameters() -> None:
    with torch.device("meta"):
        assert parameters_of(ResNet50()) == 25_557_032  # torchvision
        unet = UNet3d()
        norms = [m for m in unet.modules() if isinstance(m, nn.BatchNorm3d)]
        counted = parameters_of(unet) - sum(map(parameters_of, norms))
        assert counted == 19_069_955  # Cicek et al., section 2
        assert parameters_of(cosmoflow()) == 8_907_556
        assert parameters_of(meshnet()) == 5_598  # brainchop
        shape = ResNet50()(torch.empty(2, 3, 224, 224)).shape
        assert shape == (2, 1000)


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "resnet": (lambda: ResNet50(4, 7), (4, 3, 64, 48)),
    "unet": (lambda: UNet3d(2, 2), (2, 2, 16, 8, 8)),
    "cosmoflow": (lambda: cosmoflow(2, 32, 2, dropout=0.0), (2, 2, 32, 32, 32)),
    "meshnet": (lambda: meshnet(4, 3, norm=True, dropout=0.0), (2, 1, 19, 9, 5)),
}
H, D = ParallelStrategy(height="a"), ParallelStrategy(depth="a")
S, C = ParallelStrategy(sample="a"), ParallelStrategy(channel="a", filter="a")
SH = ParallelStrategy(sample="b", height="a")
CASES: list[tuple[str, dict[str, int], Any]] = [
    ("resnet", {"a": 2}, H),
    ("resnet", {"a": 3}, H),
    ("resnet", {"a": 2, "b": 2}, SH),
    ("resnet", {"a": 2, "b": 2}, ParallelStrategy(height="a", width="b")),
    ("resnet", {"a": 4}, {"": H, "layer3": S, "layer4": C}),
    ("resnet", {"a": 2}, {"": C, "conv1": H, "*downsample.0": S}),
    (
        "resnet",
        {"a": 2, "b": 3},
        ParallelStrategy(height="a", channel="b", filter="b"),
    ),
    ("unet", {"a": 2}, D),
    ("unet", {"a": 2, "b": 2}, ParallelStrategy(depth="a", height="b")),
    ("unet", {"a": 2}, C),
    ("unet", {"a": 2, "b": 2}, {"": SH, "join?": D, "bottom": C}),
    ("unet", {"a": 8}, D),
    ("cosmoflow", {"a": 2}, D),
    ("cosmoflow", {"a": 3}, D),
    ("cosmoflow", {"a": 2, "b": 2}, ParallelStrategy(depth="a", sample="b")),
    ("cosmoflow", {"a": 2, "b": 2}, {"": D, "conv[345]": C}),
    ("meshnet", {"a": 4}, D),
    ("meshnet", {"a": 3, "b": 2}, ParallelStrategy(depth="a", height="b")),
    ("meshnet", {"a": 2, "b": 2}, ParallelStrategy(channel="a", filter="b")),
    (
        "meshnet",
        {"a": 2, "b": 2},
        ParallelStrategy(channel=("a", "b"), filter=("a", "b"), stationary="w"),
    ),
]


def names_of(case: Any) -> str:
    """Return a name for a case's part."""
    return case if isinstance(case, str) else ""


@pytest.mark.full(sample=9)
@pytest.mark.parametrize(("name", "axes", "strategy"), CASES, ids=names_of)
def test_every_layer_of_a_network_is_that_of_one_process(
    name: str, axes: dict[str, int], strategy: Any, seed: int
) -> None:
    rng = random.Random(seed)
    make, shape = NETWORKS[name]
    whole = drawn(rng, shape)
    torch.manual_seed(seed)
    serial = make().double()
    untouched = copy.deepcopy(serial)
    expected = traced(serial, whole, lambda x: x)
    gradient = drawn(rng, expected[""].shape)
    expected[""].backward(gradient)
    bound = max(NEAR, TIMES * reordered(untouched, serial, whole, gradient, expected))
    names = [*untouched.state_dict()]

    def main(comm: Any) -> None:
        model = copy.deepcopy(untouched)
        with ProcessGrid(comm, axes) as grid:
            parallelize_cnn(model, grid, strategy, outputs="whole")
            assert [*model.state_dict()] == names
            found = traced(model, whole, lambda x: x.whole())
            for path, right in expected.items():
                assert off_by(found[path], right) < bound, path
            found[""].backward(gradient)
            pairs = zip(
                model.named_parameters(), serial.named_parameters(), strict=True
            )
            for (path, got), (_, right) in pairs:
                # A bias before a batch normalization has no gradient but rounding.
                if float(right.grad.abs().max()) > 1e-10:
                    assert off_by(got.grad, right.grad) < bound, path
            for got, right in zip(model.buffers(), serial.buffers(), strict=True):
                assert off_by(got.double(), right.double()) < bound

    run(math.prod(axes.values()), main)


def reordered(
    untouched: nn.Module, serial: nn.Module, whole: Any, gradient: Any, expected: Any
) -> float:
    """Return how far one process is from itself with its samples in reverse order."""
    model = copy.deepcopy(untouched)
    found = traced(model, whole.flip(0), lambda x: x)
    found[""].backward(gradient.flip(0))
    # What a module that is used several times has made is flat, and lies otherwise.
    off = [
        off_by(y.flip(0), expected[path]) for path, y in found.items() if y.dim() > 1
    ]
    pairs = zip(model.parameters(), serial.parameters(), strict=True)
    off += [
        off_by(got.grad, right.grad)
        for got, right in pairs
        if float(right.grad.abs().max()) > 1e-10
    ]
    return max(off)


def traced(model: nn.Module, whole: Any, as_whole: Any) -> dict[str, Any]:
    """Return the output of each leaf of a model by its path; "" is the model's own."""
    found: dict[str, Any] = {}
    hooks = []
    for path, module in model.named_modules():
        if not [*module.children()]:

            def keep(m: Any, args: Any, y: Any, path: str = path) -> None:
                done = as_whole(y).detach().clone()
                # A module that is used several times keeps all its results.
                found[path] = (
                    torch.cat([found[path].flatten(), done.flatten()])
                    if path in found
                    else done
                )

            hooks.append(module.register_forward_hook(keep))
    found[""] = model(whole)
    for hook in hooks:
        hook.remove()
    return found


def test_float32_differs_by_the_rounding_of_reordered_sums(seed: int) -> None:
    whole = drawn(random.Random(seed), (2, 1, 19, 9, 5)).float()
    torch.manual_seed(seed)
    serial = meshnet(4, 3, dropout=0.0)
    untouched = copy.deepcopy(serial)
    exact = copy.deepcopy(serial).double()
    exact(whole.double()).square().sum().backward()
    # A sum of n products is off by n half units in the last place at most, in each of
    # ten layers, forward and backward; a weight's gradient sums over all voxels.
    terms = 10 * 27 * 4 + whole.numel()
    bound = terms * torch.finfo(torch.float32).eps / 2

    def main(comm: Any) -> None:
        model = copy.deepcopy(untouched)
        with ProcessGrid(comm, {"depth": 3}) as grid:
            parallelize_cnn(model, grid, outputs="whole")
            y = model(whole)
            assert off_by(y.double(), exact(whole.double())) < bound
            y.square().sum().backward()
            for got, right in zip(model.parameters(), exact.parameters(), strict=True):
                assert off_by(got.grad.double(), right.grad) < bound

    run(3, main)


def test_one_rank_has_the_bits_of_the_plain_model(seed: int) -> None:
    torch.manual_seed(seed)
    plain = nn.Sequential(ResNet50(4, 5), nn.Dropout(0.5))
    x = torch.randn(2, 3, 40, 40)
    mine = copy.deepcopy(plain)
    torch.manual_seed(seed)
    expected = plain(x)
    expected.sum().backward()

    def main(comm: Any) -> None:
        with ProcessGrid(comm, {"height": 1}) as grid:
            parallelize_cnn(mine, grid)
            torch.manual_seed(seed)
            y = mine(x)
            assert isinstance(y, DistTensor)
            assert torch.equal(y.local, expected)
            y.sum().redistribute().backward()
            pairs = zip(mine.parameters(), plain.parameters(), strict=True)
            assert all(torch.equal(a.grad, b.grad) for a, b in pairs)

    run(1, main)


def test_pieces_go_in_and_come_out(seed: int) -> None:
    whole = drawn(random.Random(seed), (5, 1, 17, 8, 8))
    torch.manual_seed(seed)
    serial = meshnet(3, 2).double().eval()
    expected = serial(whole)

    def main(comm: Any) -> None:
        with ProcessGrid(comm, {"data": 2, "depth": 2}) as grid:
            model = parallelize_cnn(
                copy.deepcopy(serial), grid, inputs="piece", outputs="piece"
            )
            data, depth = grid.coords["data"], grid.coords["depth"]
            rows = slice(0, 4) if data == 0 else slice(4, 5)
            planes = slice(0, 7) if depth == 0 else slice(7, 17)
            y = model(whole[rows, :, planes])
            # Outputs are in even pieces in space.
            even = slice(0, 8) if depth == 0 else slice(8, 17)
            assert off_by(y, expected[rows, :, even]) < NEAR

    run(4, main)


REFUSED: list[tuple[nn.Module, Any, str]] = [
    (nn.Sequential(nn.PixelShuffle(2)), H, r"0 \(PixelShuffle\): use Upsample"),
    (nn.Sequential(nn.MaxPool2d(2, return_indices=True)), H, "return_indices"),
    (nn.Sequential(nn.Conv2d(1, 1, 1)), ParallelStrategy(height="x"), "no axis 'x'"),
    (nn.Sequential(nn.Conv2d(1, 1, 1)), {"layer*": H}, "no module of the model"),
    (nn.Sequential(nn.Conv2d(1, 1, 1)), None, "no strategy was given"),
    (nn.Sequential(nn.Conv2d(1, 1, 1)), "h", "must be a ParallelStrategy"),
]


@pytest.mark.parametrize(("model", "strategy", "says"), REFUSED)
def test_models_and_strategies_that_do_not_fit_are_refused(
    model: nn.Module, strategy: Any, says: str
) -> None:
    def main(comm: Any) -> None:
        with ProcessGrid(comm, {"a": 2}) as grid, pytest.raises(UsageError, match=says):
            parallelize_cnn(model, grid, strategy)

    run(2, main)


def test_an_error_names_the_module_in_the_model() -> None:
    class Sorting(nn.Module):
        def forward(self, x: Any) -> Any:
            return torch.sort(x)

    def main(comm: Any) -> None:
        model = nn.Sequential(nn.Conv2d(1, 2, 1), nn.Sequential(Sorting()))
        with ProcessGrid(comm, {"a": 2}) as grid:
            parallelize_cnn(model, grid, H)
            with pytest.raises(UsageError, match=r"^in 1\.0: .*sort"):
                model(torch.ones(1, 1, 4, 4))
            # The thread has left the model, so functions move nothing unasked again.
            x = DistTensor.from_whole(torch.ones(4), grid, Placement("a"))
            with pytest.raises(UsageError, match=r"^DistTensor"):
                torch.sort(x)
            with pytest.raises(UsageError, match="parallel already"):
                parallelize_cnn(model, grid, H)

    run(2, main)


def test_flattening_gathers_only_where_it_may() -> None:
    def main(comm: Any) -> None:
        x = torch.ones(2, 1, 8, 3)
        for allowed in (False, True):
            model = nn.Sequential(nn.Conv2d(1, 1, 1), nn.Flatten(), nn.Linear(24, 2))
            torch.nn.init.ones_(model[0].weight)
            with ProcessGrid(comm, {"a": 2}) as grid:
                parallelize_cnn(model, grid, H, allow_gather=allowed)
                if allowed:
                    assert model(x).shape == (2, 2)
                else:
                    with pytest.raises(UsageError, match=r"in 1: .*allow_gather"):
                        model(x)

    run(2, main)


def test_invalid_strategies_are_refused() -> None:
    with pytest.raises(UsageError, match="cuts two dimensions"):
        ParallelStrategy(sample="a", height="a")
    with pytest.raises(UsageError, match="stationary"):
        ParallelStrategy(stationary="z")
    with pytest.raises(UsageError, match="name of an axis"):
        ParallelStrategy(height=3)  # type: ignore[arg-type]


class _Written(nn.Module):
    """Its activation writes to what is added later."""

    def __init__(self) -> None:
        super().__init__()
        self.c = nn.ReLU(inplace=True)
        self.d = nn.Conv2d(4, 4, 1)

    def forward(self, x: Any) -> Any:
        x = x * 1.0
        return self.d(self.c(x)) + x


def test_what_a_module_writes_in_place_is_seen_whatever_its_strategy() -> None:
    serial = _Written().double()
    x = torch.linspace(-1, 1, 2 * 4 * 6 * 5).reshape(2, 4, 6, 5).double()
    expected = serial(x)
    untouched = copy.deepcopy(serial)

    def main(comm: Any) -> None:
        with ProcessGrid(comm, {"r": 2}) as grid:
            strategies = {
                "": ParallelStrategy(height="r"),
                "c": ParallelStrategy(channel="r", filter="r"),
            }
            model = copy.deepcopy(untouched)
            parallelize_cnn(model, grid, strategies, outputs="whole")
            assert torch.allclose(model(x), expected, atol=1e-12)

    run(2, main)
