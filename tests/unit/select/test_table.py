# SPDX-License-Identifier: Apache-2.0
"""Tables: what is read, what is refused and where, what is written."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commrt.errors import TableError, UsageError
from commrt.select import schema
from commrt.select.facts import LINK_CLASSES, Candidate
from commrt.select.fingerprint import Cpu, Gpu, Machine, Nic
from commrt.select.locate import LocatedTable, locate, user_table_path
from commrt.select.network import Network
from commrt.select.rules import VERDICTS, Evidence, Match, Point, Rule, RunnerUp
from commrt.select.schema import Catalog
from commrt.select.table import Table, load, load_file
from commrt.select.write import dump
from commrt.vocabulary.operations import COLLECTIVES

KNOWN = Catalog({"mpi": ("native", "ring"), "shm": ("direct", "ring")})
MACHINE = Machine(Cpu("AMD EPYC", 1, 2), kernel="6.1", host="vm")
HEAD = f"""\
schema: commrt-tune/1
machine:
  fingerprint: {MACHINE.fingerprint}
  cpu: {{model: AMD EPYC, sockets: 1, cores: 2}}
"""
GOOD = f"""\
{HEAD}rules:
- op: allreduce
  match: {{ranks: 2, bytes: [0, 4096]}}
  use: {{backend: mpi, alg: native}}
- op: allreduce
  match: {{ranks: 2, bytes: [4096, null]}}
  use: {{backend: shm, alg: ring, params: {{chunk: 131072, store: on}}}}
