# SPDX-License-Identifier: Apache-2.0
"""Stages of a serial model: cuts, states, times, replicas and bytes."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from pipeline_cases import (
    LOSSES,
    batch,
    cut,
    gradients_of,
    linear,
    mean_loss,
    plain,
    ranges_of,
    serial,
    tuples,
)
from recorded import logs_of
from torch import nn

import commrt.trace
from commrt.errors import RefusedError, UsageError
from commrt.layers.pipeline import (
    MessageDrivenPipeline,
    load_state_dict,
    measure_layers,
    partition,
    split,
    state_dict,
)
from commrt.layers.process_grid import ProcessGrid
from commrt.local import run


@pytest.mark.parametrize("stages", [1, 2, 3, 5, 10])
def test_stages_are_the_serial_model_under_its_names(stages: int) -> None:
    model = tuples()
    ranges = ranges_of(len(model), stages)
    found = [split(model, ranges, stage) for stage in range(stages)]
    names = [name for each in found for name in each.state_dict()]
    assert names == [*model.state_dict()]
    x = torch.randn(3, 5, dtype=torch.float64)
    y: Any = x.clone()
    for each in found:
        y = each(*y) if isinstance(y, tuple) else each(y)
    assert torch.equal(y, model(x.clone()))


def test_a_list_of_modules_is_cut_alike() -> None:
    layers = [*plain()]
    for each in (layers, tuple(layers), nn.ModuleList(layers)):
        found = split(each, [range(2), range(2, 10)], 1)
        assert next(iter(found.state_dict())) == "2.weight"
        assert found[0] is layers[2]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_states_go_to_and_from_the_serial_model(ranks: int) -> None:
    whole = {key: value.clone() for key, value in plain().state_dict().items()}

    def main(comm: Any) -> Any:
        stage = cut(plain(), comm.size, comm.rank)
        with torch.no_grad():
            for each in stage.parameters():
                each.add_(1.0)
        found = copy.deepcopy(state_dict(stage, comm))
        load_state_dict(stage, whole)
        return found, state_dict(stage, comm)

    for changed, loaded in run(ranks, main):
        assert [*changed] == [*whole] == [*loaded]
        for key, value in whole.items():
            right = value + 1.0 if key in dict(plain().named_parameters()) else value
            assert torch.equal(changed[key], right)
            assert torch.equal(loaded[key], value)


def test_a_state_may_be_cut_anew() -> None:
    def main(comm: Any) -> bool:
        model = plain()
        whole = state_dict(cut(model, comm.size, comm.rank), comm)
        fresh = copy.deepcopy(model)
        for each in fresh.parameters():
            nn.init.zeros_(each)
        other = split(fresh, [range(7), range(7, 8), range(8, 10)], comm.rank)
        load_state_dict(other, whole)
        return all(
            torch.equal(value, model.state_dict()[key])
            for key, value in other.state_dict().items()
        )

    assert run(3, main) == [True] * 3


def test_states_that_do_not_fit_are_refused() -> None:
    stage = split(plain(), [range(10)], 0)
    whole = stage.state_dict()
    with pytest.raises(UsageError, match=r"has no 0.weight"):
        load_state_dict(stage, {})
    with pytest.raises(UsageError, match=r"0.weight has shape \(2,\) in the state"):
        load_state_dict(stage, {**whole, "0.weight": torch.ones(2)})
    with pytest.raises(UsageError, match="expected a stage and a state"):
        load_state_dict(stage, 3)  # type: ignore[arg-type]


def test_stages_of_one_name_are_refused_on_all_ranks() -> None:
    def main(comm: Any) -> None:
        with pytest.raises(UsageError, match="rank 1 and an earlier one have"):
            state_dict(linear(1), comm)

    run(2, main)


def test_a_stage_without_a_state_is_told_to_all_ranks() -> None:
    def main(comm: Any) -> str:
        stage: Any = linear(1) if comm.rank else None
        try:
            state_dict(stage, comm)
        except (AttributeError, RefusedError) as error:
            return f"{type(error).__name__}: {error}"
        return ""

    first, second = run(2, main)
    assert first.startswith("AttributeError")
    assert "rank 0 raised AttributeError" in second


WRONG_RANGES: dict[str, Any] = {
    "gap": [range(2), range(3, 10)],
    "overlap": [range(3), range(2, 10)],
    "empty": [range(0), range(10)],
    "short": [range(5), range(5, 9)],
    "long": [range(11)],
    "steps": [range(0, 10, 2)],
    "none": [],
    "pairs": [(0, 10)],
    "number": 3,
}


@pytest.mark.parametrize("case", WRONG_RANGES)
def test_ranges_that_are_no_cut_are_refused(case: str) -> None:
    with pytest.raises(UsageError, match="must be ranges that follow each other"):
        split(plain(), WRONG_RANGES[case], 0)


def test_wrong_layers_and_stages_are_refused() -> None:
    for layers in (nn.Linear(1, 1), [], [3], "x", None):
        with pytest.raises(UsageError, match="must be an nn"):
            split(layers, [range(1)], 0)  # type: ignore[arg-type]
    for stage in (-1, 1, 0.5, None):
        with pytest.raises(UsageError, match=r"must be a number in 0..0"):
            split(plain(), [range(10)], stage)  # type: ignore[arg-type]


def test_shared_tensors_of_two_stages_are_refused() -> None:
    first, last = linear(1), linear(2)
    last.weight = first.weight
    model = nn.Sequential(first, nn.Tanh(), last)
    with pytest.raises(UsageError, match=r"share a tensor, 0.weight and 2.weight"):
        split(model, [range(1), range(1, 3)], 1)
    assert len(split(model, [range(3)], 0)) == 3
    same = nn.Sequential(first, nn.Tanh(), first)
    with pytest.raises(UsageError, match="share a tensor"):
        split(same, [range(1), range(1, 3)], 0)


# -- times -----------------------------------------------------------------------------


def test_layers_are_measured_forward_and_backward() -> None:
    """By a clock that each layer's passes move."""
    now = [0.0]

    class Slow(nn.Module):
        def __init__(self, forward_s: float, backward_s: float) -> None:
            super().__init__()
            self.seconds = forward_s, backward_s
            self.weight = nn.Parameter(torch.ones(()))

        def forward(self, x: Any) -> Any:
            now[0] += self.seconds[0]
            y = x * self.weight
            y.register_hook(self.back)
            return y

        def back(self, _: Any) -> None:
            now[0] += self.seconds[1]

    layers = [Slow(1, 2), Slow(0.5, 0.25), Slow(0, 3)]
    x = torch.ones(4)
    found = measure_layers(layers, x, clock=lambda: now[0])
    assert found == [3.0, 0.75, 3.0]
    assert partition(found, [1, 1]).ranges == (range(1), range(1, 3))


