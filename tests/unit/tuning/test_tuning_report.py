# SPDX-License-Identifier: Apache-2.0
"""The report: one file that needs nothing else, and says what was measured."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from functools import cache
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest
from tuning_recordings import NATIVE, NEAR, RING, TRUTH, record

from commrt.errors import TableError
from commrt.select.facts import Candidate
from commrt.select.fingerprint import Cpu, Machine
from commrt.select.rules import Evidence, Match, Point, Rule
from commrt.select.table import Table
from commrt.tuning.cli import main
from commrt.tuning.decide import decide
from commrt.tuning.recording_reader import load_recording
from commrt.tuning.report import report
from commrt.tuning.report_cells import cells_of
from commrt.tuning.report_figures import human_mbps, human_us, looks_of
from commrt.tuning.samples import Recording
from commrt.tuning.svg_chart import Line, Look, Span, chart
from commrt.tuning.table_writer import make_table

ROOT = Path(__file__).parents[3]
MACHINE = Machine(Cpu("Some <CPU> & Co", 2, 64))
VOID = {"meta", "br", "link", "img"}


def table_for(recording: Recording) -> Table:
    return make_table(
        decide(recording, 0.05),
        MACHINE,
        software=recording.software,
        method={},
        tie_margin=0.05,
        date="2026-11-22",
    )


@cache
def real_recording() -> Recording:
    return load_recording(ROOT / "docs" / "data" / "tuning-1.json.gz")


@cache
def real_page() -> str:
    return report(table_for(real_recording()), real_recording(), "tuning-1")


class Nesting(HTMLParser):
    """Checks that every tag that opens closes, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: set[str] = set()
        self.targets: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        if named.get("id"):
            assert named["id"] not in self.ids
            self.ids.add(str(named["id"]))
        if named.get("href"):
            self.targets.add(str(named["href"]))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_well_formed_and_needs_nothing_else() -> None:
    page = real_page()
    parser = Nesting()
    parser.feed(page)
    assert parser.open == []
    assert parser.targets
    assert parser.targets <= {f"#{name}" for name in parser.ids}
    for word in ("http:", "https:", "<script", "src=", "@import", "url("):
        assert word not in page
    for picture in re.findall(r"<svg.*?</svg>", page, re.S):
        ElementTree.fromstring(picture)
    assert "prefers-color-scheme:dark" in page
    assert "nan" not in re.findall(r'[xyd]="([^"]*)"', page)


def test_every_cell_of_a_real_recording_is_shown_with_its_choices() -> None:
    page = real_page()
    for op in ("allreduce", "bcast", "allgather", "reduce_scatter", "alltoall"):
        assert page.count(f"<h3>{op}</h3>") == 3
    for words in (
        "2 ranks, near links",
        "2 ranks, far links",
        "4 ranks, oversubscribed links",
        "20 launches to decide from, 2 to judge",
        "not seen: network",
        "which the model decides: reduce, gather, scatter, barrier",
        "Some &lt;CPU&gt; &amp; Co",
    ):
        assert words in page
    assert "<CPU>" not in page


def test_the_regret_is_that_of_held_out_launches() -> None:
    """A table that picks the slowest everywhere is found out."""
    recording = record(seed=4)
    good = table_for(recording)
    (cell,) = cells_of(good, recording)
    assert len(cell.judged) > 5
    assert all(1 <= one.ratio < 1.2 for one in cell.judged)
    bad = Table(MACHINE, (Rule("allreduce", Match(0, None), NATIVE),))
    (judged,) = cells_of(bad, recording)
    assert max(one.ratio for one in judged.judged) > 2
    assert {one.choice for one in judged.judged} == {NATIVE}
    unknown = Table(MACHINE, (Rule("allreduce", Match(0, None), Candidate("a", "b")),))
    (blind,) = cells_of(unknown, recording)
    assert (len(blind.judged), blind.unjudged) == (0, len(cell.judged))
    assert "the choice was not measured" not in report(unknown, recording, "")


def test_ties_are_those_that_the_decision_saw() -> None:
    twin = Candidate("shm", "twin")
    recording = record(seed=2, truth={**TRUTH, twin: TRUTH[RING]})
    (cell,) = cells_of(table_for(recording), recording)
    largest = cell.sizes[-1]
    assert {RING, twin} <= cell.tied[largest]
    assert NATIVE not in cell.tied[largest]
    assert "as good: shm/twin" in report(table_for(recording), recording, "")


def test_a_table_alone_shows_its_evidence_and_says_what_is_missing() -> None:
    recording = record(seed=4)
    table = table_for(recording)
    (cell,) = cells_of(table, None)
    assert {rule.use for rule in cell.rules} <= set(cell.times)
    assert len(cell.times[NATIVE]) == len(cell.sizes)
    page = report(table, None, "t.yaml")
    assert "need the recording" in page
    assert "Not known: no held-out launch is recorded" in page


