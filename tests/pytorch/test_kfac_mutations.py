# SPDX-License-Identifier: Apache-2.0
"""The comparison with K-FAC of one process turns red where there is a mistake."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from kfac_cases import NEAR, distance, ranks_run, serial_run

from commrt.layers.kfac import factors, inverses, optimizer
from commrt.layers.kfac.capture import Capture
from commrt.layers.kfac.factor_sums import Part
from commrt.layers.kfac.gradients import Gradients
from commrt.layers.kfac.layer_rows import ConvolutionRows, LayerRows
from commrt.layers.kfac.placement import Owners, Placement

Patch = Callable[[pytest.MonkeyPatch], None]
SETTINGS: dict[str, Any] = {"inverse_every": 2, "lr": 0.05}
KINDS = ("perceptron", "convolutions", "shared")
OFF = ("off",) * 3


@pytest.fixture(scope="module")
def right() -> dict[str, Any]:
    return {kind: serial_run(kind, 4, 5, **SETTINGS) for kind in KINDS}


def outcome(kind: str, right: dict[str, Any]) -> str:
    """Return what four ranks come to: "right", "off", or the name of an error."""
    try:
        models = ranks_run(kind, 4, 5, gradient_workers=2, **SETTINGS)
    except Exception as error:  # noqa: BLE001  the test compares its name
        return type(error).__name__
    off = max(distance(model, right[kind]) for model in models)
    if off < NEAR:
        return "right"
    return "off" if off > 1e-6 else f"off by {off:.1e}"


def bias_has_no_column(patch: pytest.MonkeyPatch) -> None:
    def zeros(self: LayerRows, rows: Any) -> Any:
        return torch.nn.functional.pad(rows, (0, 1)) if self.has_bias else rows

    patch.setattr(LayerRows, "_with_ones", zeros)


def inputs_are_divided_by_places(patch: pytest.MonkeyPatch) -> None:
    def averaged(before: Any, sums: Any, samples: int, *others: Any) -> Any:
        return real(before, sums, max(1, int(sums.places)), *others)

    real = factors.averaged
    patch.setattr(optimizer, "averaged", averaged)


def gradients_are_those_of_the_mean(patch: pytest.MonkeyPatch) -> None:
    def flat(self: Part, factor: float) -> Any:
        return real(self, 1.0)

    real = Part.flat
    patch.setattr(Part, "flat", flat)


def factors_have_no_memory(patch: pytest.MonkeyPatch) -> None:
    def averaged(before: Any, *others: Any) -> Any:
        return real(None, *others)

    real = factors.averaged
    patch.setattr(optimizer, "averaged", averaged)


def factors_are_of_one_rank(patch: pytest.MonkeyPatch) -> None:
    def flat(self: Part, factor: float) -> Any:
        found = real(self, factor)
        return found if found[-1] % 2 else found * 0

    real = Part.flat
    patch.setattr(Part, "flat", flat)


def nothing_is_damped(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(inverses, "damping_of", lambda pair, damping: (1e-9, 1e-9))


def damping_is_split_evenly(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(inverses, "damping_of", lambda pair, damping: (damping**0.5,) * 2)


def fill_rooms(patch: pytest.MonkeyPatch) -> None:
    """Let no result depend on what memory happens to hold."""
    patch.setattr(torch.Tensor, "new_empty", torch.Tensor.new_ones)
    patch.setattr(torch, "empty_like", torch.ones_like)


def another_rank_is_taken_for_the_owner(patch: pytest.MonkeyPatch) -> None:
    def broadcast(comm: Any, sent: Any) -> None:
        last = comm.size - 1
        real(comm, {last - root: tensors for root, tensors in sent.items()})

    real = inverses.broadcast
    fill_rooms(patch)
    patch.setattr(inverses, "broadcast", broadcast)


def one_group_computes_for_another(patch: pytest.MonkeyPatch) -> None:
    def group_of(self: Placement, layer: int) -> int:
        owners: Owners = self.owners[layer]
        return 1 - owners.inputs // self.gradient_workers if layer == 0 else 0

    fill_rooms(patch)
    patch.setattr(Placement, "group_of", group_of)


def inverses_are_never_renewed(patch: pytest.MonkeyPatch) -> None:
    def refresh(self: Any, tasks: Any) -> None:
        real(self, {at: task for at, task in tasks.items() if at not in self.held})

    real = inverses.Inverses.refresh
    patch.setattr(inverses.Inverses, "refresh", refresh)


def ranks_weigh_the_same(patch: pytest.MonkeyPatch) -> None:
    def finish(self: Any, own: int, samples: int, scale: float) -> None:
        real(self, int(own > 0), 3, scale)

    real = Gradients.finish
    patch.setattr(Gradients, "finish", finish)


def samples_are_of_one_rank(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Capture, "samples", property(lambda self: 3))


def windows_ignore_the_mode_of_padding(patch: pytest.MonkeyPatch) -> None:
    def init(self: Any, *args: Any) -> None:
        real(self, *args)
        self._mode = "constant"

    real = ConvolutionRows.__init__
    patch.setattr(ConvolutionRows, "__init__", init)


def steps_are_never_clipped(patch: pytest.MonkeyPatch) -> None:
    def take(self: Any, settings: Any, *others: Any) -> None:
        real(self, settings._replace(kl_clip=None), *others)

    real = optimizer.KFAC._take
    patch.setattr(optimizer.KFAC, "_take", take)


def test_kfac_is_green_without_a_mistake(right: dict[str, Any]) -> None:
    assert [outcome(kind, right) for kind in KINDS] == ["right"] * 3


@pytest.mark.parametrize(
    ("mistake", "expected"),
    [
        (bias_has_no_column, OFF),
        (inputs_are_divided_by_places, ("right", "off", "off")),
        (gradients_are_those_of_the_mean, OFF),
        (factors_have_no_memory, OFF),
        (factors_are_of_one_rank, OFF),
        (nothing_is_damped, OFF),
        (damping_is_split_evenly, OFF),
        (another_rank_is_taken_for_the_owner, OFF),
        (one_group_computes_for_another, OFF),
        (inverses_are_never_renewed, OFF),
        (ranks_weigh_the_same, OFF),
        (samples_are_of_one_rank, OFF),
        (windows_ignore_the_mode_of_padding, ("right", "off", "right")),
        (steps_are_never_clipped, OFF),
    ],
)
def test_mistakes_of_kfac_turn_the_comparison_red(
    mistake: Patch,
    expected: tuple[str, ...],
    right: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ranks end with other parameters, or find out themselves."""
    mistake(monkeypatch)
    assert tuple(outcome(kind, right) for kind in KINDS) == expected