def test_measuring_changes_nothing() -> None:
    model = plain()
    model.insert(3, nn.Dropout(0.5))
    before = copy.deepcopy(model.state_dict())
    gradient = torch.ones_like(model[0].weight)
    model[0].weight.grad = gradient
    torch.manual_seed(4)
    expected = torch.rand(3)
    torch.manual_seed(4)
    x = torch.randn(3, 5, dtype=torch.float64)
    torch.manual_seed(4)
    found = measure_layers(model, x, repeats=1)
    assert torch.equal(torch.rand(3), expected)
    assert len(found) == 11
    assert all(each >= 0 for each in found)
    assert model[0].weight.grad is gradient
    assert torch.equal(gradient, torch.ones_like(gradient))
    assert model[2].weight.grad is None
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key])
    assert measure_layers(tuples(), x)
    with pytest.raises(UsageError, match="measure_layers: layers=3 must be"):
        measure_layers(3, x)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="repeats=0 must be an integer from 1"):
        measure_layers(model, x, repeats=0)


# -- replicas --------------------------------------------------------------------------


@pytest.mark.full(sample=8)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("first", ["data", "pipe"])
@pytest.mark.parametrize(
    ("data", "pipe"), [(1, 2), (2, 1), (2, 2), (3, 1), (2, 4), (4, 2)]
)
def test_replicas_sum_gradients(
    data: int, pipe: int, first: str, reduction: str
) -> None:
    """They have other numbers of micro-batches; frozen parameters have none."""
    given = batch((3, 2, 3, 1, 2))

    def model() -> Any:
        made = nn.Sequential(*tuples(), linear(8))
        made[1].other.requires_grad_(False)
        return made

    loss, gradients = serial(model(), given, reduction)
    made = model()  # once: threads share torch's generator
    axes = {"data": data, "pipe": pipe}
    if first == "pipe":
        axes = {"pipe": pipe, "data": data}

    def main(comm: Any) -> Any:
        with ProcessGrid(comm, axes) as grid:
            place = grid.coords["pipe"]
            stage = cut(made, pipe, place)
            if grid.coords["data"]:
                for each in stage.parameters():  # those of the first replica count
                    nn.init.ones_(each)
            loss_fn = LOSSES[reduction]
            with MessageDrivenPipeline(
                stage, grid, loss_fn, reduction=reduction
            ) as pipeline:
                own = given.part(grid.coords["data"], data)
                found = []
                for _ in range(2):
                    stage.zero_grad()
                    found.append((pipeline.step(*own), gradients_of(stage)))
            return found

    for found in run(data * pipe, main):
        for ours, own in found:
            assert abs(ours - loss) < 1e-12 * max(1, abs(loss))
            for key, gradient in own.items():
                right = gradients[key]
                if right is None or gradient is None:
                    assert right is gradient is None
                    continue
                near = 1e-6 if gradient.dtype == torch.float32 else 1e-12
                assert torch.allclose(gradient, right, rtol=near, atol=near)


