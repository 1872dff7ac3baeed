# SPDX-License-Identifier: Apache-2.0
"""Convolutions of cut tensors against whole ones, on ranks as threads."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest
import torch
from recorded import logs_of
from spatial_reference import (
    NEAR,
    CutGrid,
    difference,
    drawn,
    off_by,
    on_grids,
    piece,
)
from torch.nn import functional

import commrt
from commrt.comm import Communicator
from commrt.errors import UsageError
from commrt.layers.process_grid import ProcessGrid
from commrt.layers.spatial import Cut, convolution, grid_convolution
from commrt.layers.spatial.convolution import conv
from commrt.layers.spatial.exchange import Strips
from commrt.layers.spatial.overlapped_convolution import OverlappedConvolution
from commrt.local import run

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same'")

PLAIN = {1: functional.conv1d, 2: functional.conv2d, 3: functional.conv3d}


def draw_convolution(
    rng: random.Random, dims: int, batch: int
) -> tuple[list[int], list[int], dict[str, Any]]:
    """Return shapes of x and weight, and arguments; the result is not empty."""
    while True:
        groups = rng.choice((1, 1, 2))
        channels, filters = groups * rng.randint(1, 2), groups * rng.randint(1, 2)
        extents = [rng.randint(1, 12 if dims < 3 else 8) for _ in range(dims)]
        kernel = [rng.randint(1, 5) for _ in range(dims)]
        stride = [rng.randint(1, 3) for _ in range(dims)]
        dilation = [rng.randint(1, 3) for _ in range(dims)]
        padding: Any = [rng.randint(0, 4) for _ in range(dims)]
        if rng.random() < 0.2:
            padding, stride = "same", 1
        elif rng.random() < 0.1:
            padding = "valid"
        elif rng.random() < 0.3:
            kernel, stride = [3] * dims, rng.choice((1, 2))
            dilation, padding = [1] * dims, 1
        arguments = {
            "stride": stride,
            "padding": padding,
            "dilation": dilation,
            "groups": groups,
        }
        shape, of_weight = (
            [batch, channels, *extents],
            [filters, channels // groups, *kernel],
        )
        try:
            y = PLAIN[dims](torch.zeros(shape), torch.zeros(of_weight), **arguments)
        except RuntimeError:
            continue
        if y.numel():
            return shape, of_weight, arguments


def check_convolution(
    rng: random.Random, grid: CutGrid, dims: int, **more: Any
) -> float:
    """Return how far one drawn convolution is from torch's."""
    shape, of_weight, arguments = draw_convolution(rng, dims, rng.randint(1, 3))
    cuts = grid.cuts(rng, shape)
    x, weight = drawn(rng, shape), drawn(rng, of_weight)
    bias = drawn(rng, of_weight[:1]) if rng.random() < 0.5 else None
    over = grid.comm if rng.random() < 0.5 else None
    overlap = rng.random() < 0.7

    def cut_function(x: Any, weight: Any, bias: Any) -> Any:
        return conv(
            *(x, weight, bias),
            cuts=cuts,
            overlap=overlap,
            sum_weight_gradients_over=over,
            **arguments,
            **more,
        )

    found = difference(
        *(grid, cuts, x, [weight, bias], cut_function),
        lambda x, weight, bias: PLAIN[dims](x, weight, bias, **arguments),
        rng,
        are_summed=over is not None,
    )
    what = f"{shape} {of_weight} {arguments} {overlap=} " + str(
        {dim: cut.sizes for dim, cut in cuts.items()}
    )
    assert found.largest < NEAR, (found.of, what)
    return found.largest


def test_any_convolution_is_that_of_the_whole(seed: int) -> None:
    def check(rng: random.Random, grid: CutGrid, dims: int) -> None:
        check_convolution(rng, grid, dims)

    on_grids(seed, 40, check)


def plain_module(dims: int, mode: str, kernel: Any, arguments: dict[str, Any]) -> Any:
    """Return torch's function with padding by the tensor's own elements."""
    pads = arguments["padding"]
    both = [pad for pad in reversed(pads) for _ in range(2)]
    others = {key: value for key, value in arguments.items() if key != "padding"}

    def function(x: Any, weight: Any, bias: Any) -> Any:
        return PLAIN[dims](functional.pad(x, both, mode=mode), weight, bias, **others)

    return function


def test_padding_by_own_elements(seed: int) -> None:
    def check(rng: random.Random, grid: CutGrid, dims: int) -> None:
        mode = rng.choice(("reflect", "replicate", "circular"))
        kernel = [rng.randint(1, 4) for _ in range(dims)]
        shape = [2, 2, *(rng.randint(5, 9) for _ in range(dims))]
        arguments = {
            "stride": [rng.randint(1, 3) for _ in range(dims)],
            "padding": [rng.randint(0, 4) for _ in range(dims)],
            "dilation": rng.choice((1, 1, 2)),
        }
        if any(
            n + 2 * p <= 2 * (k - 1)
            for n, p, k in zip(shape[2:], arguments["padding"], kernel, strict=True)
        ):
            return
        cuts = grid.cuts(rng, shape)
        found = difference(
            *(grid, cuts, drawn(rng, shape)),
            [drawn(rng, [3, 2, *kernel]), drawn(rng, [3])],
            lambda x, w, b: conv(x, w, b, cuts=cuts, padding_mode=mode, **arguments),
            plain_module(dims, mode, kernel, arguments),
            rng,
        )
        assert found.largest < NEAR, (found.of, mode, shape, kernel, arguments, cuts)

    on_grids(seed, 12, check)


