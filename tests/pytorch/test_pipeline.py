# SPDX-License-Identifier: Apache-2.0
"""A message-driven pipeline has the loss and the gradients of one process."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from pipeline_cases import (
    MODELS,
    batch,
    cut,
    gradients_of,
    pipeline_of,
    plain,
    serial,
)

from commrt.layers.pipeline import MessageDrivenPipeline
from commrt.local import run

WAIT_S = 300.0
SIZES = {
    "even": (4, 4, 4, 4),
    "uneven": (3, 3, 3, 3, 3, 2),
    "one": (5,),
    "many": (2,) * 11,
}


def is_close(ours: Any, theirs: Any) -> bool:
    if ours is None or theirs is None:
        return ours is None and theirs is None
    near = 1e-6 if ours.dtype == torch.float32 else 1e-12
    return ours.dtype == theirs.dtype and torch.allclose(
        ours, theirs, rtol=near, atol=near
    )


@pytest.mark.full(sample=24)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("in_flight", [None, 1, 7])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_are_those_of_one_process(
    name: str, ranks: int, sizes: str, in_flight: int | None, reduction: str
) -> None:
    given = batch(SIZES[sizes])
    model = MODELS[name]()
    loss, gradients = serial(MODELS[name](), given, reduction)

    def main(comm: Any) -> Any:
        stage, pipeline = pipeline_of(comm, model, reduction, in_flight=in_flight)
        found = []
        with pipeline:
            for _ in range(2):  # shapes are negotiated, and then remembered
                for each in stage.parameters():
                    each.grad = None
                found.append((pipeline.step(*given), gradients_of(stage)))
            assert pipeline.most_in_flight <= (in_flight or 2 * ranks)
        return found

    found = run(ranks, main)
    for first, second in found:
        for ours, own in (first, second):
            assert abs(ours - loss) <= 1e-12 * max(1.0, abs(loss))
            for key, gradient in own.items():
                assert is_close(gradient, gradients[key]), key
    names = [key for first, _ in found for key in first[1]]
    assert sorted(names) == sorted(gradients)


class Counted(torch.nn.Module):
    """Counts micro-batches that have gone forward and not back.

    It lets ``ready`` know once as many have gone forward as may; or waits for that.
    """

    def __init__(self, limit: int, ready: threading.Event, waits: bool) -> None:
        super().__init__()
        self.limit, self.ready, self.waits = limit, ready, waits
        self.now = self.most = 0
        self.order: list[str] = []

    def forward(self, x: Any) -> Any:
        self.now += 1
        self.most = max(self.most, self.now)
        self.order.append("forward")
        if self.waits:
            assert self.ready.wait(WAIT_S)
        elif self.now == self.limit:
            self.ready.set()
        y = x * 1.0
        y.register_hook(self._back)
        return y

    def _back(self, _: Any) -> None:
        self.now -= 1
        self.order.append("back")


@pytest.mark.parametrize("in_flight", [None, 1, 2, 20])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_no_more_micro_batches_are_in_flight_than_may_be(
    ranks: int, in_flight: int | None
) -> None:
    given = batch((2,) * 12)
    limit = min(in_flight or 2 * ranks, 12)
    ready = threading.Event()

    def main(comm: Any) -> tuple[int, int, list[str]]:
        is_late = comm.rank == comm.size - 1 > 0
        counted = Counted(limit, ready, is_late)
        stage = torch.nn.Sequential(plain()[0], counted)
        with MessageDrivenPipeline(
            stage, comm, torch.nn.functional.mse_loss, in_flight=in_flight
        ) as pipeline:
            pipeline.step(*given)
            return counted.most, pipeline.most_in_flight, counted.order

    found = run(ranks, main)
    assert all(1 <= most <= limit for most, _, _ in found)
    assert all(most <= said for most, said, _ in found)
    assert found[0][0] == (limit if ranks > 1 else 1)
    # The last stage goes back at once, and the first one begins as many as it may.
    assert found[-1][2] == ["forward", "back"] * 12
    if ranks > 1:
        assert found[0][2][:limit] == ["forward"] * limit


def test_autocast_may_change_between_steps() -> None:
    given = batch((2, 2))

    def main(comm: Any) -> list[str]:
        stage = torch.nn.Linear(5, 5)
        found = []
        with MessageDrivenPipeline(
            stage, comm, lambda y, t: y.float().sum()
        ) as pipeline:
            for is_enabled in (False, True, False):
                with torch.autocast("cpu", torch.bfloat16, enabled=is_enabled):
                    inputs = [x.float() for x in given.inputs]
                    outputs = pipeline.predict(inputs)
                    pipeline.step(inputs, given.targets)
                if outputs is not None:
                    found.append(str(outputs[0].dtype))
        return found

    assert run(2, main)[1] == ["torch.float32", "torch.bfloat16", "torch.float32"]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_two_runs_have_the_same_bits(ranks: int) -> None:
    given = batch(SIZES["many"])
    model = plain()

    def main(comm: Any) -> Any:
        stage, pipeline = pipeline_of(comm, model)
        with pipeline:
            return pipeline.step(*given), gradients_of(stage)

    first, *others = (run(ranks, main) for _ in range(4))
    for other in others:
        for (loss, own), (again, same) in zip(first, other, strict=True):
            assert loss == again
            assert all(torch.equal(own[key], same[key]) for key in own)


def test_one_rank_has_the_bits_of_a_plain_loop() -> None:
    given = batch(SIZES["uneven"])
    loss, gradients = serial(plain(), given)

    def main(comm: Any) -> Any:
        stage, pipeline = pipeline_of(comm, plain())
        with pipeline:
            return pipeline.step(*given), gradients_of(stage)

    ((ours, own),) = run(1, main)
    assert ours == loss
    assert all(torch.equal(own[key], gradients[key]) for key in gradients)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_gradients_are_added_to_those_of_before(ranks: int) -> None:
    given = batch(SIZES["even"])
    model = plain()
    serial(model, given)
    _, twice = serial(model, given)

    def main(comm: Any) -> Any:
        stage, pipeline = pipeline_of(comm, plain())
        with pipeline:
            pipeline.step(*given)
            pipeline.step(*given)
        return gradients_of(stage)

    for own in run(ranks, main):
        assert all(is_close(own[key], twice[key]) for key in own)


@pytest.mark.parametrize("sizes", [(), (0,), (0, 3, 0, 2, 1)])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_steps_without_samples(ranks: int, sizes: Sequence[int]) -> None:
    given = batch(sizes)
    model = MODELS["frozen first"]
    loss, gradients = serial(model(), given)

    def main(comm: Any) -> Any:
        stage, pipeline = pipeline_of(comm, model())
        with pipeline:
            return pipeline.step(*given), gradients_of(stage)

    for ours, own in run(ranks, main):
        assert abs(ours - loss) <= 1e-12
        for key, gradient in own.items():
            assert is_close(gradient, gradients[key]), key


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_evaluation_leaves_no_gradients(ranks: int, name: str) -> None:
    given = batch((2, 3, 2, 2, 1))
    model = MODELS[name]().eval()
    loss, _ = serial(MODELS[name]().eval(), given)
    outputs = [model(x.clone()).detach() for x in given.inputs]

    def main(comm: Any) -> Any:
        stage, pipeline = pipeline_of(comm, model, in_flight=2)
        with pipeline:
            found = pipeline.evaluate(*given), pipeline.predict(given.inputs)
        assert all(each is None for each in gradients_of(stage).values())
        return found

    *others, (ours, predicted) = run(ranks, main)
    assert [each for _, each in others] == [None] * (ranks - 1)
    assert all(abs(each - loss) < 1e-12 for each, _ in (*others, (ours, predicted)))
    assert len(predicted) == len(outputs)
    for one, other in zip(predicted, outputs, strict=True):
        assert not one.requires_grad
        assert is_close(one, other)


def test_only_the_ends_need_micro_batches_and_targets() -> None:
    given = batch(SIZES["uneven"])
    loss, _ = serial(plain(), given)

    def main(comm: Any) -> float:
        _, pipeline = pipeline_of(comm, plain())
        is_first, is_last = comm.rank == 0, comm.rank == comm.size - 1
        with pipeline:
            return pipeline.step(
                given.inputs if is_first else None, given.targets if is_last else None
            )

    assert all(abs(each - loss) < 1e-12 for each in run(4, main))


def test_shapes_of_other_steps_are_learnt_and_remembered() -> None:
    """Also where modes and frozen parameters change between them."""
    first, second = batch((3, 2)), batch((2, 2, 4))
    expected = []
    model = plain()
    for given in (first, second, first, second):
        model.zero_grad()
        expected.append(serial(model, given))
    model.zero_grad()
    for layer in [*model][:5]:
        layer.requires_grad_(False)
    expected.append(serial(model.eval(), first))

    def main(comm: Any) -> Any:
        stage, pipeline = pipeline_of(comm, plain())
        found = []
        with pipeline:
            for given in (first, second, first, second):
                stage.zero_grad()
                found.append((pipeline.step(*given), gradients_of(stage)))
            stage.zero_grad()
            for key, each in stage.named_parameters():
                each.requires_grad_(int(key.partition(".")[0]) >= 5)
            stage.eval()
            found.append((pipeline.step(*first), gradients_of(stage)))
        return found

    for found in run(3, main):
        for (ours, own), (loss, gradients) in zip(found, expected, strict=True):
            assert abs(ours - loss) < 1e-12
            assert all(is_close(own[key], gradients[key]) for key in own)


class Cutting(torch.nn.Module):
    """Returns as many rows as a value says."""

    def forward(self, x: Any) -> Any:
        return x[: 1 + int(x[0, 0].detach().item() > 0)]


@pytest.mark.parametrize("ranks", [2, 3])
def test_shapes_may_depend_on_values(ranks: int) -> None:
    def model() -> Any:
        layers = plain()
        layers[5], layers[9] = torch.nn.Identity(), torch.nn.Identity()
        return torch.nn.Sequential(Cutting(), *layers)

    def main(comm: Any) -> Any:
        stage = cut(model(), comm.size, comm.rank)
        pipeline = MessageDrivenPipeline(
            *(stage, comm, lambda y, _: y.square().sum()),
            reduction="sum",
            fixed_shapes=False,
        )
        found = []
        with pipeline:
            for sign in (1.0, -1.0, 1.0):
                stage.zero_grad()
                x = torch.full((2, 5), sign, dtype=torch.float64)
                loss = pipeline.step([x, -x], [None] * 2)
                found.append((loss, gradients_of(stage)))
        return found

    for found in run(ranks, main):
        for sign, (ours, own) in zip((1.0, -1.0, 1.0), found, strict=True):
            x = torch.full((2, 5), sign, dtype=torch.float64)
            alone = model()
            losses = [alone(each).square().sum() for each in (x, -x)]
            sum(losses).backward()
            gradients = gradients_of(alone)
            assert abs(ours - float(sum(losses).detach())) < 1e-12
            assert all(is_close(own[key], gradients[key]) for key in own)


def test_training_follows_one_process_on_unequal_stages() -> None:
    given = batch((4,) * 8)
    model = plain()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for _ in range(12):
        optimizer.zero_grad()
        losses.append(serial(model, given)[0])
        optimizer.step()

    def main(comm: Any) -> list[float]:
        stage, pipeline = pipeline_of(comm, plain())
        parameters = [*stage.parameters()] or [torch.zeros(1, requires_grad=True)]
        optimizer = torch.optim.Adam(parameters, lr=0.01)
        found = []
        with pipeline:
            for _ in range(12):
                optimizer.zero_grad()
                found.append(pipeline.step(*given))
                optimizer.step()
        return found

    for found in run(4, main):
        assert all(
            abs(one - other) < 1e-11 for one, other in zip(found, losses, strict=True)
        )
    assert losses[-1] < losses[0]


def test_stages_say_what_they_took() -> None:
    def main(comm: Any) -> Any:
        _, pipeline = pipeline_of(comm, plain())
        with pipeline:
            assert pipeline.stage_seconds is None
            pipeline.step(*batch((4,) * 4))
            return pipeline.stage_seconds

    found = run(3, main)
    assert len(found[0]) == 3
    assert all(each > 0 for each in found[0])
    assert found == [found[0]] * 3