def test_an_unused_parameter_of_all_replicas_has_no_gradient() -> None:
    """One that a single replica uses has that one's."""

    class Chosen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([linear(1), linear(2), linear(3)])

        def forward(self, x: Any) -> Any:
            return self.layers[int(x[0, 0])](x)

    def main(comm: Any) -> Any:
        with ProcessGrid(comm, {"pipe": 1, "data": 2}) as grid:
            stage = Chosen()
            with MessageDrivenPipeline(stage, grid, mean_loss) as pipeline:
                x = torch.full((2, 5), float(comm.rank), dtype=torch.float64)
                pipeline.step([x], [x])
            return [each.weight.grad for each in stage.layers]

    for first, second, third in run(2, main):
        assert first is not None
        assert second is not None
        assert third is None


def test_sparse_gradients_of_replicas_are_refused() -> None:
    def main(comm: Any) -> str:
        with ProcessGrid(comm, {"pipe": 1, "data": 2}) as grid:
            stage = nn.Embedding(4, 5, sparse=True, dtype=torch.float64)
            with MessageDrivenPipeline(stage, grid, mean_loss) as pipeline:
                x = torch.zeros(2, 5, dtype=torch.float64)
                try:
                    pipeline.step([torch.tensor([0, 1])], [x])
                except (UsageError, RefusedError) as error:
                    return str(error)
            return ""

    assert all("use sparse=False" in each for each in run(2, main))


def test_replicas_that_differ_are_refused() -> None:
    def main(comm: Any) -> None:
        with ProcessGrid(comm, {"pipe": 1, "data": 2}) as grid:
            stage = nn.Linear(5, 5 + comm.rank)
            with pytest.raises(UsageError, match="replicas must have the same"):
                MessageDrivenPipeline(stage, grid, mean_loss)
            alike = linear(1)
            with MessageDrivenPipeline(alike, grid, mean_loss) as pipeline:
                alike.bias.requires_grad_(comm.rank == 0)
                x = torch.ones(2, 5, dtype=torch.float64)
                with pytest.raises(UsageError, match="replicas must have the same"):
                    pipeline.step([x], [x])

    run(2, main)


def test_buffers_of_replicas_that_differ_are_refused() -> None:
    def main(comm: Any) -> None:
        with ProcessGrid(comm, {"pipe": 1, "data": 2}) as grid:
            for other in (torch.ones(4), torch.ones(3).double(), None):
                stage = linear(1)
                stage.register_buffer("seen", other if comm.rank else torch.ones(3))
                with pytest.raises(UsageError, match="replicas must have the same"):
                    MessageDrivenPipeline(stage, grid, mean_loss)

    run(2, main)


def test_buffers_of_replicas_may_grow_apart() -> None:
    """Only their first values are shared."""

    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(1))

        def forward(self, x: Any) -> Any:
            self.seen = torch.cat([self.seen, torch.ones(len(x))])
            return x

    def main(comm: Any) -> int:
        with ProcessGrid(comm, {"pipe": 1, "data": 2}) as grid:
            stage = nn.Sequential(Keeps(), linear(1))
            with MessageDrivenPipeline(stage, grid, mean_loss) as pipeline:
                for _ in range(2):
                    pipeline.step(*batch((2 + comm.rank,)))
            return len(stage[0].seen)

    assert run(2, main) == [5, 7]


LAZY = "uninitialized parameter"
EXPANDED = "refers to a single memory location"


