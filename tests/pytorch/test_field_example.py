# SPDX-License-Identifier: Apache-2.0
"""Each rung of the field's ladder loses what one process loses, and sends its bytes."""

from __future__ import annotations

import contextlib
import io
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.nn import functional

from commrt.examples.elevations import load_elevations
from commrt.examples.field import report
from commrt.examples.field.model import BLOCKS, PATCHES, WIDTH, made
from commrt.examples.field.report import Sent, sent_by
from commrt.examples.field.rungs import (
    FRACTION,
    MICRO_BATCH,
    RUNGS,
    cut,
    scaled,
    serial,
    stage_of,
)
from commrt.examples.field.schedules import scaled_lr, warm_up
from commrt.examples.field.tiles import CELL, SIDE, load_field
from commrt.examples.field.training import Settings, divided, mean_square, train
from commrt.launch.mpiexec import child_environment, run_process
from commrt.layers.process_grid import ProcessGrid
from commrt.local import run

DEADLINE_S = 300.0
SETTINGS = Settings(epochs=2, num_tiles=65)
"""Steps of 32, 32 and 1 tiles: in the last one most ranks have none."""
EXACT = 1e-12
E = 8
"""Bytes of an element."""
STEPS = 3
TENSORS = [parameter.numel() for parameter in made().parameters()]
ALL = [
    *((rung, ranks) for rung in RUNGS if "-" not in rung for ranks in (1, 2, 3, 4)),
    *((rung, ranks) for rung in RUNGS if "-" in rung for ranks in (2, 4)),
]
MORE = [
    *((rung, 8) for rung in RUNGS if rung != "pipeline"),
    ("pipeline", 5),
    ("data-tensor", 6),
    ("data-pipeline", 6),
]


class Of(NamedTuple):
    """Losses, log and order of tiles of one rank."""

    losses: list[float]
    sent: list[Sent]
    order: Any


def on_ranks(rung: str, ranks: int, settings: Settings = SETTINGS) -> list[Of]:
    """Train by a rung on ranks that are threads."""

    def main(comm: Any) -> Of:
        trained = RUNGS[rung](comm, settings)
        return Of(trained.losses, sent_by(trained.recording, comm.rank), trained.order)

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return run(ranks, main, timeout_s=DEADLINE_S)
    finally:
        torch.set_num_threads(threads)


def even(number: int, place: int, places: int) -> int:
    """Return how many of some tiles are in one of even parts, the first ones larger."""
    return number // places + (place < number % places)


def tiles_of(place: int, places: int) -> int:
    """Return how many tiles a rank has in an epoch, of all batches."""
    return sum(even(batch, place, places) for batch in (32, 32, 1))


