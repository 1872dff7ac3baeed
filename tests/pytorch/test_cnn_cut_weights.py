# SPDX-License-Identifier: Apache-2.0
"""Networks whose weights are cut by channels and filters, against one process."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cnn_networks import UNet3d, meshnet
from dist_tensor_cases import off_by
from recorded import logs_of
from torch import nn
from torch.distributed import checkpoint
from torch_ranks import TorchRun

import commrt
import commrt.torch
import commrt.trace
from commrt.errors import UsageError
from commrt.layers.cnn import (
    ParallelStrategy,
    TrainingState,
    clip_grad_norm_,
    load_state_dict,
    parallelize_cnn,
    state_dict,
)
from commrt.layers.process_grid import ProcessGrid
from commrt.local import run

NEAR = 1e-11
C = ParallelStrategy(channel="a", filter="a")
BOTH = ("a", "b")


def classifier() -> nn.Module:
    """Return a network with strides, groups, an odd number of filters and features."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 12, 3, 2, 1, groups=4),
        nn.Conv2d(12, 7, 2, padding="same", padding_mode="reflect"),
        nn.ConvTranspose2d(7, 6, 3, 2, 1, 1),
        nn.ConvTranspose2d(6, 9, 2, groups=3, bias=False),
        nn.GroupNorm(3, 9),
        nn.Conv2d(9, 16, 1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 5),
        nn.ReLU(),
        nn.Linear(5, 24),
    )


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "classifier": (classifier, (4, 3, 11, 8)),
    "unet": (lambda: UNet3d(2, 2), (2, 2, 16, 8, 8)),
    "meshnet": (lambda: meshnet(4, 3, norm=True, dropout=0.0), (2, 1, 19, 9, 5)),
}
CASES: list[tuple[str, dict[str, int], Any]] = [
    ("classifier", {"a": 2}, C),
    ("classifier", {"a": 3}, C),
    ("classifier", {"a": 2}, ParallelStrategy(filter="a")),
    ("classifier", {"a": 2}, ParallelStrategy(channel="a")),
    ("classifier", {"a": 3, "b": 2}, ParallelStrategy("b", channel="a", filter="a")),
    (
        "classifier",
        {"a": 2, "b": 2},
        ParallelStrategy(channel="a", filter="a", height="b"),
    ),
    ("classifier", {"a": 2, "b": 2}, ParallelStrategy(channel="a", filter="b")),
    *(
        (
            "classifier",
            {"a": 2, "b": 2},
            {
                "": ParallelStrategy(channel=BOTH, filter=BOTH, stationary=form),
                "6": ParallelStrategy(),  # three groups on four ranks
            },
        )
        for form in ("auto", "x", "y", "w")
    ),
    ("unet", {"a": 2, "b": 2}, {"": ParallelStrategy(depth="a"), "bottom": C}),
    ("unet", {"a": 2}, C),
    ("meshnet", {"a": 4}, C),
]


@pytest.mark.full(sample=6)
@pytest.mark.parametrize(("name", "axes", "strategy"), CASES)
def test_steps_with_cut_weights_are_those_of_one_process(
    name: str, axes: dict[str, int], strategy: Any, seed: int
) -> None:
    make, shape = NETWORKS[name]
    torch.manual_seed(seed)
    untouched = make().double()
    batches = [torch.randn(shape, dtype=torch.float64) for _ in range(3)]
    serial = copy.deepcopy(untouched)
    expected = _steps(serial, batches, nn.utils.clip_grad_norm_)
    right = serial.state_dict()
    # Batch normalizations and Adam's quotients enlarge roundings of reordered sums.
    again = copy.deepcopy(untouched)
    reordered = _steps(again, [x.flip(0) for x in batches], nn.utils.clip_grad_norm_)
    pairs = zip(expected, reordered, strict=True)
    bound = max(NEAR, *(100 * abs(a - b) / abs(a) for a, b in pairs))

    def main(comm: Any) -> None:
        model = copy.deepcopy(untouched)
        with ProcessGrid(comm, axes) as grid:
            parallelize_cnn(
                *(model, grid, strategy),
                outputs="whole",
                cut_weights=True,
                allow_gather=True,
            )
            assert _steps(model, batches, clip_grad_norm_) == pytest.approx(
                expected, rel=bound
            )
            found = state_dict(model)
            assert found is not None
            assert [*found] == [*right]
            for path, got in found.items():
                assert got.shape == right[path].shape
                if got.dtype == torch.float64 and float(right[path].abs().max()) > 0.01:
                    assert off_by(got, right[path]) < 1e-6, path

    run(math.prod(axes.values()), main)


