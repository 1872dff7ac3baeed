# SPDX-License-Identifier: Apache-2.0
"""Wrong calls and errors of one stage end a step on all ranks, which may go on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pipeline_cases import (
    Failing,
    batch,
    gradients_of,
    linear,
    mean_loss,
    pipeline_of,
    plain,
    serial,
)
from torch import nn

from commrt.errors import RefusedError, UsageError
from commrt.layers.pipeline import MessageDrivenPipeline
from commrt.layers.process_grid import ProcessGrid
from commrt.local import run


def outcome_of(call: Any) -> str:
    try:
        return f"returned {call()}"
    except Exception as error:  # noqa: BLE001  what it is is told
        return f"{type(error).__name__}: {error}"


def large(width: int) -> nn.Module:
    """Return a layer whose messages wait for their receives."""
    return nn.Linear(5, width, dtype=torch.float64)


@pytest.mark.full(sample=10)
@pytest.mark.parametrize("width", [5, 3000])
@pytest.mark.parametrize("is_backward", [False, True])
@pytest.mark.parametrize("at", [0, 2, 5])
@pytest.mark.parametrize("wrong", [0, 1, 3])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_an_error_of_one_stage_ends_the_step_on_all_ranks(
    ranks: int, wrong: int, at: int, is_backward: bool, width: int
) -> None:
    """Quickly, with its name; gradients stay, and the next step is right."""
    wrong = min(wrong, ranks - 1)
    given = batch((2,) * 7)

    def main(comm: Any) -> Any:
        torch.manual_seed(comm.rank)
        failing = Failing()
        failing.is_backward = is_backward
        stage = nn.Sequential(
            large(width), failing, nn.Linear(width, 5, dtype=torch.float64)
        )
        if width > 5 and comm.rank < comm.size - 1:
            stage = nn.Sequential(stage, Widened())
        pipeline = MessageDrivenPipeline(stage, comm, mean_loss, in_flight=3)
        said = []
        with pipeline:
            right = pipeline.step(*given)
            kept = gradients_of(stage)
            for _ in range(2):
                failing.calls = 0
                failing.fail_at = at if comm.rank == wrong else None
                said.append(outcome_of(lambda: pipeline.step(*given)))
                now = gradients_of(stage)
                assert all(torch.equal(kept[key], now[key]) for key in kept)
            failing.fail_at = None
            for each in stage.parameters():
                each.grad = None
            again = pipeline.step(*given)
            now = gradients_of(stage)
            assert again == right
            assert all(torch.equal(kept[key], now[key]) for key in kept)
        return said

    for rank, said in enumerate(run(ranks, main)):
        start = "ArithmeticError: planted"
        if rank != wrong:
            start = (
                f"RefusedError: MessageDrivenPipeline.step on local.pipeline: rank "
                f"{wrong} raised {start}"
            )
        assert [each[: len(start)] for each in said] == [start] * 2


class Widened(nn.Module):
    """Passes its input on, and a large tensor beside it that nobody needs."""

    def forward(self, x: Any) -> Any:
        return x + torch.zeros(1, dtype=x.dtype) * x.new_ones(40_000).sum()


@pytest.mark.parametrize("wrong", [1, 2])
def test_what_a_failed_evaluation_has_sent_is_cleared_away(wrong: int) -> None:
    """Short messages leave before anybody asks for them, so many wait at the end."""
    first, second = batch((2,) * 9), batch((2,) * 9, seed=8)

    def main(comm: Any) -> float:
        failing = Failing()
        stage = nn.Sequential(linear(comm.rank), failing)
        with MessageDrivenPipeline(stage, comm, mean_loss, in_flight=1) as pipeline:
            failing.fail_at = 0 if comm.rank == wrong else None
            said = outcome_of(lambda: pipeline.evaluate(*first))
            assert "planted in call 1" in said
            failing.fail_at = None
            return pipeline.evaluate(*second)

    right = serial(nn.Sequential(linear(0), linear(1), linear(2)), second)[0]
    assert all(abs(each - right) < 1e-12 for each in run(3, main))


def test_errors_of_several_stages_are_each_ranks_own() -> None:
    def main(comm: Any) -> str:
        failing = Failing()
        failing.fail_at = 0 if comm.rank in (0, 2) else None
        pipeline = MessageDrivenPipeline(failing, comm, mean_loss)
        with pipeline:
            return outcome_of(lambda: pipeline.step(*batch((2, 2))))

    found = run(3, main)
    assert found[0].startswith("ArithmeticError: planted")
    assert "rank 0 raised ArithmeticError: planted" in found[1]
    # The third one may have been told before it failed.
    assert "ArithmeticError: planted" in found[2]


def test_a_failing_replica_ends_the_others() -> None:
    given = batch((2,) * 4)

    def main(comm: Any) -> Any:
        with ProcessGrid(comm, {"data": 2, "pipe": 2}) as grid:
            failing = Failing()
            torch.manual_seed(grid.coords["pipe"])
            stage = nn.Sequential(linear(grid.coords["pipe"]), failing)
            with MessageDrivenPipeline(stage, grid, mean_loss) as pipeline:
                right = pipeline.step(*given), gradients_of(stage)
                failing.fail_at = failing.calls + 3 if comm.rank == 1 else None
                said = outcome_of(lambda: pipeline.step(*given))
                failing.fail_at = None
                stage.zero_grad()
                again = pipeline.step(*given), gradients_of(stage)
                assert again[0] == right[0]
                assert all(torch.equal(again[1][k], right[1][k]) for k in right[1])
                return said

    found = run(4, main)
    assert ["planted" in each for each in found] == [True] * 4
    assert [each.split(":")[0] for each in found] == [
        *("RefusedError", "ArithmeticError"),
        *("RefusedError", "RefusedError"),
    ]


# -- wrong calls -----------------------------------------------------------------------


def said_of(ranks: int, wrong: Any, call: str = "step") -> list[str]:
    """Return what each rank says of a call; then all make a right one."""
    given = batch((2, 2, 2))

    def main(comm: Any) -> str:
        _, pipeline = pipeline_of(comm, plain())
        with pipeline:
            said = outcome_of(lambda: getattr(pipeline, call)(*wrong(comm.rank)))
            loss = pipeline.step(*given)
        assert abs(loss - serial(plain(), given)[0]) < 1e-12
        return said

    return run(ranks, main)


X = torch.ones(2, 5, dtype=torch.float64)
WRONG: dict[str, tuple[Any, str]] = {
    "too few targets": (([X, X], [X]), "rank 0 has 1 targets, and rank 0 2 micro-b"),
    "no targets": (([X, X], None), "targets must be a list with one entry"),
    "no inputs": ((None, [X]), "microbatches must be a list with one entry"),
    "a tensor": ((X, X), "such as x.split(8)"),
    "text": ((["x"], [X]), "must be a tensor, or a tuple of tensors"),
    "empty": (([()], [X]), "must be a tensor, or a tuple of tensors"),
    "loss": (([X], [None]), "NoneType"),
}


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("case", WRONG)
def test_micro_batches_that_do_not_fit_are_refused(case: str, ranks: int) -> None:
    wrong, text = WRONG[case]
    found = said_of(ranks, lambda rank: wrong)
    assert not any(each.startswith("returned") for each in found)
    assert all(text in each for each in found)


def test_ranks_that_disagree_on_numbers_are_refused() -> None:
    found = said_of(3, lambda rank: ([X] * (1 + (rank == 1)), [X]))
    assert all("rank 1 has 2 micro-batches" in each for each in found)


def test_different_calls_are_refused() -> None:
    def main(comm: Any) -> str:
        _, pipeline = pipeline_of(comm, plain())
        name = "evaluate" if comm.rank else "step"
        with pipeline:
            return outcome_of(lambda: getattr(pipeline, name)([X], [X]))

    assert all("call the same on all ranks" in each for each in run(3, main))


class Returns(nn.Module):
    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value

    def forward(self, *_: Any) -> Any:
        return self.value


OUTPUTS: dict[str, tuple[Any, str]] = {
    "text": ("x", "expected a tensor, or a tuple of tensors"),
    "none": (None, "expected a tensor, or a tuple of tensors"),
    "dict": ({"x": X}, "expected a tensor, or a tuple of tensors"),
    "no tensors": ((), "expected a tensor, or a tuple of tensors"),
    "a number": ((X, 3), "expected tensors only"),
    "sparse": (X.to_sparse(), "expected a dense one of a common type"),
    "meta": (X.to("meta"), "expected one on cpu"),
    "too many": ((X,) * 200, "512 at most"),
    "too few for the next": ((X, X), "forward"),
}


@pytest.mark.parametrize("case", OUTPUTS)
def test_outputs_that_a_next_stage_does_not_take_are_refused(case: str) -> None:
    value, text = OUTPUTS[case]

    class OneInput(nn.Module):
        def forward(self, x: Any) -> Any:
            return x

    def main(comm: Any) -> str:
        stage = OneInput() if comm.rank else Returns(value)
        with MessageDrivenPipeline(stage, comm, mean_loss) as pipeline:
            return outcome_of(lambda: pipeline.evaluate([X], [X]))

    found = run(3, main)
    assert all(text in each for each in found)


@pytest.mark.parametrize("loss", [3.0, None, X, X[:0]])
def test_losses_that_are_no_number_are_refused(loss: Any) -> None:
    def main(comm: Any) -> str:
        stage = nn.Identity()
        with MessageDrivenPipeline(stage, comm, lambda y, t: loss) as pipeline:
            return outcome_of(lambda: pipeline.step([X], [X]))

    assert all("expected a tensor with one number" in each for each in run(2, main))


def test_shapes_that_change_for_alike_inputs_are_refused() -> None:
    """Unless the pipeline is told that they do."""

    class Cutting(nn.Module):
        def forward(self, x: Any) -> Any:
            return x[: int(x[0, 0])]

    def main(comm: Any) -> Any:
        stage = nn.Identity() if comm.rank else Cutting()
        total = nn.MSELoss(reduction="sum")
        with MessageDrivenPipeline(stage, comm, total, reduction="sum") as pipeline:
            pipeline.evaluate([X], [X[:1]])
            said = outcome_of(lambda: pipeline.evaluate([2 * X], [X]))
            return said, pipeline.evaluate([X], [X[:1]])

    for said, loss in run(2, main):
        assert "pass fixed_shapes=False" in said
        assert loss == 0


CONSTRUCTORS: dict[str, tuple[Any, str]] = {
    "stage": (lambda comm: (nn.Linear, comm, mean_loss), "must be a module"),
    "loss": (lambda comm: (nn.Identity(), comm, None), "must be callable on the last"),
    "text": (lambda comm: (nn.Identity(), comm, "mse"), "must be callable on the last"),
}
SETTINGS: dict[str, tuple[dict[str, Any], str]] = {
    "reduction": ({"reduction": "max"}, 'must be "mean" or "sum"'),
    "none in flight": ({"in_flight": 0}, "must be an integer from 1"),
    "too many in flight": ({"in_flight": 2**63}, "must be an integer from 1"),
    "no device": ({"device": "desk"}, "must be a device of torch"),
    "number of no device": ({"device": 1.5}, "must be a device of torch"),
    "half in flight": ({"in_flight": 1.5}, "must be an integer from 1"),
    "fixed": ({"fixed_shapes": 1}, "must be True or False"),
}


@pytest.mark.parametrize("case", CONSTRUCTORS)
def test_wrong_arguments_of_a_pipeline_are_refused(case: str) -> None:
    make, text = CONSTRUCTORS[case]

    def main(comm: Any) -> str:
        return outcome_of(lambda: MessageDrivenPipeline(*make(comm)))

    found = run(2, main)
    assert all(text in each for each in found)


@pytest.mark.parametrize("case", SETTINGS)
def test_wrong_settings_of_one_rank_are_refused_on_all(case: str) -> None:
    more, text = SETTINGS[case]

    def main(comm: Any) -> Any:
        own: dict[str, Any] = more if comm.rank == 1 else {}
        return outcome_of(
            lambda: MessageDrivenPipeline(nn.Identity(), comm, mean_loss, **own)
        )

    found = run(3, main)
    assert all(text in each for each in found)
    assert [each.split(":")[0] for each in found] == [
        *("RefusedError", "UsageError", "RefusedError")
    ]


@pytest.mark.parametrize("text", ["lone \udc80 surrogate", None])
def test_errors_whose_text_cannot_be_sent_end_the_step(text: str | None) -> None:
    """None: an error whose text cannot even be made."""

    class UntoldError(ArithmeticError):
        def __str__(self) -> str:
            if text is None:
                raise ValueError("no text")
            return text

    class Raises(nn.Module):
        def forward(self, x: Any) -> Any:
            raise UntoldError

    def main(comm: Any) -> str:
        stage = Raises() if comm.rank else nn.Identity()
        with MessageDrivenPipeline(stage, comm, mean_loss) as pipeline:
            try:
                pipeline.evaluate([X], [X])
            except UntoldError:
                return "its own"
            except RefusedError as error:
                return str(error)
        return ""

    told, own = run(2, main)
    assert own == "its own"
    assert "rank 1 raised UntoldError" in told
    assert "could not be made: ValueError" in told or "lone \\udc80 surr" in told


def test_a_stage_says_where_its_tensors_are() -> None:
    """One without parameters cannot show it."""
    moved, still = nn.Identity(), nn.Linear(5, 5)

    def main(comm: Any) -> list[str]:
        found = [
            outcome_of(
                lambda: MessageDrivenPipeline(still, comm, mean_loss, device="cuda")
            )
        ]
        for device in ("cuda", torch.device("cpu"), None):
            with MessageDrivenPipeline(
                moved, comm, nn.functional.mse_loss, device=device
            ) as pipeline:
                found.append(outcome_of(lambda: pipeline.evaluate([X], [X])))
        return found

    for other, moved_away, host, default in run(2, main):
        assert "device='cuda', and the stage has tensors on cpu" in other
        assert "a tensor on cpu; expected one on cuda" in moved_away
        assert host == default == "returned 0.0"


def test_settings_that_differ_are_refused() -> None:
    def main(comm: Any) -> None:
        with pytest.raises(UsageError, match="rank 1 has another in_flight than rank"):
            MessageDrivenPipeline(
                nn.Identity(), comm, mean_loss, in_flight=1 + comm.rank
            )

    run(3, main)


def test_other_communicators_and_grids_are_refused() -> None:
    def main(comm: Any) -> None:
        with pytest.raises(UsageError, match="must be a communicator"):
            MessageDrivenPipeline(nn.Identity(), 3, mean_loss)  # type: ignore[arg-type]
        with (
            ProcessGrid(comm, {"data": 2}) as grid,
            pytest.raises(UsageError, match="a grid with the axes data"),
        ):
            MessageDrivenPipeline(nn.Identity(), grid, mean_loss)

    run(2, main)


def test_an_interrupted_pipeline_is_not_used_again() -> None:
    class Interrupted(nn.Module):
        def forward(self, x: Any) -> Any:
            raise KeyboardInterrupt

    def main(comm: Any) -> None:
        with MessageDrivenPipeline(Interrupted(), comm, mean_loss) as pipeline:
            with pytest.raises(KeyboardInterrupt):
                pipeline.step([X], [X])
            with pytest.raises(UsageError, match="make another pipeline"):
                pipeline.step([X], [X])

    run(1, main)


def test_a_rank_that_ends_ends_the_others() -> None:
    def main(comm: Any) -> str:
        _, pipeline = pipeline_of(comm, plain())
        if comm.rank == 1:
            raise OSError("planted end")
        return outcome_of(lambda: pipeline.step([X], [X]))

    with pytest.raises(OSError, match="planted end"):
        run(3, main)


def test_inference_mode_is_refused() -> None:
    def main(comm: Any) -> None:
        _, pipeline = pipeline_of(comm, plain())
        with (
            pipeline,
            torch.inference_mode(),
            pytest.raises((UsageError, RefusedError), match="allows no gradients"),
        ):
            pipeline.step([X], [X])

    run(2, main)