def test_one_rank_has_the_bits_of_torch(seed: int) -> None:
    def check(rng: random.Random, grid: CutGrid, dims: int) -> None:
        shape, of_weight, arguments = draw_convolution(rng, dims, 2)
        weights = [drawn(rng, of_weight), drawn(rng, of_weight[:1])]
        found = difference(
            *(grid, grid.cuts(rng, shape), drawn(rng, shape), weights),
            lambda *each: conv(*each, cuts=grid.cuts(rng, shape), **arguments),
            lambda *each: PLAIN[dims](*each, **arguments),
            rng,
            are_summed=True,
        )
        assert found.largest == 0

    with commrt.trace.record() as recording:
        on_grids(seed, 20, check, [(1,)])
    assert [op for log in recording.logs() for (op,) in log.volume(("op",))] == []


def test_bytes_are_those_of_the_formula() -> None:
    """Rows first; then columns, with the rows that came and those of the padding."""
    rows, columns, channels, filters, batch, element = 12, 10, 3, 4, 2, 4

    def main(comm: Communicator) -> None:
        with comm.mesh({"rows": 2, "columns": 2}) as mesh:
            cuts = {
                2: Cut.even(mesh["rows"], rows),
                3: Cut.even(mesh["columns"], columns),
            }
            x = torch.zeros(batch, channels, rows // 2, columns // 2)
            weight = torch.zeros(filters, channels, 3, 3, requires_grad=True)
            y, _ = conv(
                *(x.requires_grad_(), weight),
                cuts=cuts,
                padding=1,
                sum_weight_gradients_over=mesh.comm,
            )
            y.sum().backward()

    with commrt.trace.record() as recording:
        run(4, main)
    strips = (columns // 2) + (rows // 2 + 2)
    halo = batch * channels * strips * element
    weights = filters * channels * 9 * element
    for log in logs_of(recording):
        volume = log.volume(("op",))
        assert volume["send",].nbytes == 2 * halo  # forward, and backward
        assert volume["allreduce",].nbytes == weights
        assert volume["allreduce",].calls == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"padding": "both"}, "padding='both'"),
        ({"padding": "same", "stride": 2}, "padding='same' needs stride 1"),
        ({"padding": -1}, "padding=-1"),
        ({"stride": 0}, "stride=0"),
        ({"stride": (1, 2, 3)}, r"stride=\(1, 2, 3\)"),
        ({"dilation": 9}, "empty result"),
        ({"groups": 2}, "groups=2"),
        ({"groups": 0}, "groups=0"),
        ({"padding_mode": "mirror"}, "padding_mode='mirror'"),
        ({"padding_mode": "reflect", "padding": 9}, "at most 7"),
        ({"x": torch.zeros(1, 5, 4, 8)}, "5 channels"),
        ({"x": torch.zeros(1, 3, 5, 8)}, r"cuts\[2\]"),
        ({"x": torch.zeros(3, 8)}, r"x of shape \(3, 8\)"),
        ({"weight": torch.zeros(2, 3, 3)}, r"weight of shape \(2, 3, 3\)"),
        ({"bias": torch.zeros(3)}, r"bias of shape \(3,\)"),
        ({"sum_weight_gradients_over": 3}, "sum_weight_gradients_over=3"),
    ],
)
def test_wrong_arguments_are_named_before_anything_is_sent(
    change: dict[str, Any], message: str
) -> None:
    def main(comm: Communicator) -> None:
        arguments = {
            "x": torch.zeros(1, 3, 4, 8),
            "weight": torch.zeros(2, 3, 3, 3),
            "cuts": {2: Cut.even(comm, 8)},
            **change,
        }
        with pytest.raises(UsageError, match=message):
            conv(**arguments)

    with commrt.trace.record() as recording:
        run(2, main)
    assert [op for log in recording.logs() for (op,) in log.volume(("op",))] == []


@pytest.mark.parametrize("dim", [1, 4, -1, "height"])
def test_dimensions_that_cannot_be_cut(dim: Any) -> None:
    def main(comm: Communicator) -> None:
        x, weight = torch.zeros(2, 2, 4, 4), torch.zeros(2, 2, 1, 1)
        with pytest.raises(UsageError, match="cuts has dimension"):
            conv(x, weight, cuts={dim: Cut.even(comm, 4)})

    run(2, main)


