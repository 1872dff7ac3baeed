# SPDX-License-Identifier: Apache-2.0
"""Tables of layers from torch modules: sizes, times, pieces, and what is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cnn_networks import ResNet50
from torch import nn

from commrt.__main__ import main
from commrt.errors import UsageError
from commrt.examples.gpt import LENGTH, made
from commrt.local import run
from commrt.oracle import AlphaBeta, LayerTable, Oracle
from commrt.oracle.clocks import Stopwatch
from commrt.oracle.files import load_table
from commrt.oracle.torch_layers import REST, layer_sizes, profile


def small() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 4, 3, stride=2, padding=1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 5),
    )


def pictures(samples: int) -> Any:
    return torch.randn(samples, 3, 16, 12, generator=torch.Generator().manual_seed(2))


def test_resnet_50_has_its_published_sizes() -> None:
    with torch.device("meta"):
        model, example = ResNet50(), torch.empty(2, 3, 224, 224)
        table = layer_sizes(model, example)
    assert table.weight_elements == 25_557_032
    products = [layer for layer in table if layer.is_product]
    assert len(products) == 54
    # He et al.'s 3.8e9 multiplications are those before the stride moved to 3 x 3.
    assert 8.0e9 < sum(layer.flops for layer in products) < 8.4e9
    first = table.layers[0]
    assert (first.channels, first.filters, first.extent) == (3, 64, (224, 224))
    assert first.halo_rows == (2.5, 2.5)
    assert (first.input_elements, first.output_elements) == (3 * 224**2, 64 * 112**2)
    # The formula of ParaDL with the weights of this network, of 90,936,064 bytes there.
    got = Oracle(table, AlphaBeta(30.31e-6, 8e-11), 1_280_000).project(
        "data", 32, batch=2048
    )
    expected = 2 * 625 * 31 * (30.31e-6 + 4 * 25_557_032 * 8e-11 / 32)
    assert got.communication_s == pytest.approx(expected)


def test_sizes_of_a_small_network_by_hand() -> None:
    table = layer_sizes(small(), pictures(2))
    rows = [
        (layer.input_elements, layer.output_elements, layer.weight_elements)
        for layer in table
    ]
    assert rows == [
        (576, 1536, 8 * 3 * 9 + 8),
        (1536, 1536, 16),
        (1536, 1536, 0),
        (1536, 384, 0),
        (384, 48, 4 * 8 * 9 + 4),
        (48, 4, 0),
        (4, 4, 0),
        (4, 5, 25),
    ]
    assert [layer.is_product for layer in table] == [
        *(True, False, False, False, True, False, False, True)
    ]
    assert table.layers[1].statistic_elements == 18
    assert [layer.extent for layer in table][-2:] == [(), ()]
    assert table.layers[3].halo_rows == (0.0, 0.0)


def test_a_transformer_has_all_of_its_parameters() -> None:
    model = made()
    tokens = torch.zeros(2, LENGTH + 1, dtype=torch.int64)
    table = layer_sizes(model, tokens)
    count = sum(each.numel() for each in model.parameters())
    assert table.weight_elements == count
    assert not any(layer.extent for layer in table), "a sequence is no picture"


class Odd(nn.Module):  # type: ignore[misc]
    """A module that is called twice, and a parameter of no leaf."""

    def __init__(self) -> None:
        super().__init__()
        self.twice = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(3))
        self.attention = nn.MultiheadAttention(4, 1, batch_first=True)

    def forward(self, x: Any, y: Any) -> Any:
        """Return something of all."""
        x = self.twice(self.twice(x)) * self.scale.sum()
        return self.attention(query=x, key=y, value=y)[0]


def test_weights_count_once_and_none_is_left_out() -> None:
    x = torch.randn(2, 5, 4)
    table = layer_sizes(Odd(), (x, x))
    assert [layer.name for layer in table] == [
        *("twice", "twice", "attention", "parameters of no leaf")
    ]
    assert [layer.weight_elements for layer in table] == [20, 0, 80, 3]


def test_a_module_of_experts_is_one_layer() -> None:
    model = nn.Sequential(
        nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
    )
    table = layer_sizes(model, torch.randn(2, 4), experts={"1": 2})
    assert [(layer.name, layer.experts) for layer in table] == [("0", 0), ("1", 2)]
    assert table.layers[1].weight_elements == 40 + 36


# -- times -----------------------------------------------------------------------------


@pytest.fixture
def known_times(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let each measurement say how many it is, in seconds; calls run once."""
    count: list[int] = []

    def mean_s(self: Stopwatch, call: Callable[[], object]) -> float:
        call()
        count.append(1)
        return float(len(count))

    monkeypatch.setattr(Stopwatch, "mean_s", mean_s)
    return count


