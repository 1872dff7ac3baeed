# SPDX-License-Identifier: Apache-2.0
"""Draw how a photograph is cut over ranks, and the halo that each rank receives.

    python -m commrt.examples.photo_cuts --grid 2x1 --grid 2x2 --kernel 5 \
        --out docs/figures/photo-cuts.svg

Each grid has a panel. A rank's piece has its own pixels, and around them the rows and
columns that a convolution of ``--kernel`` elements reads from other ranks. Pieces and
halos are those that the layers compute with. Halos are drawn wider than they are.
"""

from __future__ import annotations

import argparse
import base64
import struct
import sys
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from commrt.errors import UsageError
from commrt.examples.photo import load_photo
from commrt.files.write import write_file
from commrt.layers.spatial.windows import Range, Sliding, even_ranges, meet

__all__ = ["Piece", "draw", "main", "pieces"]

STYLE = """<style>
text { font: 12px sans-serif; fill: #222 }
.title { font-size: 15px; font-weight: bold }
.small { font-size: 11px; fill: #666 }
.piece { fill: none; stroke: #222 }
.rows { fill: #c2410c; fill-opacity: 0.65 }
.columns { fill: #2563eb; fill-opacity: 0.65 }
</style>"""
SHOWN = 2
"""Pixels of the photograph for one of the drawing."""
WIDER = 6
"""Times that a halo is drawn wider than it is."""
GAP, EDGE = 58, 16
ABOVE = 70
"""From the top of a panel to its first piece."""
MOST_PLACES = 8


@dataclass(frozen=True)
class Piece:
    """The pixels of one rank: its own rows and columns, and those that it reads."""

    place: tuple[int, int]
    """The rank's place on the grid, from the top and from the left."""
    rows: Range
    columns: Range
    read_rows: Range
    read_columns: Range

    @property
    def halo(self) -> tuple[int, int, int, int]:
        """Rows above and below, and columns left and right, that others have."""
        return (
            self.rows[0] - self.read_rows[0],
            self.read_rows[1] - self.rows[1],
            self.columns[0] - self.read_columns[0],
            self.read_columns[1] - self.columns[1],
        )


def pieces(shape: Sequence[int], grid: tuple[int, int], kernel: int) -> list[Piece]:
    """Return the pieces of a picture on a grid, row by row.

    Args:
        shape: rows and columns of the picture.
        grid: ranks from top to bottom, and from left to right.
        kernel: rows and columns of a convolution that keeps the picture's shape; odd.
    """
    cuts = [
        [(own, _read(own, extent, kernel)) for own in even_ranges(extent, places)]
        for extent, places in zip(shape, grid, strict=True)
    ]
    return [
        Piece((top, left), rows, columns, read_rows, read_columns)
        for top, (rows, read_rows) in enumerate(cuts[0])
        for left, (columns, read_columns) in enumerate(cuts[1])
    ]


