# SPDX-License-Identifier: Apache-2.0
"""The photograph is what it is said to be, and its drawing shows pieces and halos."""

from __future__ import annotations

import base64
import re
import zlib
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from commrt.examples.photo import load_photo
from commrt.examples.photo_cuts import draw, main, pieces

FIGURE = Path(__file__).parents[3] / "docs/figures/photo-cuts.svg"
OPTIONS = ["--grid", "2x1", "--grid", "2x2", "--kernel", "5"]
SVG = "{http://www.w3.org/2000/svg}"
DATA = re.compile(r"base64,([^\"]+)\"")


def test_the_photo_has_odd_and_even_sides() -> None:
    photo = load_photo()
    assert photo.shape == (427, 640, 3)
    assert photo.dtype == np.uint8
    assert len(np.unique(photo)) == 32


@pytest.mark.parametrize("grid", [(1, 1), (2, 1), (2, 2), (3, 5)])
def test_pieces_cover_the_photo_and_read_half_a_kernel_around(
    grid: tuple[int, int],
) -> None:
    found = pieces((427, 640), grid, 7)
    seen = np.zeros((427, 640), int)
    for piece in found:
        seen[slice(*piece.rows), slice(*piece.columns)] += 1
        top, left = piece.place
        expected = (top > 0, top < grid[0] - 1, left > 0, left < grid[1] - 1)
        assert piece.halo == tuple(3 * there for there in expected)
    assert (seen == 1).all()


def pixels_of(picture: str) -> Any:
    """Return the bytes of the photograph inside of a drawing."""
    found = DATA.search(picture)
    assert found is not None
    file = base64.b64decode(found[1])
    at = file.index(b"IDAT")
    length = int.from_bytes(file[at - 4 : at], "big")
    return zlib.decompress(file[at + 4 : at + 4 + length])


def test_the_drawing_of_the_documents_is_what_the_command_makes(tmp_path: Path) -> None:
    out = tmp_path / "cuts.svg"
    assert main([*OPTIONS, "--out", str(out)]) == 0
    made, kept = out.read_text(), FIGURE.read_text()
    renew = f"renew it: python -m commrt.examples.photo_cuts {' '.join(OPTIONS)}"
    # Versions of zlib compress the same pixels to different bytes.
    assert DATA.sub("", made) == DATA.sub("", kept), renew
    assert pixels_of(made) == pixels_of(kept), renew


def test_a_drawing_has_a_piece_for_each_rank() -> None:
    picture = ElementTree.fromstring(draw(load_photo(), [(2, 1), (3, 2)], 3))
    kinds = [node.get("class") for node in picture.iter(f"{SVG}rect")]
    assert kinds.count("piece") == 8
    assert kinds.count("rows") == 2 + 2 * 4
    assert kinds.count("columns") == 6
    assert len([*picture.iter(f"{SVG}image")]) == 1


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--grid", "2"], "expected ranks from top to bottom"),
        (["--grid", "0x2"], "expected ranks from top to bottom"),
        (["--grid", "2x2", "--kernel", "4"], "expected an odd number"),
    ],
)
def test_calls_of_the_drawing_that_are_wrong(
    options: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match=r"^2$"):
        main([*options, "--out", "nothing.svg"])
    assert says in capsys.readouterr().err


def test_more_pieces_than_can_be_seen(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--grid", "100x1", "--out", "nothing.svg"]) == 2
    assert "expected at most 8 ranks" in capsys.readouterr().err
