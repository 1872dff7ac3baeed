# SPDX-License-Identifier: Apache-2.0
"""The environment: typed values, defaults, and errors that name the cure."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from commrt import env
from commrt.errors import UsageError
from commrt.vocabulary.limits import NO_LIMIT_S

PACKAGE = Path(env.__file__).parent


@pytest.mark.parametrize("variable", env.VARIABLES, ids=lambda v: v.name)
def test_default_is_an_allowed_value(variable: env.Variable) -> None:
    value = env.read(variable.name, {})
    assert (value is None) == (variable.default is None)


@pytest.mark.parametrize("variable", env.VARIABLES, ids=lambda v: v.name)
def test_empty_value_means_unset(variable: env.Variable) -> None:
    empty = {variable.name: ""}
    assert env.read(variable.name, empty) == env.read(variable.name, {})
    assert env.value(variable.name, empty) is None


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("COMMRT_DEBUG", "check", "check"),
        ("COMMRT_TIMEOUT_S", "1.5", 1.5),
        ("COMMRT_TIMEOUT_S", "1e300", NO_LIMIT_S),
        ("COMMRT_TIMEOUT_S", "inf", NO_LIMIT_S),
        ("COMMRT_TIMEOUT_S", "None", NO_LIMIT_S),
        ("COMMRT_ABORT_ON_EXCEPTION", "0", False),
        ("COMMRT_NODES", "2,3", (2, 3)),
        ("COMMRT_TABLE", "a/b.yaml", "a/b.yaml"),
    ],
)
def test_read_gives_the_typed_value(name: str, text: str, value: env.Value) -> None:
    assert env.read(name, {name: text}) == value


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("COMMRT_DEBUG", "on"),
        ("COMMRT_DEBUG", "CHECK"),
        ("COMMRT_TIMEOUT_S", "soon"),
        ("COMMRT_TIMEOUT_S", "0"),
        ("COMMRT_TIMEOUT_S", "nan"),
        ("COMMRT_TIMEOUT_S", "-inf"),
        ("COMMRT_TIMEOUT_S", "-1e300"),
        ("COMMRT_ABORT_ON_EXCEPTION", "yes"),
        ("COMMRT_NODES", "2,x"),
        ("COMMRT_NODES", "2,0"),
        ("COMMRT_SHM", "sysv"),
    ],
)
def test_bad_value_names_variable_value_and_what_is_allowed(
    name: str, text: str
) -> None:
    with pytest.raises(UsageError) as caught:
        env.check_names({name: text})
    message = str(caught.value)
    allowed = next(v.values for v in env.VARIABLES if v.name == name)
    assert f"{name}={text!r}" in message
    assert allowed in message


def test_mistyped_choice_suggests_the_nearest() -> None:
    told = r"did you mean 'torchrun'\? Known: mpi, .*torchrun\. Expected mpi"
    with pytest.raises(UsageError, match=told):
        env.read("COMMRT_LAUNCH", {"COMMRT_LAUNCH": "torchrunn"})


def test_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(UsageError, match="did you mean 'COMMRT_TIMEOUT_S'"):
        env.check_names({"COMMRT_TIMEOUT": "5"})


def test_other_programs_variables_are_ignored() -> None:
    env.check_names({"COMMRTX": "1", "PATH": "/bin", "commrt_debug": "x"})


def test_agreement_differs_exactly_where_a_selecting_variable_differs() -> None:
    assert env.agreement({"COMMRT_TABLE": "a"}) != env.agreement({})
    assert env.agreement({"COMMRT_TIMEOUT_S": "5"}) == env.agreement({})


def test_markdown_table_has_one_row_per_variable_and_even_columns() -> None:
    lines = env.markdown_table().splitlines()
    assert len(lines) == 2 + len(env.VARIABLES)
    columns = {len(re.findall(r"(?<!\\)\|", line)) for line in lines}
    assert columns == {6}


def test_the_environment_is_read_in_env_py_only() -> None:
    """Other modules may name launcher variables, but no COMMRT_* by os.environ."""
    pattern = re.compile(r"(environ|getenv)[^\n]*[\"']COMMRT_")
    sources = [path for path in PACKAGE.rglob("*.py") if path.name != "env.py"]
    assert len(sources) > 3
    assert [str(p) for p in sources if pattern.search(p.read_text())] == []