def parts_of_the_loader(ranks: int) -> list[list[int]]:
    """Return how many tiles each rank has in each step, when each has its own."""
    counts = [even(65, rank, ranks) for rank in range(ranks)]
    steps = -(-max(counts) // -(-32 // ranks))
    return [
        [(step + 1) * m // steps - step * m // steps for m in counts]
        for step in range(steps)
    ]


# -- losses ----------------------------------------------------------------------------


def check_losses(rung: str, ranks: int) -> None:
    found = on_ranks(rung, ranks)
    order = found[0].order
    alone = serial(replace(SETTINGS, order=order)).losses
    within = 2e-2 if rung == "bfloat16" else EXACT
    for each in found:
        assert each.losses == pytest.approx(alone, rel=0, abs=within)
        assert each.losses == found[0].losses
    assert alone[-1] < alone[0]
    if rung == "bfloat16":  # it has computed otherwise
        assert abs(found[0].losses[-1] - alone[-1]) > 1e-7


@pytest.mark.full(sample=5)
@pytest.mark.parametrize(("rung", "ranks"), ALL)
def test_a_rung_loses_what_one_process_loses(rung: str, ranks: int) -> None:
    check_losses(rung, ranks)


@pytest.mark.full(sample=2)
@pytest.mark.parametrize(("rung", "ranks"), MORE)
def test_a_rung_of_many_ranks_loses_what_one_process_loses(
    rung: str, ranks: int
) -> None:
    check_losses(rung, ranks)


@pytest.mark.full(sample=1)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_ranks_exchange_tiles_and_each_is_learned_once_an_epoch(ranks: int) -> None:
    [first, *_] = on_ranks("samples", ranks)
    epochs = [torch.cat([*epoch]).tolist() for epoch in first.order]
    assert [sorted(epoch) for epoch in epochs] == [[*range(65)]] * 2
    assert epochs[0] != epochs[1]
    assert [[len(step) for step in epoch] for epoch in first.order] == [
        [sum(step) for step in parts_of_the_loader(ranks)]
    ] * 2


def large_batches_alone(factor: int, rule: str, epochs: int) -> list[float]:
    """Train one process on large batches, written out."""
    large = replace(SETTINGS, batch=factor * SETTINGS.batch)
    rate = scaled_lr(large.lr, factor, rule)
    model = made()
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    steps = epochs * -(-65 // large.batch)
    number = 0
    losses = []
    for epoch in range(large.epochs):
        weighted = 0.0
        for batch in divided(large)(epoch):
            part = warm_up(number, steps, large.lr / rate)
            optimizer.param_groups[0]["lr"] = part * rate
            optimizer.zero_grad()
            loss = functional.mse_loss(model(batch.guess), batch.detail)
            loss.backward()
            optimizer.step()
            weighted += float(loss.detach()) * len(batch.guess)
            number += 1
        losses.append(weighted / 65)
    return losses


@pytest.mark.full(sample=2)
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize(
    ("rule", "epochs"), [("none", 0), ("sqrt", 1), ("linear", 0), ("linear", 1)]
)
def test_larger_batches_on_ranks_are_those_of_one_process(
    rule: str, epochs: int, ranks: int
) -> None:
    def main(comm: Any) -> list[float]:
        return scaled(comm, SETTINGS, 2, rule, epochs).losses

    alone = large_batches_alone(2, rule, epochs)
    for losses in run(ranks, main, timeout_s=DEADLINE_S):
        assert losses == pytest.approx(alone, rel=0, abs=EXACT)


# -- bytes -----------------------------------------------------------------------------


def right_for(rung: str, rank: int, ranks: int) -> list[Sent]:
    """Return what the formulas of the tutorial say that a rank sends in an epoch."""
    number, n = len(TENSORS), sum(TENSORS)
    one_by_one = Sent(
        "all ranks", "allreduce", "float64", STEPS * number, STEPS * n * E
    )
    activations = PATCHES * WIDTH * E
    if rung == "data":
        return [one_by_one]
    if rung == "bfloat16":
        return [one_by_one._replace(dtype="float32", nbytes=STEPS * n * 4)]
    if rung == "buckets":
        return [one_by_one._replace(calls=STEPS, nbytes=STEPS * (n + number) * E)]
    if rung == "zero":
        return [
            Sent("all ranks", "allgatherv", "float64", STEPS, STEPS * n * E),
            Sent("all ranks", "allreduce", "uint8", 2 * STEPS, STEPS * (18 + number)),
            Sent("all ranks", "reduce_scatterv", "float64", STEPS, STEPS * n * E),
        ]
    if rung == "tensor":
        calls = 4 * BLOCKS * STEPS
        nbytes = 4 * BLOCKS * 65 * activations
        return [Sent("x", "allreduce", "float64", calls, nbytes)]
    raise AssertionError(rung)


@pytest.mark.full(sample=3)
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("rung", ["data", "buckets", "bfloat16", "zero", "tensor"])
def test_a_rung_sends_the_bytes_of_its_formula(rung: str, ranks: int) -> None:
    for rank, each in enumerate(on_ranks(rung, ranks)):
        assert each.sent == right_for(rung, rank, ranks)


@pytest.mark.parametrize("rung", [rung for rung in RUNGS if "-" not in rung])
def test_one_rank_sends_nothing_to_others(rung: str) -> None:
    [alone] = on_ranks(rung, 1, replace(SETTINGS, epochs=1))
    # Collectives of one rank's communicator are calls, too, and stand in its log.
    assert {line.axis for line in alone.sent} <= {"all ranks"}
    if rung in ("serial", "buckets", "zero", "tensor", "pipeline"):
        assert alone.sent == []


@pytest.mark.full(sample=1)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_shuffled_samples_send_the_tiles_that_change_ranks(ranks: int) -> None:
    tile = 2 * SIDE * SIDE * E + 8
    for rank, each in enumerate(on_ranks("samples", ranks)):
        steps = len(parts_of_the_loader(ranks))
        [gradients, tiles] = each.sent
        number = steps * len(TENSORS)
        assert gradients == Sent(
            "all ranks", "allreduce", "float64", number, steps * sum(TENSORS) * E
        )
        assert (tiles.op, tiles.calls) == ("alltoallv", 1)
        assert tiles.nbytes % tile == 0
        most = int(FRACTION * even(65, rank, ranks))
        assert 0 < tiles.nbytes <= most * tile


def messages_of(rank: int, stages: int, tiles: list[int]) -> list[Sent]:
    """Return what the stage of a pipeline sends for some tiles a step, in an epoch."""
    micro = [max(1, -(-number // MICRO_BATCH)) for number in tiles]
    ends = (rank > 0) + (rank < stages - 1)
    nbytes = ends * sum(tiles) * PATCHES * WIDTH * E
    calls = ends * sum(micro)
    if rank < stages - 1:  # the kinds of steps are told once: three dimensions
        kinds = {tuple(number_in(step)) for step in tiles}
        shapes = sum(len(kind) for kind in kinds)
        calls, nbytes = calls + shapes, nbytes + 8 * (1 + 2 + 3) * shapes
    if rank > 0:  # a gradient of no tiles says so in a byte
        nbytes += tiles.count(0)
    found = [Sent("all ranks", "send", "uint8", calls, nbytes)]
    if rank == 0:
        found.insert(0, Sent("all ranks", "send", "int64", len(tiles), 8 * sum(micro)))
    return found


def number_in(tiles: int) -> list[int]:
    """Return the tiles of each micro-batch of a step."""
    return [len(part) for part in torch.zeros(tiles).split(MICRO_BATCH)]


@pytest.mark.full(sample=2)
@pytest.mark.parametrize("ranks", [2, 3, 4, 5])
def test_a_pipeline_sends_each_tile_over_each_boundary_and_back(ranks: int) -> None:
    for rank, each in enumerate(on_ranks("pipeline", ranks)):
        first, *messages = each.sent
        assert first == Sent(
            "all ranks", "allgather", "int64", 2 * STEPS, STEPS * (56 + 80) * ranks
        )
        assert messages == messages_of(rank, ranks, [32, 32, 1])


@pytest.mark.full(sample=1)
@pytest.mark.parametrize("ranks", [2, 4, 6])
def test_data_and_tensor_parallelism_send_along_their_own_axes(ranks: int) -> None:
    def elements(comm: Any) -> int:
        with ProcessGrid(comm, {"data": 0, "x": 2}) as grid:
            return sum(each.numel() for each in cut(made(), grid).parameters())

    lengths = run(ranks, elements)
    places = ranks // 2
    for rank, each in enumerate(on_ranks("data-tensor", ranks)):
        tiles = tiles_of(rank // 2, places)
        nbytes = 4 * BLOCKS * tiles * PATCHES * WIDTH * E
        right = [Sent("x", "allreduce", "float64", 4 * BLOCKS * STEPS, nbytes)]
        if places > 1:
            nbytes = STEPS * (lengths[rank] + len(TENSORS)) * E
            right.insert(0, Sent("data", "allreduce", "float64", STEPS, nbytes))
        assert each.sent == right


@pytest.mark.full(sample=1)
@pytest.mark.parametrize("ranks", [2, 4, 6])
def test_pipelines_beside_each_other_add_up_their_stages(ranks: int) -> None:
    places = ranks // 2
    for rank, each in enumerate(on_ranks("data-pipeline", ranks)):
        stage, place = rank % 2, rank // 2
        parameters = [*stage_of(made(), stage, 2).parameters()]
        elements = sum(each.numel() for each in parameters) + len(parameters)
        summed = [line for line in each.sent if line.op == "allreduce"]
        nbytes = STEPS * elements * E
        right = [Sent("data", "allreduce", "float64", STEPS, nbytes)]
        assert summed == (right if places > 1 else [])
        sent = [line for line in each.sent if line.op == "send"]
        tiles = [even(batch, place, places) for batch in (32, 32, 1)]
        assert sent == messages_of(stage, 2, tiles)


# -- the field -------------------------------------------------------------------------


def test_the_elevations_are_those_of_the_data_set() -> None:
    metres = load_elevations()
    assert (metres.shape, metres.dtype) == ((344, 403), np.int16)
    assert (int(metres.min()), int(metres.max())) == (236, 1076)
    assert int(metres.astype(np.int64).sum()) == 73617913


def test_tiles_are_the_field_and_those_that_are_tested_lie_apart() -> None:
    field = load_field()
    assert field.learned.guess.shape == (1512, SIDE, SIDE)
    assert field.tested.guess.shape == (126, SIDE, SIDE)
    assert float(field.learned.detail.square().mean()) == pytest.approx(1)
    assert float(field.learned.guess.square().mean()) == pytest.approx(1)
    # A coarse cell's mean is nearly that of the guess between the cells.
    off = functional.avg_pool2d(field.learned.detail[:, None], CELL)
    assert float(off.square().mean()) < 0.4
    fewer = load_field(num_tiles=7)
    assert torch.equal(fewer.learned.detail, field.learned.detail[:7])
    assert torch.equal(fewer.tested.detail, field.tested.detail)


def test_the_model_begins_with_the_bicubic_guess_and_improves_on_it() -> None:
    settings = Settings(epochs=4)
    tested = settings.field().tested
    bicubic = float(tested.detail.square().mean())
    assert mean_square(made(), tested) == pytest.approx(bicubic)
    found = serial(settings)
    assert mean_square(found.model, tested) < 0.88 * bicubic
    assert found.losses[-1] < 0.8 < 0.9 < found.losses[0] < 1


def test_a_training_without_its_own_step_is_written_as_a_loop() -> None:
    """A plain loop of torch's loses what ``train`` loses."""
    model = made()
    optimizer = torch.optim.AdamW(model.parameters(), lr=SETTINGS.lr)
    found = train(model, optimizer, divided(SETTINGS), SETTINGS).losses
    assert found == pytest.approx(large_batches_alone(1, "none", 0), abs=EXACT)


# -- the command -----------------------------------------------------------------------


def reported(rungs: list[str]) -> list[Any]:
    """Run the command; return status and lines of each rung."""
    found = []
    for rung in rungs:
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            status = report.main([rung, "--tiles", "65", "--epochs", "2"])
        found.append([status, said.getvalue()])
    return found


SHORT = ["data", "tensor", "data-pipeline"]


def check_reports(results: list[Any]) -> None:
    for rung, (status, said) in zip(SHORT, results[0], strict=True):
        assert status == 0, said
        first, _, *lines = said.splitlines()
        assert first == f"{rung} on 2 ranks: 65 tiles, 2 epochs of 3 steps"
        assert [float(line.split()[3]) <= EXACT for line in lines[:2]] == [True] * 2
        assert "log of the first epoch, of rank 0:" in lines[2]
    for other in results[1:]:
        assert other == [[0, ""]] * len(SHORT)


def test_the_ladder_on_ranks_of_torchrun(torchrun: Any) -> None:
    check_reports(torchrun(2, reported, rungs=SHORT, deadline_s=DEADLINE_S))


def test_the_ladder_on_ranks_of_mpiexec(mpirun: Any) -> None:
    check_reports(mpirun(2, reported, rungs=SHORT, deadline_s=DEADLINE_S))


@pytest.mark.parametrize(
    ("rung", "ranks", "says"),
    [
        ("scaling", 2, "scaling on 2 ranks: 1 epochs"),
        ("data-tensor", 3, "data-tensor on 3 ranks: "),
    ],
)
def test_the_ladder_under_commrt_run(
    rung: str,
    ranks: int,
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)  # in the checkout -m finds a commrt without engine
    module = ["-m", "commrt.run", "-n", str(ranks), "-m", "commrt.examples.field"]
    done = run_process(
        [sys.executable, *module, rung, "--tiles", "40", "--epochs", "1"],
        {**child_environment(sys.executable), "OMP_NUM_THREADS": "1"},
        timeout_s=DEADLINE_S,
    )
    assert says in done.stdout, done.describe_failure()
    assert done.ok == (rung == "scaling")
    if done.ok:
        assert done.stdout.count("\n  128 ") == len(report.CASES)


def test_a_loss_beyond_the_tolerance_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said = io.StringIO()
    monkeypatch.setitem(
        RUNGS, "data", lambda comm, settings: serial(replace(settings, lr=1e-4))
    )
    with contextlib.redirect_stdout(said):
        status = report.main(["data", "--tiles", "40", "--epochs", "2"])
    assert status == 1
    assert "expected at most 1e-10" in said.getvalue()


@pytest.mark.parametrize(
    "wrong", [["--epochs", "0"], ["--tiles", "0"], ["--lr", "0"], ["--factor", "0"]]
)
def test_wrong_numbers_of_the_ladder_are_refused(wrong: list[str]) -> None:
    with (
        contextlib.redirect_stderr(io.StringIO()) as said,
        pytest.raises(SystemExit),
    ):
        report.main(["data", *wrong])
    assert "expected a number" in said.getvalue()
