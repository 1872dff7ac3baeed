# SPDX-License-Identifier: Apache-2.0
"""Messages of torch that are refused, alone or in a batch, take their places."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

import torch.distributed as dist

from commrt.group.group import Group
from commrt.group.refusals import Place, is_refusal, refuse_messages, take_places

__all__ = ["telling_peers_of_batch"]

_BATCH: CodeType = inspect.unwrap(dist.batch_isend_irecv).__code__


@contextmanager
def telling_peers_of_batch(
    group: Group,
    channel: Group | None = None,
    sends: Sequence[Place] = (),
    recvs: Sequence[Place] = (),
) -> Iterator[None]:
    """Let peers hear of an error in here, which refuses a message and its batch.

    ``dist.batch_isend_irecv`` starts one message after the other, and ends at the first
    that raises. So the messages behind it are never called, and their peers would meet
    those of a later step instead.

    Args:
        group: has the messages.
        channel: has a second message for each of them, which describes it.
        sends: peer and tag of the message, if it is sent.
        recvs: the same, if it is received.
    """
    try:
        yield
    except Exception as error:
        refuse_messages(group, error, sends, recvs)
        if channel is not None:
            take_places(channel, error, sends, recvs)
        if is_refusal(error):
            left = _left_of_batch()
            for each in (group, channel):
                if each is not None:
                    take_places(each, error, *left)
        raise


def _left_of_batch() -> tuple[list[Place], list[Place]]:
    """Return peers and tags of the sends and receives that a batch will not call."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not _BATCH:
        frame = frame.f_back
    if frame is None:
        return [], []
    messages: list[Any] = list(frame.f_locals.get("p2p_op_list", ()))
    this = frame.f_locals.get("p2p_op")
    at = next((i for i, each in enumerate(messages) if each is this), len(messages))
    places: tuple[list[Place], list[Place]] = ([], [])
    for each in messages[at + 1 :]:
        places[each.op is not dist.isend].append((each.group_peer, each.tag))
    return places