@pytest.mark.parametrize("text", [LAZY, EXPANDED])
def test_replicas_that_cannot_start_are_told_to_other_stages(text: str) -> None:
    def main(comm: Any) -> str:
        with ProcessGrid(comm, {"pipe": 2, "data": 2}) as grid:
            stage = linear(1)
            if grid.coords["pipe"] and text == LAZY:
                stage = nn.LazyLinear(5)
            elif grid.coords["pipe"]:
                stage.register_buffer("ones", torch.ones(1).expand(3))
            try:
                MessageDrivenPipeline(stage, grid, mean_loss)
            except (RuntimeError, ValueError, RefusedError) as error:
                return f"{type(error).__name__}: {error}"
        return ""

    found = run(4, main)
    assert all(text in each for each in found)
    assert [each.startswith("RefusedError") for each in found] == [
        *(True, True, False, False)
    ]


# -- bytes -----------------------------------------------------------------------------


def sent_in_steps(log: Any) -> list[Counter[str]]:
    """Return what a rank sent between barriers, by operation."""
    found: list[Counter[str]] = []
    is_open = False
    for each in log.operations:
        if each.op == "barrier":
            is_open = not is_open
            if is_open:
                found.append(Counter())
        elif is_open:
            found[-1][each.op] += each.nbytes
    return found


@pytest.mark.full(sample=6)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("sizes", [(4, 4, 3), (2,) * 5])
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("name", ["plain", "tuples"])
def test_a_step_sends_the_bytes_of_its_formula(
    name: str, ranks: int, sizes: tuple[int, ...], reduction: str
) -> None:
    model = {"plain": plain, "tuples": tuples}[name]()
    given = batch(sizes)
    m, total = len(sizes), sum(sizes)

    def main(comm: Any) -> None:
        stage = cut(model, comm.size, comm.rank)
        with MessageDrivenPipeline(
            stage, comm, LOSSES[reduction], reduction=reduction
        ) as pipeline:
            for call in (pipeline.step, pipeline.step, pipeline.evaluate):
                comm.barrier()
                call(*given)
                comm.barrier()

    with commrt.trace.record() as recording:
        run(ranks, main)
    ends = [each.stop for each in ranges_of(len(model), ranks)][:-1]
    for rank, log in enumerate(logs_of(recording)):
        first, second, evaluated = sent_in_steps(log)
        meetings = (56 + 80) * ranks if ranks > 1 else 0
        forward = back = shapes = 0
        for kind, end in (("out", rank), ("in", rank - 1)):
            if not 0 <= end < ranks - 1:
                continue
            several = name == "tuples" and 2 <= ends[end] <= 7
            if kind == "out":
                # Of three, two and one numbers of 8, 4 and 4 bytes, and one of 8.
                forward = total * (24 + 8 + 4 + 8 if several else 40)
                shapes = m * 8 * (1 + 3 * 4 + 3 if several else 1 + 4)
            else:
                back = total * (24 + 8) + 2 * m if several else total * 40
        counted = 8 * m if reduction == "mean" and rank == 0 < ranks - 1 else 0
        for sent, right, is_counted in (
            (first, forward + shapes + back, True),
            (second, forward + back, True),
            (evaluated, forward + shapes, True),
        ):
            assert sent["allgather"] == meetings
            assert sent["send"] == right + counted * is_counted
            assert {*sent} <= {"allgather", "send", "recv"}


def test_replicas_start_with_the_bytes_of_their_formula() -> None:
    def main(comm: Any) -> None:
        with ProcessGrid(comm, {"pipe": 2, "data": 2}) as grid:
            comm.barrier()
            pipeline = MessageDrivenPipeline(plain(), grid, mean_loss)
            comm.barrier()
            pipeline.free()

    nbytes = sum(x.nbytes for x in (*plain().parameters(), *plain().buffers()))
    with commrt.trace.record() as recording:
        run(4, main)
    for log in logs_of(recording):
        (sent,) = sent_in_steps(log)
        assert sent["allgather"] == (40 + 8) * 4
        assert sent["bcast"] == nbytes


def test_replicas_send_the_bytes_of_their_gradients() -> None:
    def main(comm: Any) -> None:
        with (
            ProcessGrid(comm, {"pipe": 1, "data": 2}) as grid,
            MessageDrivenPipeline(plain(), grid, mean_loss) as pipeline,
        ):
            comm.barrier()
            pipeline.step(*batch((3, 2)))
            comm.barrier()

    numbers = [each.numel() for each in plain().parameters()]
    with commrt.trace.record() as recording:
        run(2, main)
    for log in logs_of(recording):
        (sent,) = sent_in_steps(log)
        assert sent["allreduce"] == 8 * (sum(numbers) + len(numbers))