"""


def _load(text: str) -> Table:
    return load(text, "t.yaml", KNOWN)


def test_a_good_table_is_read() -> None:
    table = _load(GOOD)
    assert [rule.match.lo for rule in table.rules] == [0, 4096]
    assert str(table.rules[1].use) == "shm/ring{chunk=131072,store=on}"
    assert table.tie_margin == schema.DEFAULT_TIE_MARGIN


def test_a_table_says_which_engines_were_tested_together() -> None:
    plain = _load(GOOD)
    assert plain.tested_together == ()
    assert "tested_together" not in plain.plain()["defaults"]
    told = f"defaults: {{tested_together: [[nccl, mpi]]}}\n{GOOD}"
    table = _load(told)
    assert table.tested_together == (("mpi", "nccl"),)
    assert table.digest != plain.digest
    assert _load(dump(table)) == table
    with pytest.raises(TableError, match=r"tested_together\[0\]: these are not kept"):
        _load(told.replace("[nccl, mpi]", "[nccl, staged]"))


NO_RATE = "{library: none, gbps: 0, latency_us: 1}"


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("/1", "/2", r"line 1, \$\.schema: expected schema 'commrt-tune/1'"),
        ("bytes: [0, 4096]", "bytes: [0, 9]", r"line 10, \$\.rules\[1\]\.match\.bytes"),
        ("bytes: [0, 4096]", "bytes: [0, 9]", r"covers \[9, 4096\)"),
        ("bytes: [0, 4096]", "bytes: [0, 5000]", "4096 overlaps"),
        ("bytes: [0, 4096]", "bytes: [0, null]", "4096 overlaps"),
        ("bytes: [0, 4096]", "bytes: [1, 4096]", r"covers \[0, 1\)"),
        ("4096, null", "4096, 9000", r"covers \[9000, null\)"),
        ("bytes: [0, 4096]", "bytes: [0, 0]", "0 is too small"),
        ("bytes: [0, 4096]", "bytes: [7, 7]", r"range \[7, 7\) is empty"),
        ("bytes: [0, 4096]", "bytes: [0]", r"expected \[first, beyond\]"),
        ("bytes: [0, 4096]", "bytes: 7", "expected a list, found 7"),
        ("bytes: [0, 4096]", "bytes: [-1, 4096]", "-1 is too small"),
        ("bytes: [0, 4096]", "bytes: [0.0, 4096]", "expected a whole number"),
        ("bytes: [0, 4096]", "bytes: [false, 4096]", "found False"),
        ("bytes: [0, 4096]", f"bytes: [0, {2**63}]", "63 bits"),
        ("bytes: [0, 4096]", f"bytes: [0, {'9' * 5000}]", "63 bits"),
        ("bytes: [0, 4096]", "bytes: [.nan, 4096]", "not a finite number"),
        ("bytes: [0, 4096]", "bytes: [0, .inf]", "not a finite number"),
        ("bytes: [0, 4096]", "bytes: [0, 1e999]", "not a finite number"),
        ("ranks: 2, bytes: [0", "inplace: 1, bytes: [0", "unknown key 'inplace'"),
        ("ranks: 2, bytes: [0", "rank: 1, bytes: [0", "did you mean 'ranks'"),
        ("ranks: 2, bytes: [0", "ranks: x, bytes: [0", r"\.ranks: expected a whole"),
        ("ranks: 2, bytes: [0", "dtype: float31, bytes: [0", "did you mean 'float32'"),
        ("ranks: 2, bytes: [0", "link_class: nea, bytes: [0", "did you mean 'near'"),
        ("ranks: 2, bytes: [0", "ranks: 2, ranks: 2, bytes: [0", "given twice"),
        ("ranks: 2, bytes: [0", "? [a] : 2, bytes: [0", "keys are names"),
        ("ranks: 2, bytes: [0", "? {a: b} : 2, bytes: [0", "keys are names"),
        ("ranks: 2, bytes: [0", "network: 1, bytes: [0", "expected a mapping"),
        ("ranks: 2, bytes: [0", f"network: {NO_RATE}, bytes: [0", "0 must be above 0"),
        (
            "ranks: 2, bytes: [0",
            "network: {gbps: 1}, bytes: [0",
            "'library' is missing",
        ),
        ("op: allreduce", "op: alreduce", "did you mean 'allreduce'"),
        ("backend: mpi", "backend: mpx", "unknown backend 'mpx'; did you mean 'mpi'"),
        ("alg: native", "alg: nativ", "unknown mpi allreduce algorithm 'nativ'"),
        ("chunk: 131072", "chunk: true", "expected an integer or a word, found True"),
        ("chunk: 131072", "chunk: 1.5", "expected an integer or a word"),
        ("store: on", "store: 'a,b=c'", "not a word of a parameter"),
        ("cores: 2", "cores: 4", "not the fingerprint of the machine"),
        ("model: AMD EPYC", "model: &a AMD EPYC", "anchors"),
        ("model: AMD EPYC", "model: !!str AMD EPYC", "tags are not allowed"),
        ("model: AMD EPYC", "model: !!python/object:os.system AMD", "tags are not"),
        ("model: AMD EPYC", "<<: {a: b}, model: AMD EPYC", "merge keys"),
        ("schema:", "{", "not YAML"),
        ("rules:", "rulez:", "unknown key 'rulez'; did you mean 'rules'"),
        (
            "  use: {backend: mpi, alg: native}\n",
            "",
            r"rules\[0\]: key 'use' is missing",
        ),
    ],
)
def test_what_is_wrong_is_named_with_its_place(old: str, new: str, words: str) -> None:
    assert old in GOOD
    with pytest.raises(TableError, match=words) as raised:
        _load(GOOD.replace(old, new, 1))
    assert "t.yaml" in str(raised.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "empty"),
        ("- 1\n", "expected a mapping, found a list"),
        ("a", "expected a mapping, found 'a'"),
        (GOOD + "---\n" + GOOD, "second document"),
        (GOOD[:-20], "not YAML|covers"),
        ("[" * 100_000, "nested"),
        ("{a: " * 100_000, "nested"),
        ("- " * 100_000, "nested"),
        ("? " * 100_000, "keys are names"),
        ("x: " + "y" * 10_000_000, "larger than any selection table"),
        ("a: \x00", "not YAML"),
        ("a: \ud800", "not Unicode"),
        ("&a [*a, *a]", "anchors"),
        ("a: &a [x]\nb: &b [*a,*a]\nc: &c [*b,*b]\n", "anchors"),
        ("%YAML 9.9\n---\na: 1\n", "not YAML"),
        ("a" * 900_000 + ": 1", "not YAML|unknown key"),
    ],
    ids=range(16),
)
def test_hostile_text_is_refused_quickly_and_in_few_words(
    text: str, words: str
) -> None:
    with pytest.raises(TableError, match=words) as raised:
        _load(text)
    assert len(str(raised.value)) < 10_000


def test_ten_megabytes_and_things_that_are_no_files_are_refused(tmp_path: Path) -> None:
    big = tmp_path / "big.yaml"
    big.write_bytes(b"#" * 10_000_000)
    with pytest.raises(TableError, match="larger than any selection table"):
        load_file(big, KNOWN)
    pipe = tmp_path / "pipe.yaml"
    os.mkfifo(pipe)
    for path in (pipe, Path("/dev/zero"), tmp_path):
        with pytest.raises(TableError, match="not a regular file"):
            load_file(path, KNOWN)
    with pytest.raises(TableError, match="cannot open"):
        load_file(tmp_path / "absent.yaml", KNOWN)
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TableError, match="not UTF-8"):
        load_file(binary, KNOWN)


TEXT = st.text(
    st.characters(codec="utf-8", categories=["L", "N", "P", "Zs"]), max_size=8
)
WORD = st.sampled_from(
    ["on", "off", "1", "null", "true", "1e3", "2026-01-01", "a.b", "~x"]
)
NAMES = st.sampled_from(["on", "1", "null", "plain", "1e3", "2026-01-01", "a.b"])
TIME = st.floats(0, 1e12, allow_nan=False)
INTERVAL = st.tuples(TIME, TIME).map(lambda pair: (min(pair), max(pair)))
COUNT = st.integers(1, 2**40)
USE = st.builds(
    lambda name, params: Candidate(*name, params),
    st.sampled_from([(b, a) for b, names in KNOWN.algorithms.items() for a in names]),
    st.dictionaries(NAMES, st.one_of(st.integers(-(2**62), 2**62), NAMES), max_size=2),
)
EVIDENCE = st.builds(
    Evidence,
    st.sampled_from(VERDICTS),
    st.lists(
        st.builds(Point, COUNT, TIME, INTERVAL, COUNT, COUNT, st.none() | TIME),
        max_size=2,
    ).map(tuple),
    st.none() | st.builds(RunnerUp, USE, COUNT, TIME, INTERVAL),
    st.none() | TEXT,
    st.none() | st.just("2026-11-20"),
)
RATE = st.floats(1e-3, 1e6)
KEYS = st.fixed_dictionaries(
    {
        "ranks": st.none() | COUNT,
        "nodes": st.none() | COUNT,
        "ppn": st.none() | COUNT,
        "link_class": st.none() | st.sampled_from(LINK_CLASSES),
        "device": st.none() | st.sampled_from(["host", "cuda"]),
        "dtype": st.none() | st.sampled_from(["float32", "bfloat16"]),
        "redop": st.none() | st.sampled_from(["sum", "max"]),
        "network": st.none() | st.builds(Network, TEXT, RATE, RATE),
    }
)


@st.composite
def _tables(draw: st.DrawFn) -> Table:
    cells = draw(
        st.lists(
            st.tuples(st.sampled_from(COLLECTIVES), KEYS),
            max_size=3,
            unique_by=lambda cell: (cell[0], tuple(cell[1].values())),
        )
    )
    rules = []
    for op, keys in cells:
        cuts = sorted(draw(st.sets(st.integers(1, 2**62), max_size=3)))
        for lo, hi in zip([0, *cuts], [*cuts, None], strict=True):
            evidence = draw(st.none() | EVIDENCE)
            rules.append(Rule(op, Match(lo, hi, **keys), draw(USE), evidence))
    machine = Machine(
        Cpu(draw(TEXT), draw(COUNT), draw(COUNT)),
        tuple(draw(st.lists(st.builds(Gpu, TEXT, COUNT), max_size=2))),
        tuple(
            draw(st.lists(st.builds(Nic, TEXT, COUNT, st.none() | TIME), max_size=2))
        ),
        draw(TEXT),
        draw(TEXT),
    )
    return Table(
        machine,
        tuple(rules),
        {"mpi": {"impl": draw(TEXT)}, "env": {"A": draw(TEXT)}},
        {"launches": draw(COUNT), "stop": {"rel_ci": draw(TIME)}, "date": draw(WORD)},
        draw(TIME),
    )


@settings(deadline=None, max_examples=40)
@given(_tables())
def test_what_is_written_reads_back_equal(table: Table) -> None:
    again = _load(dump(table))
    assert again == table
    assert again.digest == table.digest


def test_the_digest_sees_content_and_ignores_layout() -> None:
    table = _load(GOOD)
    assert _load(dump(table)).digest == table.digest == _load("# x\n" + GOOD).digest
    assert _load(GOOD.replace("131072", "65536")).digest != table.digest


def _environ(**variables: object) -> dict[str, str]:
    return {name: str(value) for name, value in variables.items()}


def test_a_named_table_of_this_machine_is_used(tmp_path: Path) -> None:
    path = tmp_path / "t.yaml"
    path.write_text(GOOD)
    found = locate(MACHINE, _environ(COMMRT_TABLE=path))
    sent = LocatedTable.decode(found.encode())
    assert sent == found
    assert sent.parse(KNOWN) == _load(GOOD)
    assert sent.why == "COMMRT_TABLE"


def test_a_foreign_table_is_refused_unless_allowed(tmp_path: Path) -> None:
    path = tmp_path / "t.yaml"
    path.write_text(GOOD)
    other = Machine(Cpu("another", 2, 64))
    with pytest.raises(TableError, match=r"another machine.*ANY_MACHINE=1"):
        locate(other, _environ(COMMRT_TABLE=path)).parse(KNOWN)
    allowed = _environ(COMMRT_TABLE=path, COMMRT_TABLE_ANY_MACHINE=1)
    assert locate(other, allowed).parse(KNOWN) == _load(GOOD)


def test_a_missing_named_table_fails_in_parse_on_every_rank(tmp_path: Path) -> None:
    found = locate(MACHINE, _environ(COMMRT_TABLE=tmp_path / "absent"))
    with pytest.raises(TableError, match=r"cannot open.*absent.*COMMRT_TABLE"):
        LocatedTable.decode(found.encode()).parse(KNOWN)


def test_the_users_folder_is_searched_under_the_fingerprint(tmp_path: Path) -> None:
    environ = _environ(XDG_CONFIG_HOME=tmp_path)
    nothing = locate(MACHINE, environ)
    assert (nothing.path, nothing.parse(KNOWN)) == (None, None)
    path = user_table_path(MACHINE, environ)
    assert path == tmp_path / f"commrt/tables/{MACHINE.fingerprint}.yaml"
    path.parent.mkdir(parents=True)
    path.write_text(GOOD)
    assert locate(MACHINE, environ).parse(KNOWN) == _load(GOOD)


def test_a_user_without_a_home_has_no_table_of_his_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in a container that runs as an unknown user: rank 0 must go on."""

    def nobody(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", nobody)
    assert locate(MACHINE, {}).path is None
    with pytest.raises(UsageError, match="set HOME or XDG_CONFIG_HOME"):
        user_table_path(MACHINE, {})


def test_a_folder_that_others_closed_holds_no_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(path: object, **options: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    with monkeypatch.context() as closed:
        closed.setattr(os, "stat", refused)
        found = locate(MACHINE, _environ(XDG_CONFIG_HOME=tmp_path))
    assert (found.path, found.error) == (None, None)


def test_the_table_in_the_documentation_is_valid() -> None:
    page = Path(__file__).parents[3] / "docs/reference/selection-tables.md"
    text = page.read_text()
    example = text.split("```yaml\n")[1].split("```")[0]
    table = _load(example)
    assert [rule.match.hi for rule in table.rules] == [4096, None]
    assert _load(dump(table)) == table


def test_every_shipped_table_is_valid() -> None:
    folder = Path(__file__).parents[3] / "tables"
    from commrt.backends.catalog import catalog

    for path in sorted(folder.glob("*.yaml")):
        assert load_file(path, catalog()).rules, path
