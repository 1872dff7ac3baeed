# SPDX-License-Identifier: Apache-2.0
"""The words of ``--hosts``, and frames between a launcher and its hosts."""

from __future__ import annotations

import pytest

from commrt.bootstrap.kept_values import KeptValues, pack, unpack
from commrt.errors import UsageError
from commrt.running.frames import Frames, Kind, frame
from commrt.running.hosts import parse_hosts


def placed(text: str, num_ranks: int | None = None) -> list[tuple[str, int, int]]:
    hosts = parse_hosts(text, num_ranks)
    assert [host.number for host in hosts] == [*range(len(hosts))]
    return [(host.name, host.ranks.start, host.ranks.stop) for host in hosts]


def test_hosts_have_their_ranks_in_order() -> None:
    assert placed("h1") == [("h1", 0, 1)]
    assert placed("h1:2,h2,u@h3:3") == [("h1", 0, 2), ("h2", 2, 3), ("u@h3", 3, 6)]
    assert placed("h1:2,h2:2,h3:2", 3) == [("h1", 0, 2), ("h2", 2, 3)]
    assert placed("[fe80::1%eth0]:2, 10.0.0.2") == [
        ("[fe80::1%eth0]", 0, 2),
        ("10.0.0.2", 2, 3),
    ]
    assert parse_hosts("u@[::1]:2", None)[0].address == "::1"


@pytest.mark.parametrize(
    ("text", "num_ranks", "says"),
    [
        ("h1,h1", None, "h1 is asked for twice; name it once, .* as h1:2"),
        ("h1:2,u@H1:3", None, "h1 is asked for twice; .* as h1:5"),
        ("h1,", None, "'' is no host; expected names as h1,h2"),
        ("-oProxyCommand=x", None, "is no host"),
        ("h1;rm", None, "is no host"),
        ("h1:0", None, "h1 has 0 ranks; expected 1 to 4096"),
        ("h1:x", None, "is no host"),
        ("h1:4096,h2", None, "4097 ranks; at most 4096"),
        ("h1,h2", 5, "-n 5: .* room for 2 ranks; .* as h1:3"),
    ],
)
def test_wrong_hosts_are_refused(text: str, num_ranks: int | None, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        parse_hosts(text, num_ranks)


def test_frames_come_whole_however_they_are_cut() -> None:
    sent = [(Kind.ALIVE, 0, b""), (Kind.OUT, 3, b"x" * 1001), (Kind.ASK, 7, b"\n")]
    text = b"".join(frame(*each) for each in sent)
    for step in (1, 2, 7, len(text)):
        frames, found = Frames(), []
        for at in range(0, len(text), step):
            found += frames.feed(text[at : at + step])
        assert found == sent


@pytest.mark.parametrize("text", [b"\xff" * 9, b"\x06" + b"\xff" * 8])
def test_what_is_no_frame_is_refused(text: bytes) -> None:
    with pytest.raises(ValueError, match=r"not a valid Kind|a frame of"):
        list(
            Frames().feed(text.ljust(9 + 1, b"\0") if text[0] == 6 else frame_of_255())
        )


def frame_of_255() -> bytes:
    return b"\xff" + bytes(8)


def test_values_are_kept_for_ranks() -> None:
    values = KeptValues()

    def ask(*words: bytes) -> list[bytes]:
        return unpack(values.answer(pack(words)))

    assert ask(b"get", b"a") == [b"no"]
    assert ask(b"check", b"a") == [b"ok", b"0"]
    assert ask(b"set", b"a", b"") == [b"ok", b""]
    assert ask(b"get", b"a") == [b"ok", b""]
    assert ask(b"check", b"a") == [b"ok", b"1"]
    assert ask(b"add", b"n", b"2") == [b"ok", b"2"]
    assert ask(b"add", b"n", b"-3") == [b"ok", b"-1"]
    assert ask(b"compare_set", b"b", b"", b"1") == [b"ok", b"1"]
    assert ask(b"compare_set", b"b", b"", b"2") == [b"ok", b"1"]
    assert ask(b"delete", b"b") == [b"ok", b"1"]
    assert ask(b"delete", b"b") == [b"ok", b"0"]


@pytest.mark.parametrize(
    "question",
    [b"", b"\0", pack([b"get"]), pack([b"what"]), pack([b"add", b"a", b"x"])],
)
def test_what_is_no_question_has_no_answer(question: bytes) -> None:
    assert unpack(KeptValues().answer(question)) == [b"no"]
