# SPDX-License-Identifier: Apache-2.0
"""Operations of which most outputs are computed while the halo travels."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from commrt.comm import Communicator
from commrt.layers.spatial import Cut, beside_halo, exchange
from commrt.layers.spatial.output_split import OutputSplit
from commrt.layers.spatial.pooling import avg_pool, max_pool
from commrt.layers.spatial.transposed_convolution import conv_transpose
from commrt.layers.spatial.windows import Range, Sliding, Spreading
from commrt.local import run


class Events:
    """The deeds of each rank, which is a thread, in their order."""

    def __init__(self) -> None:
        self._of_thread = threading.local()

    @property
    def here(self) -> list[str]:
        """This rank's events."""
        return self._of_thread.__dict__.setdefault("events", [])

    def noted(self, name: str, function: Any) -> Any:
        """Return a function that is noted as it is called."""

        def call(*arguments: Any, **more: Any) -> Any:
            self.here.append(name)
            return function(*arguments, **more)

        return call


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> Events:
    made = Events()
    for name in ("start_strips", "start_messages"):
        function = getattr(beside_halo, name)
        monkeypatch.setattr(beside_halo, name, made.noted("start", function))
    wait = exchange.Strips.wait
    monkeypatch.setattr(exchange.Strips, "wait", made.noted("wait", wait))
    return made


def test_halos_and_their_gradients_travel_beside_the_interior(events: Events) -> None:
    class Noted(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, y: Any, what: str) -> Any:
            ctx.what = what
            return y.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            events.here.append(f"gradient of {ctx.what}")
            return gradient, None

    def main(comm: Communicator) -> list[str]:
        cut = Cut.even(comm, 16)
        outputs = cut.pieces
        split = OutputSplit(2, cut, Sliding(3, 1, 1, 1), outputs, True, is_empty=False)

        def compute(wide: Any, out: Any) -> Any:
            what = "interior" if out == split.interior else "border"
            events.here.append(what)
            return Noted.apply(functional.avg_pool1d(wide, 3, 1), what)

        x = torch.ones(1, 1, 8, requires_grad=True)
        y = beside_halo.beside_halo(x, split, compute, (1, 1, 8))
        y.sum().backward()
        return [*events.here]

    forward = ["start", "interior", "wait", "border"]
    back = ["gradient of border", "start", "gradient of interior", "wait"]
    assert run(2, main) == [[*forward, *back]] * 2


@pytest.mark.filterwarnings("error::ResourceWarning")
@pytest.mark.parametrize("is_kept", [False, True])
def test_checkpoints_and_second_backward_passes_have_the_same_gradients(
    is_kept: bool,
) -> None:
    """The first rank needs no halo of others, which need one of it."""

    def main(comm: Communicator) -> list[Any]:
        cut = Cut.even(comm, 9)
        low, high = cut.own
        values = torch.arange(9.0, dtype=torch.float64).square()[low:high]
        found = []
        for overlap in (False, True):

            def layer(x: Any, overlap: bool = overlap) -> Any:
                how = {"cuts": {2: cut}, "overlap": overlap}
                y, _ = avg_pool(x, 2, stride=1, **how)
                return y.square() + avg_pool(x, 2, stride=1, **how)[0]

            x = values.clone().view(1, 1, -1).requires_grad_()
            if is_kept:
                y = layer(x)
                y.sum().backward(retain_graph=True)
                y.sum().backward()
            else:
                checkpoint(layer, x, use_reentrant=False).sum().backward()
            found.append(x.grad)
        return found

    for behind, beside in run(3, main):
        assert torch.equal(behind, beside)


def test_parts_of_a_transposed_convolution_have_one_type_under_autocast() -> None:
    """Nothing contributes to the outputs that the middle rank computes first."""

    def main(comm: Communicator) -> Any:
        cut = Cut(comm, (5, 1, 2))
        x = torch.ones(1, 1, cut.sizes[comm.rank])
        with torch.autocast("cpu", torch.bfloat16):
            y, _ = conv_transpose(
                *(x, torch.ones(1, 1, 1)), stride=4, cuts={2: cut}, overlap=True
            )
        return y.dtype

    assert {*run(3, main)} == {torch.bfloat16}


def max_of(x: Any, **how: Any) -> Any:
    return max_pool(x, 3, stride=1, padding=1, **how)


def mean_of(x: Any, **how: Any) -> Any:
    return avg_pool(x, 3, stride=1, padding=1, **how)


def spread_of(x: Any, **how: Any) -> Any:
    return conv_transpose(x, torch.ones(1, 1, 3, 3), padding=1, **how)


@pytest.mark.parametrize("operation", [max_of, mean_of, spread_of])
@pytest.mark.parametrize(("rows", "columns"), [(2, 1), (2, 2)])
@pytest.mark.parametrize("overlap", [False, True])
def test_the_last_halo_travels_so_where_that_is_asked_for(
    operation: Any, rows: int, columns: int, overlap: bool, events: Events
) -> None:
    def main(comm: Communicator) -> list[str]:
        down = comm.split(comm.rank % columns)
        across = comm.split(comm.rank // columns)
        assert down is not None
        assert across is not None
        cuts = {2: Cut.even(down, 8), 3: Cut.even(across, 8)}
        if columns == 1:
            del cuts[3]
        events.here.clear()
        x = torch.ones(1, 1, 4, 8 // columns)
        operation(x, cuts=cuts, overlap=overlap)
        return [*events.here]

    before = ["wait"] * (columns - 1)  # exchange.py starts that, which is not noted
    found = [*before, "start", "wait"] if overlap else [*before, "wait"]
    assert run(rows * columns, main) == [found] * (rows * columns)


@pytest.mark.parametrize("kernel", range(1, 6))
@pytest.mark.parametrize("stride", range(1, 5))
@pytest.mark.parametrize("padding", range(3))
def test_the_interior_of_a_spreading_needs_no_other_piece(
    kernel: int, stride: int, padding: int
) -> None:
    """And those beside it do."""
    extent = 9
    for dilation in (1, 2):
        one = Spreading(kernel, stride, padding, dilation)
        outputs = (0, one.outputs(extent))

        def reads_others(output: int, own: Range, one: Spreading = one) -> bool:
            places = [output + padding - n * one.dilation for n in range(kernel)]
            found = {place // stride for place in places if place % stride == 0}
            return any(0 <= i < extent and not own[0] <= i < own[1] for i in found)

        for own in ((0, 3), (3, 7), (7, 9)) if outputs[1] > 0 else ():
            low, high = one.within(own, extent, outputs)
            assert not any(reads_others(each, own) for each in range(low, high))
            if low < high:
                assert low == 0 or reads_others(low - 1, own)
                assert high == outputs[1] or reads_others(high, own)


def test_a_rank_that_needs_no_halo_gets_its_gradients_back() -> None:
    """Windows of the first rank reach into its own piece alone."""

    def main(comm: Communicator) -> Any:
        cut = Cut(comm, (4, 4))
        x = torch.arange(4.0).view(1, 1, 4).requires_grad_()
        # Outputs of rank 1 read one element of rank 0.
        kernel, outputs = Sliding(2, 2, 1, 0), ((0, 2), (2, 4))
        split = OutputSplit(2, cut, kernel, outputs, True, is_empty=False)
        y = beside_halo.beside_halo(
            x, split, lambda wide, _: functional.avg_pool1d(wide, 2, 2), (1, 1, 2)
        )
        y.sum().backward()
        return x.grad

    grads = torch.cat(run(2, main), dim=2)
    assert torch.equal(grads, torch.tensor([[[0.5] * 7 + [0.0]]]))
