# SPDX-License-Identifier: Apache-2.0
"""What an ordinary run of the tests leaves out, and how a run is repeated."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from fault_rows import FAULTS

ROOT = Path(__file__).parents[3]
PLUGINS = ("-p", "pytest_timeout", "-p", "no:cacheprovider")
PROGRAM = """
import pytest

@pytest.mark.full
def test_long(): pass

@pytest.mark.full(sample=3)
@pytest.mark.parametrize("case", range(20))
def test_matrix(case): pass

def test_always(): pass

@pytest.mark.parametrize("case", range(10))
def test_many(case): pass

@pytest.mark.whole
@pytest.mark.parametrize("case", range(4))
def test_whole(case): pass
"""


@pytest.fixture
def run(tmp_path: Path) -> object:
    """Return a function that gives the tests that pytest chooses with some options."""
    (tmp_path / "test_program.py").write_text(PROGRAM)
    source = (ROOT / "tests" / "support" / "sampling.py").read_text()
    (tmp_path / "conftest.py").write_text(source)

    def chosen(*options: str) -> list[str]:
        command = [sys.executable, "-m", "pytest", "--collect-only", "-q", *options]
        config = ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(tmp_path)]
        done = subprocess.run(
            [*command, *config, *PLUGINS, "test_program.py"],
            cwd=tmp_path,
            # Plugins of others take a second to import, six times in one test.
            env=os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return [line for line in done.stdout.splitlines() if "::" in line]

    return chosen


def test_a_full_run_leaves_nothing_out(run: object) -> None:
    assert len(run("--full")) == 36  # type: ignore[operator]


def test_an_ordinary_run_draws_a_sample(run: object) -> None:
    chosen = run("--seed", "1")  # type: ignore[operator]
    assert len([name for name in chosen if "test_matrix" in name]) == 3
    assert [name for name in chosen if "test_long" in name] == []
    assert len(chosen) == 18


def test_the_same_seed_draws_the_same_and_another_does_not(run: object) -> None:
    first, again, other = (run("--seed", seed) for seed in ("5", "5", "6"))  # type: ignore[operator]
    assert first == again != other


def test_a_share_keeps_some_of_every_test(run: object) -> None:
    chosen = run("--share", "0.3", "--seed", "1")  # type: ignore[operator]
    number = {
        name: len([each for each in chosen if f"::{name}" in each])
        for name in (
            "test_long",
            "test_matrix",
            "test_always",
            "test_many",
            "test_whole",
        )
    }
    assert number == {
        "test_long": 0,
        "test_matrix": 1,
        "test_always": 1,
        "test_many": 3,
        "test_whole": 4,
    }
    other = run("--share", "0.3", "--seed", "2")  # type: ignore[operator]
    assert other != chosen


def test_a_part_of_the_tests_is_drawn_anew_by_every_seed(run: object) -> None:
    def names(seed: int) -> set[str]:
        chosen = run("--functions", "0.5", "--seed", str(seed))  # type: ignore[operator]
        return {each.partition("[")[0] for each in chosen}

    drawn = [names(seed) for seed in range(4)]
    assert all(any("test_whole" in each for each in one) for one in drawn)
    every = set().union(*drawn)
    assert len(every) >= 3
    assert all(1 <= len(one) < len(every) for one in drawn)


def test_workers_draw_by_one_seed(tmp_path: Path) -> None:
    """By seeds of their own, they would collect different samples and stop."""
    pytest.importorskip("xdist", reason="the test extra brings pytest-xdist")
    (tmp_path / "test_program.py").write_text(PROGRAM)
    source = (ROOT / "tests" / "support" / "sampling.py").read_text()
    (tmp_path / "conftest.py").write_text(source)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "2", "-p", "no:cacheprovider",
         "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(tmp_path), "."],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "18 passed" in done.stdout


def test_every_test_of_this_folder_is_whole(request: pytest.FixtureRequest) -> None:
    here = Path(__file__).parent
    sampled = [
        item.nodeid
        for item in request.session.items
        if here in item.path.parents and item.get_closest_marker("whole") is None
    ]
    assert sampled == []


def test_each_kind_of_fault_keeps_a_case(seed: int) -> None:
    """Of the tests of this project; so each that a kind names is there."""
    files = {name.partition("::")[0] for names in FAULTS.values() for name in names}
    options = ["--seed", f"{seed}", "--functions", "0.0001", "--share", "0.0001"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "--each-fault",
         *options, "-p", "no:cacheprovider", *sorted(f"tests/{f}" for f in files)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    kept = [
        f"{line.removeprefix('tests/')}["
        for line in done.stdout.splitlines()
        if "::" in line
    ]
    for fault, names in FAULTS.items():
        begins = tuple(name if "[" in name else f"{name}[" for name in names)
        assert any(each.startswith(begins) for each in kept), fault
    whole = 1  # the campaign of kills, in any run
    assert len(kept) <= len(FAULTS) + whole + 1


def test_each_test_of_a_fault_is_there() -> None:
    for names in FAULTS.values():
        for file, _, function in (name.partition("::") for name in names):
            source = (ROOT / "tests" / file).read_text()
            assert f"\ndef {function.partition('[')[0]}(" in source, function


def test_the_tests_of_a_fault_are_run_by_one_call_that_keeps_one() -> None:
    """Else each of two calls may leave the kind to the other."""
    calls = [
        line
        for line in (ROOT / "Makefile").read_text().splitlines()
        if "$(VENV)/bin/pytest" in line and "--each-fault" in line
    ]
    folders = [("unit/",), ("ranks/",), ("mpi/", "faults/")]
    variables = ["$(UNIT_TESTS)", "$(RANKS_TESTS)", "$(MPI_TESTS)"]
    assert [sum(name in call for call in calls) for name in variables] == [1, 1, 1]
    for fault, names in FAULTS.items():
        homes = [group for group in folders if all(n.startswith(group) for n in names)]
        assert len(homes) == 1, fault
