# SPDX-License-Identifier: Apache-2.0
"""Futures of operations: who completes them, and where callbacks run.

Nobody who asks for a future waits. One whose operation has ended is complete when it is
made. All others are completed by a thread of the group (``completer.py``), as their
operations end. It runs the callbacks that were attached before, one after the other;
later ones run at once, in the call of ``then``. This is what gloo does, too.

A callback may call collectives, as PowerSGD's do, and wait for them. All ranks must
make these calls in the same place among the group's other calls, but one rank runs the
callback in ``then``, and another one later, in its thread. Outside of a backward pass
the program has to see to that, as with gloo. Within one it cannot, as DDP calls the
hooks. So there the group's next collective first waits for the futures that Python has
asked for in this pass, and for their callbacks.

DDP's reducer, in C++, asks for futures while gradients are still being computed, looks
at them at the end, and attaches nothing of Python's. Where the group's thread has no
core of its own, the end of the backward pass completes these futures, just before DDP
looks: the thread would only interrupt the computation.

An operation that runs out of time is still in flight, and those that were started after
it wait for the same ranks. So while it is, the end of the backward pass gives their
futures its error and does not wait as long for each: else a backward pass would fail
after as many limits as it has buckets, and not after one.

An error has to be an error of C++: what ``Future.set_exception`` stores is a value to
C++, and DDP crashes on it. An error that a callback raises is one, so futures that may
have one are what ``then`` made of another one.

And to torch's compressing hook in C++ the value has to be a list of tensors of C++,
which in a future that Python completes is an object of Python. One that is complete
when it is made, as ``torch.jit.fork`` makes them, has a value of C++. So has one that a
compiled function makes, which waits for a future of Python's and returns the tensors.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import Variable, graph

if TYPE_CHECKING:
    from commrt.torch.completer import Completer
    from commrt.torch.work import CommrtWork

__all__ = ["future_of"]

_BACKWARD = graph._engine_run_backward.__code__
_typed = torch._C.fork
"""The function behind ``torch.jit.fork``: it runs a function, and returns its value in
a future."""


def future_of(work: CommrtWork, completer: Completer) -> Any:
    """Return a future of the work's outputs, complete or not; waits for nothing.

    On devices it is complete: streams wait for what is under way there.
    """
    outputs = work.result()
    devices = {each.device for each in outputs if each.device.type != "cpu"}
    if devices or work.is_completed():
        return _complete(work, outputs, [*devices])
    source: torch.futures.Future[None] = torch.futures.Future()
    in_backward = torch._C._current_autograd_node() is not None
    from_cpp = _called_from_cpp()
    if from_cpp and in_backward and not completer.has_core:
        public = source.then(lambda _: completer.waited_for(work))
        # DDP's own callback, which waits for the futures, is queued after its last one.
        Variable._execution_engine.queue_callback(lambda: source.set_result(None))
    else:
        public = completer.completed(
            work, source, holds_calls=in_backward and not from_cpp
        )
    if from_cpp and _is_compressed(outputs):
        return _after_typed()(public, outputs)
    return public


def _complete(
    work: CommrtWork, outputs: list[torch.Tensor], devices: list[torch.device]
) -> Any:
    """Return the future of a work that nobody has to wait for."""
    error: Exception | None = None
    if outputs and not devices:
        try:
            return _typed(lambda: _waited_for(work))
        except Exception as raised:  # noqa: BLE001  what waits for the future raises it
            error = raised
    source: torch.futures.Future[None] = torch.futures.Future(devices=devices)

    def outcome(_: Any) -> list[torch.Tensor]:
        if error is not None:
            raise error
        return _waited_for(work)

    public = source.then(outcome)
    source.set_result(None)
    return public


def _waited_for(work: CommrtWork) -> list[torch.Tensor]:
    work.wait()
    return work.result()


def _is_compressed(outputs: Sequence[torch.Tensor]) -> bool:
    """Return whether the work may be that of a hook in C++: only those send float16."""
    return any(each.dtype is torch.float16 for each in outputs)


@cache
def _after_typed() -> Callable[[Any, list[torch.Tensor]], Any]:
    """Return a function from a future and tensors to a future of these in C++.

    Threads of torch's own run what is compiled here, without the GIL.
    """
    source = """
def outputs_after(ended: Future[int], outputs: List[Tensor]) -> List[Tensor]:
    torch.jit.wait(ended)
    return outputs

def later(ended: Future[int], outputs: List[Tensor]) -> Future[List[Tensor]]:
    return torch.jit.fork(outputs_after, ended, outputs)
"""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        unit = torch.jit.CompilationUnit(source)
    made: Callable[[Any, list[torch.Tensor]], Any] = unit.later
    return made


def _called_from_cpp() -> bool:
    """Return whether ``Work.get_future`` was called by no function of Python's.

    Then the frame above it is that of ``backward()``, or there is none. To be wrong
    about that only means to complete at another place.
    """
    frame = sys._getframe(2).f_back  # _called_from_cpp, future_of, get_future
    return frame is None or frame.f_code is _BACKWARD
