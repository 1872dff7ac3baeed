# SPDX-License-Identifier: Apache-2.0
"""Tables and costs as files: what is written is read, and what is wrong is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commrt.errors import UsageError
from commrt.oracle import Layer, LayerTable
from commrt.oracle.costs import MeasuredCosts
from commrt.oracle.files import load_costs, load_table, save_costs, save_table
from commrt.oracle.layer_table import CUTS, Piece

NUMBERS = st.floats(0, 1e12)
PIECES = st.dictionaries(
    st.tuples(st.sampled_from(CUTS), st.integers(1, 8)),
    st.builds(Piece, NUMBERS, NUMBERS),
    max_size=2,
)
NAMES = st.text(st.characters(codec="utf-8"), min_size=1, max_size=9)
LAYERS = st.builds(
    Layer,
    NAMES,
    NUMBERS,
    NUMBERS,
    weight_elements=NUMBERS,
    forward_s=NUMBERS,
    is_product=st.booleans(),
    channels=st.integers(0, 1 << 40),
    extent=st.just((8, 4)),
    halo_rows=st.sampled_from([(), (1.0, 0.5)]),
    experts=st.integers(0, 64),
    pieces=PIECES,
)


@given(st.lists(LAYERS, min_size=1, max_size=3), NAMES)
def test_a_table_that_is_written_is_read(
    tmp_path_factory: pytest.TempPathFactory, layers: list[Layer], name: str
) -> None:
    path = tmp_path_factory.mktemp("tables") / "table.yaml"
    table = LayerTable(name, tuple(layers), "of a test")
    save_table(table, path)
    assert load_table(path) == table


def test_costs_that_are_written_are_read(tmp_path: Path) -> None:
    points = {
        ("allreduce", 4, 1): ((0, 1e-6), (1 << 20, 0.25)),
        ("message", 2, 2): ((8, 3e-7),),
    }
    costs = MeasuredCosts(points, "measured by nobody: a 'test'")
    save_costs(costs, tmp_path / "costs.yaml")
    assert load_costs(tmp_path / "costs.yaml") == costs


GOOD = "layers:\n  - {name: a, input_elements: 1, output_elements: 2}\n"


def test_a_table_by_hand_needs_little(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(GOOD)
    assert load_table(path) == LayerTable("mine", (Layer("a", 1, 2),))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "file is empty; expected a name and layers"),
        ("layers: []\n", "the table has no layers"),
        ("layers: 3\n", "line 1, layers: expected a list"),
        ("name: a\n", "line 1: layers is missing"),
        ("layer: []\n", "unknown key 'layer'"),
        ("layers:\n  - {name: a, input_elements: 1}\n", "output_elements is missing"),
        (GOOD.replace("2}", "2, weights: 1}"), "unknown key 'weights'"),
        (GOOD.replace("2}", "x}"), r"layers\[0\].output_elements: 'x' is no number"),
        (GOOD.replace("2}", "nan}"), "output_elements is nan"),
        (GOOD.replace("2}", "-.5}"), "output_elements is -0.5"),
        (GOOD.replace("2}", "2, channels: 1.5}"), "'1.5' is no whole number"),
        (GOOD.replace("2}", "2, extent: 7}"), "extent: expected a list"),
        (GOOD.replace("2}", "2, is_product: 1}"), "expected true or false"),
        (GOOD.replace("2}", "2, pieces: [{cut: filter}]}"), "ways is missing"),
        (
            GOOD.replace(
                "2}", "2, pieces: [{cut: x, ways: 2, sample_s: 1, call_s: 1}]}"
            ),
            "expected one of filter, channel, space",
        ),
        (
            GOOD.replace(
                "2}", "2, pieces: [{cut: space, ways: 2, sample_s: -1, call_s: 1}]}"
            ),
            "times must be finite",
        ),
        ("layers: &a [*a]\n", r"aliases \(\*\) are not allowed"),
        ("layers: !!python/object:os.system []\n", "tags are not allowed"),
        (GOOD.replace("1,", "!!int 1,"), ""),
        ("a: " + "[" * 40 + "]" * 40, "deeper ones, than any such file needs"),
        ("\x00", "not YAML"),
    ],
)
def test_a_wrong_table_is_refused_with_the_place(
    tmp_path: Path, text: str, problem: str
) -> None:
    path = tmp_path / "table.yaml"
    path.write_text(text)
    if not problem:
        assert load_table(path).layers[0].input_elements == 1
        return
    with pytest.raises(UsageError, match=problem) as caught:
        load_table(path)
    assert "table.yaml" in str(caught.value)


COSTS = "times:\n  - {coll: allreduce, ranks: 2, points: [[8, 1.0e-6]]}\n"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("times: []\n", "no measured times"),
        (COSTS.replace("allreduce", "sum"), "'sum' is no operation"),
        (COSTS.replace("[[8, 1.0e-6]]", "[[8]]"), "1 numbers; expected bytes and"),
        (COSTS.replace("1.0e-6", "0"), "ascending bytes with seconds above 0"),
        (COSTS.replace("[8,", "[8.5,"), "'8.5' is no whole number"),
        (COSTS + COSTS.split("\n")[1] + "\n", "have times already"),
    ],
)
def test_wrong_costs_are_refused_with_the_place(
    tmp_path: Path, text: str, problem: str
) -> None:
    path = tmp_path / "costs.yaml"
    path.write_text(text)
    with pytest.raises(UsageError, match=problem) as caught:
        load_costs(path)
    assert "costs.yaml" in str(caught.value)


def test_a_folder_or_a_missing_file_is_no_table(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not a regular file"):
        load_table(tmp_path)
    with pytest.raises(UsageError, match="cannot open the file of costs"):
        load_costs(tmp_path / "none.yaml")
