# SPDX-License-Identifier: Apache-2.0
"""What COMMRT_CHAOS may say, and what is said of a wrong value."""

from __future__ import annotations

import re

import pytest

from commrt import env
from commrt.errors import UsageError
from commrt.vocabulary.chaos import CODES, KINDS, Fault, parse_chaos
from commrt.vocabulary.operations import COLLECTIVES


def test_a_fault_is_a_kind_and_its_conditions() -> None:
    found = parse_chaos(
        "7:fail@rank=1,op=allreduce,number=100; delay=0.5@every=50,rank=0+2;"
        "corrupt@op=send+recv,chance=0.25,most=3;kill"
    )
    assert found.seed == 7
    assert found.faults == (
        Fault(
            "fail",
            "fail@rank=1,op=allreduce,number=100",
            ranks=(1,),
            ops=("allreduce",),
            number=100,
        ),
        Fault("delay", "delay=0.5@every=50,rank=0+2", 0.5, ranks=(0, 2), every=50),
        Fault(
            "corrupt",
            "corrupt@op=send+recv,chance=0.25,most=3",
            ops=("send", "recv"),
            chance=0.25,
            most=3,
        ),
        Fault("kill", "kill", number=1),  # the first operation, on all ranks
    )


def test_a_seed_alone_draws_faults() -> None:
    drawn = parse_chaos("12")
    assert drawn.seed == 12
    assert {fault.kind for fault in drawn.faults} == {"delay", "fail", "drop", "kill"}
    assert all(0 < fault.chance < 0.1 for fault in drawn.faults)
    assert parse_chaos("13").faults == drawn.faults


def test_each_kind_and_each_operation_can_be_named() -> None:
    for kind in KINDS:
        text = "delay=1" if kind == "delay" else kind
        assert parse_chaos(f"0:{text}").faults[0].kind == kind
    assert set(COLLECTIVES) <= set(CODES)
    for name in CODES:
        assert parse_chaos(f"0:fail@op={name}").faults[0].ops == (name,)
    assert len(set(CODES.values())) == len(CODES)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("fail@rank=1", "must begin with a seed"),
        ("-1:fail", "must begin with a seed"),
        ("18446744073709551616", "below 2**64"),
        ("7:", "has no fault behind the ':'"),
        ("7:;", "has no fault behind the ':'"),
        ("7:flail", "did you mean 'fail'?"),
        ("7:delay", "delay needs seconds"),
        ("7:delay=soon", "seconds"),
        ("7:delay=inf", "write drop"),
        ("7:delay=0", "0"),
        ("7:fail=3", "fail takes no value"),
        ("7:fail@ranks=1", "did you mean 'rank'?"),
        ("7:fail@rank", "as in rank=1 or rank=1+3"),
        ("7:fail@rank=-1", "must be a rank of the job"),
        ("7:fail@rank=1+", "must be a rank of the job"),
        ("7:fail@op=allreduse", "did you mean 'allreduce'?"),
        ("7:fail@number=0", "must be a whole number above 0"),
        ("7:fail@every=2.5", "must be a whole number above 0"),
        ("7:fail@most=x", "must be a whole number above 0"),
        ("7:fail@chance=1.5", "must be a number above 0, at most 1"),
        ("7:fail@chance=nan", "must be a number above 0, at most 1"),
        ("7:fail@number=1,number=2", "number is said twice"),
        ("7:fail@number=1,every=2", "say only one of number and every"),
    ],
)
def test_a_wrong_value_is_named_with_what_is_right(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=re.escape(said)) as raised:
        env.read("COMMRT_CHAOS", {"COMMRT_CHAOS": text})
    assert "SEED:FAULT;FAULT" in str(raised.value)