def _read(own: Range, extent: int, kernel: int) -> Range:
    """Return the elements of the picture that a piece of the result reads."""
    sliding = Sliding(kernel, low=kernel // 2, high=kernel // 2)
    return meet(sliding.reads(*own), (0, extent))


def draw(photo: Any, grids: Sequence[tuple[int, int]], kernel: int) -> str:
    """Return an SVG with a panel for each grid.

    Raises UsageError for more pieces than a reader could see.
    """
    height, width = photo.shape[:2]
    for grid in grids:
        if max(grid) > MOST_PLACES:
            raise UsageError(
                f"--grid {grid[0]}x{grid[1]}: expected at most {MOST_PLACES} ranks "
                f"along each side"
            )
    panels, below = [], 0.0
    for grid in grids:
        panel = _Panel(pieces((height, width), grid, kernel), grid, below)
        panels += [*panel.drawn()]
        below += panel.height
    across = width / SHOWN + 2 * EDGE + GAP * (max(most for _, most in grids) - 1)
    said = f"Rows and columns of halos are drawn {WIDER} times as wide as they are."
    panels.append(_text(EDGE, below + 4, said, "small"))
    below += EDGE
    image = base64.b64encode(_png(_smaller(photo))).decode()
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{across:.0f}" '
        f'height="{below:.0f}" viewBox="0 0 {across:.0f} {below:.0f}">',
        STYLE,
        '<rect width="100%" height="100%" fill="white"/>',
        f'<defs><image id="photo" width="{width / SHOWN}" height="{height / SHOWN}" '
        f'preserveAspectRatio="none" href="data:image/png;base64,{image}"/></defs>',
        *panels,
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


class _Panel:
    """The pieces of one grid, apart from each other, below a title."""

    def __init__(
        self, found: Sequence[Piece], grid: tuple[int, int], above: float
    ) -> None:
        self._pieces, self._grid, self._above = found, grid, above
        picture = found[-1].rows[1] / SHOWN
        self.height = ABOVE + picture + GAP * (grid[0] - 1) + 24

    def drawn(self) -> Iterator[str]:
        rows, columns = self._grid
        number = rows * columns
        yield _text(
            EDGE,
            self._above + 22,
            f"{number} ranks: rows over {rows}"
            + (f", columns over {columns}" if columns > 1 else ""),
            "title",
        )
        for rank, piece in enumerate(self._pieces):
            yield from self._drawn(rank, piece)

    def _drawn(self, rank: int, piece: Piece) -> Iterator[str]:
        top, left = piece.place
        x = EDGE + GAP * left + piece.columns[0] / SHOWN
        y = self._above + ABOVE + GAP * top + piece.rows[0] / SHOWN
        width = (piece.columns[1] - piece.columns[0]) / SHOWN
        height = (piece.rows[1] - piece.rows[0]) / SHOWN
        name = f"piece-{len(self._pieces)}-{rank}"
        yield (
            f'<clipPath id="{name}"><rect x="{x}" y="{y}" width="{width}" '
            f'height="{height}"/></clipPath>'
        )
        shift = x - piece.columns[0] / SHOWN, y - piece.rows[0] / SHOWN
        yield (
            f'<use href="#photo" x="{shift[0]}" y="{shift[1]}" '
            f'clip-path="url(#{name})"/>'
        )
        yield _rect("piece", x, y, width, height)
        above, under, before, behind = (each * WIDER / SHOWN for each in piece.halo)
        for kind, *box in (
            ("rows", x - before, y - above, width + before + behind, above),
            ("rows", x - before, y + height, width + before + behind, under),
            ("columns", x - before, y, before, height),
            ("columns", x + width, y, behind, height),
        ):
            if min(box[2:]) > 0:
                yield _rect(kind, *box)
        own = f"{piece.rows[1] - piece.rows[0]} x {piece.columns[1] - piece.columns[0]}"
        yield _text(x, y - above - 20, f"rank {rank}: {own}")
        yield _text(x, y - above - 6, _received(piece), "small")


def _received(piece: Piece) -> str:
    """Return the rows and columns that a rank receives, in words."""
    above, under, before, behind = piece.halo
    said = [f"{above + under} rows"] * (above + under > 0)
    said += [f"{before + behind} columns"] * (before + behind > 0)
    return f"receives {', '.join(said) or 'nothing'}"


def _rect(kind: str, x: float, y: float, width: float, height: float) -> str:
    return f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="{height}"/>'


def _text(x: float, y: float, text: str, kind: str = "") -> str:
    of = f' class="{kind}"' if kind else ""
    return f'<text x="{x}" y="{y}"{of}>{text}</text>'


def _smaller(photo: Any) -> Any:
    """Return the picture with the mean of each square of pixels."""
    height, width = (extent // SHOWN * SHOWN for extent in photo.shape[:2])
    cut = photo[:height, :width].astype(int)
    squares = cut.reshape(height // SHOWN, SHOWN, width // SHOWN, SHOWN, 3)
    return (squares.mean((1, 3)).astype(int) & 0xF0).astype("uint8")


def _png(pixels: Any) -> bytes:
    """Return pixels (rows, columns, 3) of bytes as a PNG file."""
    height, width, _ = pixels.shape
    raw = b"".join(b"\0" + row.tobytes() for row in pixels)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = (b"IHDR", header), (b"IDAT", zlib.compress(raw, 9)), (b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data))
        + kind
        + data
        + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in parts
    )


def _grid(text: str) -> tuple[int, int]:
    words = text.split("x")
    if len(words) != 2 or not all(word.isdigit() and int(word) for word in words):
        raise argparse.ArgumentTypeError(
            f"{text}: expected ranks from top to bottom and from left to right, as 2x1"
        )
    return int(words[0]), int(words[1])


def main(argv: Sequence[str] | None = None) -> int:
    """Write the drawing; return 0, or 2 for a wrong call."""
    parser = argparse.ArgumentParser(prog="python -m commrt.examples.photo_cuts")
    parser.add_argument("--grid", type=_grid, action="append", required=True)
    parser.add_argument("--kernel", type=int, default=5, help="rows and columns; odd")
    parser.add_argument("--out", required=True)
    args = parser.parse_args(argv)
    if args.kernel < 1 or args.kernel % 2 == 0:
        parser.error(f"--kernel {args.kernel}: expected an odd number, such as 5")
    try:
        write_file(Path(args.out), draw(load_photo(), args.grid, args.kernel))
    except (UsageError, OSError) as error:
        print(f"photo_cuts: no drawing: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
