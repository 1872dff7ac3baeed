# SPDX-License-Identifier: Apache-2.0
"""Devices of real threads, for C++ code under sanitizers and beside a real MPI."""

from __future__ import annotations

from types import TracebackType

from commrt import _native

__all__ = ["ThreadDevice"]


class ThreadDevice(_native.ThreadDevice):
    """A device with one thread per stream; each command is first delayed at random.

    Delays are drawn from ``seed``, up to ``max_delay_us``; what then happens is up to
    the operating system. Nothing here notices a deadlock. ``with`` closes the device.
    """

    def __enter__(self) -> ThreadDevice:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
