# SPDX-License-Identifier: Apache-2.0
"""Calls that torch refuses by itself take their places in the order of calls, too.

torch.distributed looks at some arguments before a group hears of the call: types of a
list's tensors, whether there is a tensor at all, the pickle of an object. The group's
other ranks would wait for that call, or take the rank's next one for it. torch logs
each error of its functions while it is raised, and this listens.
"""

from __future__ import annotations

import logging
import sys
from types import FrameType, TracebackType
from typing import Any

import torch.distributed as dist

from commrt.group.refusals import Place, refuse_messages, take_places
from commrt.torch.calls import Calls

__all__ = ["listen"]

_COLLECTIVES = frozenset(
    (
        "all_gather",
        "all_gather_into_tensor",
        "all_gather_single",
        "all_reduce",
        "all_to_all",
        "all_to_all_single",
        "barrier",
        "broadcast",
        "gather",
        "reduce",
        "reduce_scatter",
        "reduce_scatter_single",
        "reduce_scatter_tensor",
        "scatter",
    )
)
"""Functions that ask the group at their end, and raise nothing of their own behind."""
_OBJECTS = frozenset(
    (
        "all_gather_object",
        "broadcast_object_list",
        "gather_object",
        "scatter_object_list",
    )
)
"""Functions that pickle before they ask the group, and unpickle behind."""
_PICKLING = "_object_to_tensor"
_MESSAGES = {"send": "dst", "recv": "src"}
"""Functions that send or receive one message, and the end of the arguments that name
its other rank."""


def listen() -> None:
    """Hear of the errors of torch's functions from here on; idempotent."""
    try:
        from torch.distributed.c10d_logger import _c10d_logger as logger
    except ImportError:  # of a torch that logs otherwise: such calls take no place
        return
    if not any(isinstance(each, _Listener) for each in logger.handlers):
        logger.addHandler(_Listener())


class _Listener(logging.Handler):
    """Tells a group's other ranks of an error that torch raises instead of a call."""

    def emit(self, record: logging.LogRecord) -> None:
        """Take the place of the call whose error is logged, if it is one of ours."""
        error = sys.exc_info()[1]
        said = record.msg if isinstance(record.msg, dict) else {}
        name = str(said.get("func_name"))
        if not isinstance(error, Exception):
            return
        frames = _frames(error.__traceback__)
        if any(_is_of_group(frame) for frame in frames):
            return  # which has told the others
        given = _arguments(frames, name)
        calls = _calls_of(given)
        if calls is None:
            return
        is_pickling = any(frame.f_code.co_name == _PICKLING for frame in frames)
        if name in _COLLECTIVES or (name in _OBJECTS and is_pickling):
            calls.comm.comparison.refuse(name, error, None)
        elif name in _MESSAGES:
            _refuse_message(calls, error, _MESSAGES[name], given)


def _frames(traceback: TracebackType | None) -> list[FrameType]:
    """Return the frames through which an error went, the outermost first."""
    frames = []
    while traceback is not None:
        frames.append(traceback.tb_frame)
        traceback = traceback.tb_next
    return frames


def _is_of_group(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).startswith("commrt.")


def _arguments(frames: list[FrameType], name: str) -> dict[str, Any]:
    """Return the arguments of a function of torch's, which has no frame where they do
    not fit it: there they are those of the frame that logs.
    """
    for frame in frames:
        if frame.f_code.co_name == name:
            return frame.f_locals
    outer = frames[0].f_locals if frames else {}
    groups = [
        each for each in outer.get("args", ()) if isinstance(each, dist.ProcessGroup)
    ]
    return {"group": next(iter(groups), None), **outer.get("kwargs", {})}


def _calls_of(given: dict[str, Any]) -> Calls | None:
    """Return how a function's group makes its calls; None: it is not commrt's."""
    if not dist.is_initialized():
        return None
    calls: Any = getattr(given.get("group") or dist.group.WORLD, "calls", None)
    return calls if isinstance(calls, Calls) else None


def _refuse_message(
    calls: Calls, error: Exception, end: str, given: dict[str, Any]
) -> None:
    """Take the place of a message whose tensor torch has refused."""
    peer, in_world = given.get(f"group_{end}"), given.get(end)
    if peer is None and in_world is not None:
        try:
            peer = dist.get_group_rank(given.get("group") or dist.group.WORLD, in_world)
        except (TypeError, ValueError):  # the peer is what is wrong
            return
    here: list[Place] = [(peer, given.get("tag", 0))]
    sends, recvs = (here, []) if end == _MESSAGES["send"] else ([], here)
    comm = calls.comm
    refuse_messages(comm, error, sends, recvs)
    if comm.checker is not None:
        take_places(comm.checker.channel, error, sends, recvs)
