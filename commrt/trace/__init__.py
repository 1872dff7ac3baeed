# SPDX-License-Identifier: Apache-2.0
"""Logs of what a program communicates: what, how much, how long, and from where.

    with commrt.trace.record() as recording:
        train_one_step()
    print(recording.log().volume(by=("dimension", "op")))

or ``COMMRT_TRACE=FOLDER`` for a whole run, and then ``python -m commrt trace``.
"""

from __future__ import annotations

from commrt.trace.recording import Recording, label, record, start, stop

__all__ = ["Recording", "label", "record", "start", "stop"]