def _steps(model: nn.Module, batches: list[Any], clip: Any) -> list[float]:
    """Train with Adam; return the losses and the norms of gradients."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    found = []
    for x in batches:
        optimizer.zero_grad()
        loss = (model(x) - 1).square().mean()
        loss.backward()
        norm = clip(model if clip is clip_grad_norm_ else model.parameters(), 0.5)
        optimizer.step()
        found += [loss.item(), norm.item()]
    return found


def test_a_rank_keeps_its_share_and_sends_no_weights() -> None:
    serial = nn.Sequential(
        nn.Conv2d(16, 16, 3, padding=1), nn.Conv2d(16, 4, 1), nn.Conv2d(4, 32, 1)
    )
    channel = 2 * 4 * 4 * 4  # bytes of a channel: two samples of 4 x 4, in float32

    def main(comm: Any) -> None:
        model = copy.deepcopy(serial)
        optimizer = torch.optim.Adam(model.parameters())  # knows what is cut later
        with ProcessGrid(comm, {"a": 2}) as grid:
            parallelize_cnn(model, grid, C, cut_weights=True)
            comm.barrier()
            with commrt.trace.record() as recording:
                model(torch.ones(2, 16, 4, 4)).local.sum().backward()
                comm.barrier()
            # Inputs stay in the first two layers, and outputs in the last one.
            expected = [16, 4, 2, 4, 2, 8]
            for log in logs_of(recording):
                sent = [each.nbytes for each in log.operations if each.nbytes]
                assert sent == [each * channel for each in expected]
            optimizer.step()
            shapes = [tuple(each.shape) for each in model.parameters()]
            assert shapes[::2] == [(16, 8, 3, 3), (4, 8, 1, 1), (16, 4, 1, 1)]
            assert shapes[1::2] == [(8,), (2,), (16,)]
            for parameter in model.parameters():
                assert parameter.grad is not None
                assert parameter.grad.shape == parameter.shape
                assert optimizer.state[parameter]["exp_avg"].shape == parameter.shape

    run(2, main)


def test_states_of_the_serial_model_are_loaded_and_others_refused(seed: int) -> None:
    torch.manual_seed(seed)
    given = classifier().state_dict()
    untouched = classifier()

    def main(comm: Any) -> None:
        model = copy.deepcopy(untouched)
        with ProcessGrid(comm, {"a": 2}) as grid:
            parallelize_cnn(model, grid, C, cut_weights=True)
            wrong = {**given, "11.weight": torch.ones(5, 9)}
            says = r"11\.weight has the shape \(5, 9\)"
            with pytest.raises(UsageError, match=says):
                load_state_dict(model, wrong)
            with pytest.raises(RuntimeError, match=says):
                model.load_state_dict(wrong)
            for load in (model.load_state_dict, lambda s: load_state_dict(model, s)):
                for each in model.parameters():
                    nn.init.zeros_(each)
                load(given)
                found = state_dict(model)
                assert found is not None
                assert all(torch.equal(found[name], x) for name, x in given.items())
            own = model.state_dict()  # this rank's tiles
            model.load_state_dict(own)
            first = state_dict(model, on_first_only=True)
            assert (first is None) == (comm.rank > 0)

    run(2, main)


def test_a_form_that_the_axes_do_not_allow_is_refused_before_a_weight_is_cut() -> None:
    def main(comm: Any) -> None:
        model = nn.Sequential(nn.Conv2d(4, 4, 1))
        one = ParallelStrategy(channel="a", filter="a", stationary="w")
        with ProcessGrid(comm, {"a": 2}) as grid:
            with pytest.raises(UsageError, match=r"^parallelize_cnn: 0: stationary"):
                parallelize_cnn(model, grid, one, cut_weights=True)
            assert model[0].weight.shape == (4, 4, 1, 1)

    run(2, main)


def test_a_parameter_of_two_layers_is_cut_once(seed: int) -> None:
    torch.manual_seed(seed)
    serial = nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU(), nn.Conv2d(4, 4, 1)).double()
    serial[2].weight = serial[0].weight
    untouched = copy.deepcopy(serial)
    x = torch.randn(2, 4, 3, 3, dtype=torch.float64)
    expected = serial(x)
    expected.sum().backward()

    def main(comm: Any) -> None:
        model = copy.deepcopy(untouched)
        forms = {"0": "x", "2": "y"}
        strategies = {
            name: ParallelStrategy(channel="a", filter="a", stationary=form)
            for name, form in forms.items()
        }
        with ProcessGrid(comm, {"a": 2}) as grid:
            parallelize_cnn(
                *(model, grid, strategies), outputs="whole", cut_weights=True
            )
            assert model[0].weight is model[2].weight
            y = model(x)
            assert off_by(y, expected) < NEAR
            y.sum().backward()
            part = model[0].weight.grid_cut.cut(serial[0].weight.grad)
            assert off_by(model[0].weight.grad, part) < NEAR

    run(2, main)


def saved_and_loaded(folder: str) -> list[Any]:
    """Train on one grid, go on on another one; return losses of the second."""
    comm = commrt.init()
    commrt.torch.init_process_group(comm)
    torch.manual_seed(1)
    untouched = classifier().double()
    batches = [torch.randn(4, 3, 11, 8, dtype=torch.float64) for _ in range(4)]
    losses = []
    for turn, axes in enumerate([{"a": 2, "b": 2}, {"a": 4}]):
        model = copy.deepcopy(untouched)
        grid = ProcessGrid(comm, axes)
        strategy = ParallelStrategy(
            sample="b" if "b" in axes else None, channel="a", filter="a"
        )
        parallelize_cnn(
            *(model, grid, {"": strategy, "6": ParallelStrategy()}),
            outputs="whole",
            cut_weights=True,
        )
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        state = {"training": TrainingState(model, optimizer)}
        if turn:
            checkpoint.load(state, checkpoint_id=folder)
        for x in batches[2 * turn : 2 * turn + 2]:
            optimizer.zero_grad()
            loss = (model(x) - 1).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        if not turn:
            checkpoint.save(state, checkpoint_id=folder)
    serial = copy.deepcopy(untouched)
    optimizer = torch.optim.Adam(serial.parameters(), lr=1e-3)
    right = []
    for x in batches:
        optimizer.zero_grad()
        loss = (serial(x) - 1).square().mean()
        loss.backward()
        optimizer.step()
        right.append(loss.item())
    assert losses == pytest.approx(right, rel=1e-8)
    return [comm.rank]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_training_with_cut_weights_goes_on_on_another_grid(
    torchrun: TorchRun, tmp_path: Path
) -> None:
    found = torchrun(4, saved_and_loaded, folder=str(tmp_path / "checkpoint"))
    assert found == [[rank] for rank in range(4)]
