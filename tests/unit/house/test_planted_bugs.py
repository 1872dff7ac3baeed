# SPDX-License-Identifier: Apache-2.0
"""Planted bugs are compiled in for tests only: what users build has none."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from commrt import _native

ROOT = Path(__file__).parents[3]
NATIVE = ROOT / "commrt" / "native"
HEADER = "planted_bugs.hpp"
OPTION = "COMMRT_PLANTED_BUGS"
SOURCES = {
    path.relative_to(NATIVE).as_posix(): re.sub(r"//.*", "", path.read_text())
    for path in sorted(NATIVE.rglob("*.[ch]pp"))
}
# Every list of bugs: the enumeration, and what Python asks for its names.
LISTS = {
    "Planted": _native.planted_bugs,
    "PlantedMessage": _native.planted_message_bugs,
    "PlantedHostWork": _native.planted_host_work_bugs,
    "PlantedInMpi": _native.planted_mpi_bugs,
    "NcclPlanted": _native.planted_nccl_bugs,
    "PlantedInExchange": _native.planted_peer_bugs,
    "PlantedInSharing": _native.planted_sharing_bugs,
}
# Its one function calls do_wrong() where it has a bug.
HARNESS = """
#include <cstdio>
#include "planted_bugs.hpp"
using namespace commrt;
enum class Bug : int { None = 0, Quiet, Loud, Count };
std::vector<std::string> names_of(Bug);
COMMRT_NAMES_OF_BUGS(Bug, "quiet", "very_loud")
int do_wrong() { std::puts("bug"); return 1; }
PlantedBug<Bug> planted;
int work() { return planted.is(Bug::Loud) ? do_wrong() : 0; }
int main(int, char** arguments) {
  try {
    planted.plant(arguments[1]);
    return work();
  } catch (const std::exception& error) {
    std::puts(error.what());
    return 2;
  }
}
"""


def build(folder: Path, *options: str) -> Path:
    """Compile the harness as a user's build or a test's does."""
    source, program = folder / "harness.cpp", folder / "harness"
    source.write_text(HARNESS)
    flags = ["-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", f"-I{NATIVE}"]
    subprocess.run(["g++", *flags, *options, source, "-o", program], check=True)
    return program


def run(program: Path, bug: str) -> tuple[int, str]:
    done = subprocess.run([program, bug], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout.strip()


def test_a_build_for_tests_has_bugs_by_name(tmp_path: Path) -> None:
    program = build(tmp_path, f"-D{OPTION}")
    assert b"very_loud" in program.read_bytes()
    assert run(program, "very_loud") == (1, "bug")
    assert run(program, "quiet") == (0, "")
    assert run(program, "none") == (0, "")
    assert run(program, "absent") == (2, "no bug is called absent")


def test_another_build_has_none_and_says_which_option_brings_them(
    tmp_path: Path,
) -> None:
    program = build(tmp_path)
    assert b"very_loud" not in program.read_bytes()
    code, said = run(program, "very_loud")
    assert code == 2
    assert said.startswith("this build of the engine has no planted bugs.")
    assert f"{OPTION}=ON" in said


def test_an_optimised_build_without_bugs_does_not_even_ask(tmp_path: Path) -> None:
    """The function that has a bug is the one that has none."""

    def code(text: str, *options: str) -> str:
        source = tmp_path / "work.cpp"
        source.write_text(text)
        flags = ["-std=c++17", "-O2", f"-I{NATIVE}", "-S", "-o", "-"]
        done = subprocess.run(
            ["g++", *flags, *options, source],
            capture_output=True,
            text=True,
            check=True,
        )
        body = done.stdout.partition("\n_Z4workv:\n")[2]
        return body.partition(".cfi_endproc")[0]

    without = HARNESS.replace("planted.is(Bug::Loud) ? do_wrong() : 0", "0")
    assert without != HARNESS
    assert code(HARNESS) == code(without) != ""
    assert code(HARNESS, f"-D{OPTION}") != code(without)


@pytest.mark.parametrize("enumeration", sorted(LISTS))
def test_every_bug_has_a_name_and_a_place_that_asks_for_it(enumeration: str) -> None:
    home = next(
        text for text in SOURCES.values() if f"enum class {enumeration} : int" in text
    )
    body = home.partition(f"enum class {enumeration} : int {{")[2].partition("}")[0]
    bugs = re.findall(r"\w+", body.replace("= 0", ""))
    assert (bugs[0], bugs[-1]) == ("None", "Count")
    named = [
        "".join(part.capitalize() for part in name.split("_"))
        for name in LISTS[enumeration]()
    ]
    assert named == bugs[1:-1]
    aliases = "|".join((enumeration, *_aliases(enumeration)))
    asked = {
        bug
        for text in SOURCES.values()
        for bug in re.findall(rf"\bhas\((?:{aliases})::(\w+)\)", text)
    }
    assert set(bugs[1:-1]) <= asked


def _aliases(enumeration: str) -> set[str]:
    using = re.compile(rf"using (\w+) = {enumeration};")
    return {alias for text in SOURCES.values() for alias in using.findall(text)}


def test_bugs_are_asked_for_by_the_one_header_only() -> None:
    """Nothing but ``has(Bug::X)`` names a bug, and all ``has()`` are that header's."""
    names = sorted({*LISTS, *(name for each in LISTS for name in _aliases(each))})
    named = re.compile(rf"(?<!\bhas\()\b(?:{'|'.join(names)})::\w+")
    other = re.compile(
        r"\bbool has\(\w+ bug\) const \{ return (?!planted\.is\(bug\)|\w+_->has\(bug\))"
    )
    for name in sorted({*SOURCES} - {HEADER}):
        text = SOURCES[name]
        found = [*named.findall(text), *other.findall(text)]
        assert [one for one in found if "::names" not in one] == [], name
        assert OPTION not in text, name


def test_the_option_is_off_but_where_make_sets_it() -> None:
    cmake = (NATIVE / "CMakeLists.txt").read_text()
    assert re.search(rf'option\({OPTION} "[^"]+" OFF\)', cmake)
    assert OPTION not in (ROOT / "pyproject.toml").read_text()


@pytest.mark.parametrize(
    "target", ["install", ".venv-mpich/.installed", "build/asan/.installed"]
)
def test_make_sets_it_in_every_environment_that_tests_run_in(target: str) -> None:
    plan = subprocess.run(
        ["make", "--dry-run", "--always-make", target],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    ).stdout.replace("\\\n", " ")
    builds = [line for line in plan.splitlines() if "--no-build-isolation" in line]
    assert builds
    assert [line for line in builds if f"cmake.define.{OPTION}=ON" not in line] == []
