# SPDX-License-Identifier: Apache-2.0
"""A process knows its program, and another one runs it as Python would."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commrt.errors import UsageError
from commrt.launch.python_program import PythonProgram, own_program, program_of

CASES = [
    (["train.py", "-u", "1"], [], ["train.py", "-u", "1"]),
    (["-u", "train.py"], ["-u"], ["train.py"]),
    (["-m", "train", "--lr", "1"], [], ["-m", "train", "--lr", "1"]),
    (["-um", "train"], ["-u"], ["-m", "train"]),
    (["-OOumtrain", "x"], ["-OOu"], ["-m", "train", "x"]),
    (["-c", "pass", "-m"], [], ["-c", "pass", "-m"]),
    (["-cpass"], [], ["-c", "pass"]),
    (["-X", "dev", "-W", "error", "a.py"], ["-X", "dev", "-W", "error"], ["a.py"]),
    (["-Xdev", "-Wcm", "a.py"], ["-Xdev", "-Wcm"], ["a.py"]),
    (
        ["--check-hash-based-pycs", "always", "a.py"],
        ["--check-hash-based-pycs", "always"],
        ["a.py"],
    ),
]


@pytest.mark.parametrize(("arguments", "options", "words"), CASES)
def test_options_of_python_are_told_from_the_program(
    arguments: list[str], options: list[str], words: list[str]
) -> None:
    assert program_of(arguments) == PythonProgram(tuple(options), tuple(words))


@pytest.mark.parametrize(
    "arguments", [[], ["-u"], ["-"], ["-m"], ["-c"], ["-X", "dev"]]
)
def test_arguments_without_a_program_are_refused(arguments: list[str]) -> None:
    with pytest.raises(UsageError, match="name no script, no -m and no -c"):
        program_of(arguments)


@given(
    st.lists(st.sampled_from(["-u", "-O", "-Xdev", "-E"])),
    st.sampled_from([["a.py"], ["-m", "a"], ["-c", "a"]]),
    st.lists(st.text(min_size=1)),
)
def test_the_parts_make_up_the_whole(
    options: list[str], program: list[str], rest: list[str]
) -> None:
    found = program_of([*options, *program, *rest])
    assert found == PythonProgram(tuple(options), (*program, *rest))


TELLS = """
import json, sys
from commrt.launch.python_program import own_program
own = own_program()
print(json.dumps([__name__, sys.argv, sys.path[0], [*own.options], [*own.words]]))
class Kept: pass
import pickle
pickle.loads(pickle.dumps(Kept))  # found in __main__
"""


def test_a_program_runs_as_python_runs_it(tmp_path: Path) -> None:
    folder = tmp_path / "of_program"
    folder.mkdir()
    (folder / "tells.py").write_text(TELLS)
    script = folder / "tells.py"
    program: list[list[str]] = [
        [str(script), "x"],
        ["-c", TELLS, "-u"],
        ["-m", "of_program.tells", "y"],
    ]
    for words in program:
        inside = (
            "import sys\n"
            "from commrt.launch.python_program import PythonProgram, run_program\n"
            f"run_program(PythonProgram(('-u',), tuple({words!r})))\n"
        )
        ran = _output([sys.executable, "-c", inside], tmp_path)
        plain = _output([sys.executable, "-u", *words], tmp_path)
        assert ran == plain, words


def _output(command: list[str], folder: Path) -> object:
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=folder, timeout=250, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_this_process_has_a_program() -> None:
    assert own_program().words