@pytest.mark.parametrize("overlap", [True, False])
def test_input_without_gradient_sends_nothing_back(overlap: bool) -> None:
    channels, columns, element = 3, 6, 8

    def main(comm: Communicator) -> None:
        whole = drawn(random.Random(1), (2, channels, 8, columns))
        weight = drawn(random.Random(2), (4, channels, 3, 3)).requires_grad_()
        low, high = Cut.even(comm, 8).own
        x = whole[:, :, low:high].contiguous()
        cuts = {2: Cut.even(comm, 8)}
        y, _ = conv(x, weight, cuts=cuts, padding=1, overlap=overlap)
        y.sum().backward()
        found = weight.grad.clone()
        weight.grad = None
        functional.conv2d(whole, weight, padding=1).sum().backward()
        comm.sendrecv(
            found.clone(), 1 - comm.rank, other := found.clone(), 1 - comm.rank
        )
        assert off_by(found + other, weight.grad) < NEAR

    with commrt.trace.record() as recording:
        run(2, main)
    for log in logs_of(recording):
        strip = 2 * channels * columns * element
        volume = log.volume(("op",))["send",]
        assert volume.nbytes - 4 * channels * 9 * element == strip


@pytest.mark.parametrize("overlap", [True, False])
def test_float32_and_channels_last(overlap: bool) -> None:
    def main(comm: Communicator) -> None:
        whole = drawn(random.Random(1), (2, 8, 14, 6)).float()
        weight = drawn(random.Random(2), (8, 8, 3, 3)).float()
        expected = functional.conv2d(whole, weight, padding=1)
        cuts = {2: Cut.even(comm, 14)}
        x = piece(whole, cuts).contiguous(memory_format=torch.channels_last)
        y, made = conv(x, weight, cuts=cuts, padding=1, overlap=overlap)
        assert off_by(y, piece(expected, made)) < 1e-5

    run(2, main)


def test_autocast_computes_and_sends_bfloat16() -> None:
    def main(comm: Communicator) -> None:
        whole = drawn(random.Random(1), (1, 4, 8, 6)).float()
        weight = drawn(random.Random(2), (4, 4, 3, 3)).float().requires_grad_()
        cuts = {2: Cut.even(comm, 8)}
        x = piece(whole, cuts).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            y, made = conv(
                *(x, weight), cuts=cuts, padding=1, sum_weight_gradients_over=comm
            )
        assert y.dtype == torch.bfloat16
        y.float().sum().backward()
        assert weight.grad.dtype == torch.float32
        expected = functional.conv2d(whole, weight.detach(), padding=1)
        assert off_by(y.float(), piece(expected, made)) < 0.02

    with commrt.trace.record() as recording:
        run(2, main)
    for log in logs_of(recording):
        volume = log.volume(("op",))
        assert volume["send",].nbytes == 2 * 4 * 6 * 2
        assert volume["allreduce",].nbytes == 4 * 4 * 9 * 4


@pytest.mark.parametrize("nodes", [[[0, 1]], [[0], [1]]])
def test_halos_travel_beside_the_interior_where_they_leave_the_node(
    nodes: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    apart = []

    class Noted:
        @staticmethod
        def apply(*arguments: Any) -> Any:
            apart.append(arguments[-1].split.is_apart)
            return OverlappedConvolution.apply(*arguments)

    def main(comm: Communicator) -> Any:
        x, weight = torch.ones(1, 1, 4, 5), torch.ones(1, 1, 3, 3)
        return conv(x, weight, cuts={2: Cut(comm, (4, 4))}, padding=1)[0]

    monkeypatch.setattr(Communicator, "nodes", nodes)
    monkeypatch.setattr(convolution, "OverlappedConvolution", Noted)
    found = torch.cat(run(2, main), dim=2)
    exact = functional.conv2d(torch.ones(1, 1, 8, 5), torch.ones(1, 1, 3, 3), padding=1)
    assert torch.equal(found, exact)
    assert apart == [len(nodes) > 1] * 2


def test_every_halo_of_two_travels_beside_a_part_of_the_interior(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events = threading.local()
    started, convolved = grid_convolution.start_messages, torch.convolution
    waited = Strips.wait

    def noted(name: str, function: Any) -> Any:
        def call(*arguments: Any, **more: Any) -> Any:
            events.__dict__.setdefault("of", []).append(name)
            return function(*arguments, **more)

        return call

    def main(comm: Communicator) -> list[str]:
        grid = ProcessGrid(comm, {"a": 2, "b": 2})
        cuts = {2: Cut(grid["a"], (8, 8)), 3: Cut(grid["b"], (8, 9))}
        x, weight = torch.ones(1, 1, 8, cuts[3].sizes[grid["b"].rank]), torch.ones(3, 3)
        conv(x, weight[None, None], cuts=cuts, padding=1, overlap=True)
        return list(events.of)

    monkeypatch.setattr(grid_convolution, "start_messages", noted("start", started))
    monkeypatch.setattr(Strips, "wait", noted("wait", waited))
    monkeypatch.setattr(torch, "convolution", noted("compute", convolved))
    beside = ["start", "compute", "wait"]
    assert run(4, main) == [[*beside, *beside, *["compute"] * 4]] * 4
