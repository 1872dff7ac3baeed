# SPDX-License-Identifier: Apache-2.0
"""Questions to ranks of other nodes by datagrams: who answers, and what is ignored."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from commrt import _native
from commrt.bootstrap.base import poll_until
from commrt.job.inquiries import Inquiries, Place, close_inquiries

TAG = 40


@contextmanager
def of_ranks(size: int, **how: Any) -> Iterator[list[Inquiries]]:
    """Yield the questions of that many ranks of one process, which know each other."""
    made = [Inquiries(rank, size, **how) for rank in range(size)]
    places = [Place.parse(one.place.text) for one in made]
    for one in made:
        one.connect(places)
    try:
        yield made
    finally:
        for one in made:
            one.close()


@pytest.mark.parametrize("size", [2, 3, 5])
def test_each_peer_answers_for_itself(size: int) -> None:
    engine = _native.Engine()
    groups = [_native.Group(engine, rank, size, "g") for rank in range(size)]
    with of_ranks(size) as ranks:
        for group, one in zip(groups, ranks, strict=True):
            group.tell_afar(one.told, TAG)
        for asks in range(size):
            abouts = {rank: rank for rank in range(size) if rank != asks}
            found = ranks[asks].ask(abouts, TAG)
            assert found == {
                rank: (rank, "computing", 0, "", 0.0, None) for rank in abouts
            }


def test_a_peer_without_the_communicator_says_so() -> None:
    with of_ranks(2) as ranks:
        assert ranks[0].ask({1: 1}, TAG) == {1: ()}
        assert ranks[0].ask({}, TAG) == {}


def test_a_peer_that_has_closed_does_not_answer() -> None:
    with of_ranks(3) as ranks:
        ranks[1].close()
        ranks[1].close()
        assert ranks[0].ask({1: 1, 2: 2}, TAG) == {1: None, 2: ()}


def test_a_rank_that_knows_no_places_asks_nobody() -> None:
    alone = Inquiries(0, 2)
    try:
        assert alone.ask({1: 1}, TAG) == {1: None}
    finally:
        alone.close()


def test_without_sockets_nobody_answers_and_nothing_fails() -> None:
    with of_ranks(2, families=()) as ranks:
        assert ranks[0].place.port == 0
        assert ranks[0].ask({1: 1}, TAG) == {1: None}


def test_a_machine_without_the_newer_family_uses_the_older() -> None:
    with of_ranks(2, families=(socket.AF_INET,)) as ranks:
        assert ranks[0].ask({1: 1}, TAG) == {1: ()}


def test_a_rank_says_whether_another_of_its_node_is_stopped_or_has_ended() -> None:
    engine = _native.Engine()
    group = _native.Group(engine, 0, 3, "g")
    program = [sys.executable, "-c", "input()"]
    with subprocess.Popen(program, stdin=subprocess.PIPE) as process:
        name = f"process {process.pid} on here"
        descriptors = [-1, os.pidfd_open(process.pid), -1]
        numbers = [0, process.pid, 0]
        liveness = _native.Liveness(descriptors, ["me", name, "far"], numbers)
        with of_ranks(3) as ranks:
            asked = Inquiries(0, 3, liveness)
            places = [asked.place, ranks[1].place, ranks[2].place]
            group.tell_afar(asked.told, TAG)
            ranks[2].connect(places)

            def said() -> Any:
                row = ranks[2].ask({0: 1}, TAG)[0]
                return row and row[1]

            assert said() == "unknown"
            process.send_signal(signal.SIGSTOP)
            assert poll_until(lambda: said() == "stopped", 240)
            process.send_signal(signal.SIGKILL)
            assert poll_until(lambda: said() == "dead", 240)
            assert ranks[2].ask({0: 0}, TAG) == {0: (0, "computing", 0, "", 0.0, None)}
            assert asked.has_ended(1)
            asked.connect(places)
            assert asked.ask({1: 1, 2: 2}, TAG) == {1: None, 2: ()}
            asked.close()


def test_a_lost_question_is_sent_again() -> None:
    with of_ranks(2) as ranks:
        own = ranks[1].place
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as loses:
            loses.settimeout(240)
            loses.bind(("127.0.0.1", 0))
            ranks[0].connect(
                [own, Place(loses.getsockname()[1], (), own.machine, own.secret)]
            )

            def answer_the_second() -> None:
                loses.recv(4096)
                data, source = loses.recvfrom(4096)
                said = {"number": json.loads(data)["number"], "rank": 1, "row": []}
                loses.sendto(json.dumps(said).encode(), source)

            thread = threading.Thread(target=answer_the_second)
            thread.start()
            found = ranks[0].ask({1: 1}, TAG)
            thread.join()
        assert found == {1: ()}


def test_a_forked_child_leaves_its_parents_socket_alone() -> None:
    with of_ranks(2) as ranks:
        child = os.fork()
        if child == 0:
            close_inquiries()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert ranks[0].ask({1: 1}, TAG) == {1: ()}


@pytest.mark.parametrize(
    "change",
    [
        b"",
        b"\xff\xfe",
        b"[" * 4000,
        b"[]",
        b"null",
        b'{"secret": 1}',
        {"secret": "another"},
        {"secret": "\udc80"},
        {"number": 5},
        {"tag": "40"},
        {"tag": 2**31},
        {"about": 1.0},
        {"about": True},
        {"about": None},
        {"by": -(2**70)},
    ],
)
def test_anything_but_a_question_gets_no_answer(change: Any) -> None:
    with of_ranks(2) as ranks:
        place = ranks[1].place
        question = {"secret": place.secret, "number": "n", "tag": TAG}
        question |= {"about": 1, "by": 0}
        data = change
        if isinstance(change, dict):
            data = json.dumps({**question, **change}).encode()
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
            asking.settimeout(240)
            there = ("127.0.0.1", place.port)
            asking.sendto(data, there)
            # Behind it comes a question, and its answer is the first that comes.
            asking.sendto(json.dumps({**question, "number": "last"}).encode(), there)
            answer = json.loads(asking.recv(4096))
        assert answer == {"number": "last", "rank": 1, "row": []}


def test_answers_to_another_question_are_no_answers() -> None:
    with of_ranks(2) as ranks:
        replies = [b"x", b'{"number": "other", "rank": 1, "row": []}', b'{"rank": 1}']
        own = ranks[1].place

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as liar:
            liar.settimeout(240)
            liar.bind(("127.0.0.1", 0))
            port = liar.getsockname()[1]
            fake = Place(port, (), own.machine, own.secret)
            ranks[0].connect([ranks[0].place, fake])

            def lie() -> None:
                data, source = liar.recvfrom(4096)
                for reply in replies:
                    liar.sendto(reply, source)
                number = json.loads(data)["number"]
                right = {"number": number, "rank": 1, "row": [1, "stopped"]}
                liar.sendto(json.dumps({**right, "rank": 7}).encode(), source)
                liar.sendto(json.dumps(right).encode(), source)

            thread = threading.Thread(target=lie)
            thread.start()
            found = ranks[0].ask({1: 1}, TAG)
            thread.join()
        assert found == {1: (1, "stopped")}