def test_a_cell_that_only_the_table_has_follows_the_recorded_ones() -> None:
    recording = record(seed=4)
    table = table_for(recording)
    more = Rule("bcast", Match(0, None, ranks=2), RING)
    both = Table(MACHINE, (*table.rules, more))
    ops = [cell.op for cell in cells_of(both, recording)]
    assert sorted(ops) == ["allreduce", "bcast"]
    assert "No times are recorded" in report(both, recording, "")


def test_times_and_sizes_of_0_are_no_reason_to_fail() -> None:
    points = [Point(n, us, (0.0, us), 1, 1, us) for n, us in ((0, 1.0), (8, 0.0))]
    for given in (points, [*points, Point(64, 2.0, (0.0, 2.0), 1, 1)], []):
        evidence = Evidence("only", tuple(given))
        odd = Table(MACHINE, (Rule("bcast", Match(0, None), RING, evidence),))
        assert "<h3>bcast</h3>" in report(odd, None, "")
    assert "<h3>bcast</h3>" not in report(Table(MACHINE, ()), None, "")


def test_names_from_a_recording_cannot_become_markup() -> None:
    sly = Candidate("shm", "ring", {"x": "<script>alert(1)</script>"})
    recording = record(seed=4, truth={NATIVE: TRUTH[NATIVE], sly: lambda n: 1e-3 * n})
    page = report(table_for(recording), recording, "<script>")
    assert "<script" not in page
    assert "&lt;script" in page


def test_unknown_links_are_a_typed_error() -> None:
    strange = replace(NEAR, link_class="telepathic")  # type: ignore[arg-type]
    recording = record(seed=4, facts=strange)
    with pytest.raises(TableError, match="'telepathic'"):
        report(Table(MACHINE, ()), recording, "")


def test_no_two_candidates_look_alike() -> None:
    looks = looks_of(cells_of(table_for(real_recording()), real_recording()))
    assert len(looks) >= 8
    assert len(set(looks.values())) == len(looks)


def test_labels_of_close_crossovers_lie_in_rows_of_their_own() -> None:
    line = Line("a/b", Look(0, 0), [(8, 1.0, (0.9, 1.1)), (1 << 25, 9.0, None)])
    starts = [0, 1000, 1100, 1200, 1 << 20]
    spans = [
        Span(lo, hi, "a/b", Look(0, 0))
        for lo, hi in zip(starts, [*starts[1:], None], strict=True)
    ]
    picture = chart("t", [line], spans, human_us)
    found = re.findall(
        r'middle" x="([\d.]+)" y="([\d.]+)">(1000|1.07K|1.17K|1M)<', picture
    )
    places = [(float(x), float(y)) for x, y, _ in found if float(y) > 300]
    assert len(places) == 4
    rows: dict[float, list[float]] = {}
    for x, y in places:
        rows.setdefault(y, []).append(x)
    assert len(rows) == 3
    for row in rows.values():
        assert all(b - a >= 40 for a, b in pairwise(row))


def test_a_line_is_broken_where_a_size_was_not_measured() -> None:
    whole = Line("a/b", Look(0, 0), [(8, 1.0, None), (16, 2.0, None), (32, 4.0, None)])
    holes = Line("c/d", Look(1, 0), [(8, 1.0, None), (32, 4.0, None)])
    picture = chart("t", [whole, holes], [], human_us)
    paths = dict(re.findall(r'class="l (c\d) d0" d="([^"]+)"', picture))
    assert paths["c0"].count("L") == 2
    assert paths["c1"].count("L") == 0
    assert paths["c1"].count("M") == 2


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.1225, "122 ns"),
        (0.9999, "1 µs"),
        (999.9, "1 ms"),
        (2e6, "2 s"),
        (0.5, "500 ns"),
    ],
)
def test_times_for_people(value: float, text: str) -> None:
    assert human_us(value).replace("\N{NO-BREAK SPACE}", " ") == text


@pytest.mark.parametrize(
    ("value", "text"), [(0.5, "500 kB/s"), (12.0, "12 MB/s"), (25_600.0, "25.6 GB/s")]
)
def test_bandwidths_for_people(value: float, text: str) -> None:
    assert human_mbps(value).replace("\N{NO-BREAK SPACE}", " ") == text


def test_the_command_writes_the_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    raw, out = tmp_path / "raw.json.gz", tmp_path / "page.html"
    recording = record(seed=4)
    recording.machine = MACHINE
    recording.save(raw)
    assert main(["report", "--raw", str(raw), "--out", str(out)]) == 0
    assert str(out) in capsys.readouterr().out
    assert "Some &lt;CPU&gt;" in out.read_text()
    page = out.read_text()
    assert main(["report", str(raw), "--out", str(out)]) == 0
    assert out.read_text() == page
    assert main(["report", str(tmp_path / "none.yaml"), "--out", str(out)]) == 1
    assert "none.yaml" in capsys.readouterr().err
    blocked = tmp_path / "raw.json.gz" / "page.html"
    assert main(["report", "--raw", str(raw), "--out", str(blocked)]) == 1
    assert "cannot write" in capsys.readouterr().err