def test_times_of_layers_sum_to_those_of_the_model(known_times: list[int]) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    table = profile(model, torch.randn(8, 4), part=8 // 4, rounds=1)
    # For each number of samples: two of each layer, two of the model, one update.
    assert len(known_times) == 14
    assert [layer.name for layer in table] == ["0", "1", REST]
    # For 8 samples the layers' forward passes took 8 and 10, and the model's took 12.
    whole = sum(8 * layer.forward_s + layer.forward_call_s for layer in table)
    assert whole == pytest.approx(12)
    assert sum(layer.update_s for layer in table) == pytest.approx(14)


def test_a_model_is_not_changed_by_a_profile() -> None:
    model = small()
    before = copy.deepcopy(model.state_dict())
    profile(model, pictures(4), window_s=1e-4, rounds=1)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)
    assert all(each.grad is None for each in model.parameters())
    assert model[2].inplace
    assert model.training


def test_pieces_of_products_are_timed(known_times: list[int]) -> None:
    table = profile(small(), pictures(4), pieces=[2], rounds=1)
    by_name = {layer.name: {*layer.pieces} for layer in table}
    both = {("filter", 2), ("channel", 2)}
    assert by_name["0"] == both | {("space", 2)}
    assert by_name["4"] == both | {("space", 2)}
    assert by_name["7"] == both
    assert by_name["1"] == by_name[REST] == set()


def test_pieces_compute_what_their_rank_would() -> None:
    """The seconds are of the right work: as many outputs as a piece has."""
    shapes: list[tuple[int, ...]] = []

    class Seen(nn.Conv2d):  # type: ignore[misc]
        def forward(self, x: Any) -> Any:
            y = super().forward(x)
            shapes.append((x.shape[1], x.shape[2], y.shape[1], y.shape[2]))
            return y

    model = nn.Sequential(Seen(4, 8, 3, padding=1))
    profile(model, torch.randn(2, 4, 8, 6), part=1, pieces=[2], window_s=1e-5, rounds=1)
    assert {*shapes} == {
        (4, 8, 8, 8),
        (4, 8, 4, 8),  # half of the filters
        (2, 8, 8, 8),  # half of the channels
        (4, 6, 8, 4),  # half of the rows, and one beyond each end
    }


def test_ranks_profile_at_one_time() -> None:
    def main(comm: Any) -> LayerTable:
        return profile(small(), pictures(4), comm=comm, window_s=1e-4, rounds=1)

    first, second = run(2, main)
    assert first == second
    assert "2 ranks at one time" in first.times
    assert all(layer.sample_s + layer.call_s >= 0 for layer in first)
    assert first.sample_s + first.call_s > 0


@pytest.mark.parametrize(
    ("example", "more", "problem"),
    [
        ((), {}, "the example has no samples"),
        (torch.tensor(1.0), {}, "the example has no samples"),
        (pictures(0), {}, "the example has no samples"),
        (pictures(4), {"part": 4}, "part is 4; expected fewer samples"),
        (pictures(4), {"part": 0}, "part is 0"),
        (pictures(4), {"experts": {"9": 2}}, "no module '9'"),
    ],
)
def test_examples_without_sense_are_refused(
    example: Any, more: dict[str, Any], problem: str
) -> None:
    with pytest.raises(UsageError, match=problem):
        profile(small(), example, **more)


MAKER = """
import torch

def made():
    return torch.nn.Sequential(torch.nn.Linear(4, 2)), torch.ones(3, 4)
"""


@pytest.mark.parametrize("more", [[], ["--sizes-only"], ["--pieces", "2"]])
def test_the_command_writes_a_table(
    more: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "net.py").write_text(MAKER)
    out = tmp_path / "table.yaml"
    maker = f"{tmp_path}/net.py:made"
    assert main(["oracle", "profile", maker, "--out", str(out), *more]) == 0
    assert "written" in capsys.readouterr().out
    table = load_table(out)
    assert table.weight_elements == 10
    assert (table.sample_s + table.call_s > 0) == ("--sizes-only" not in more)
    assert bool(table.layers[0].pieces) == ("--pieces" in more)
