# SPDX-License-Identifier: Apache-2.0
"""Logs of what a program communicates: what, how much, how long, and from where.

    with commrt.trace.record() as recording:
        train_one_step()
    print(recording.log().volume(by=("dimension", "op")))

or ``COMMRT_TRACE=FOLDER`` for a whole run, and then ``python -m commrt trace``.
``dump(folder)`` writes the last operations that the engine keeps anyway, as
``COMMRT_DUMP=FOLDER`` does when a job hangs or fails; ``python -m commrt analyze``
reads them.
"""

from __future__ import annotations

from commrt.trace.dumps import dump
from commrt.trace.recording import Recording, label, record, start, stop

__all__ = ["Recording", "dump", "label", "record", "start", "stop"]
