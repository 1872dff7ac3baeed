# SPDX-License-Identifier: Apache-2.0
"""commrt's errors as torch's programs expect them: also ``dist.DistBackendError``.

Programs over torch.distributed catch RuntimeError, whatever the backend. So what a call
raises is of commrt's class and of torch's: ``except commrt.errors.TimeoutError_`` and
``except RuntimeError`` both find it.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch.distributed as dist

from commrt.errors import CommError, TimeoutError_, UsageError

__all__ = ["as_torch_error", "wrong_call"]


_WHOSE_LIMIT = (
    "; the limit is the timeout of the call, or else of the group: "
    "init_process_group(timeout=...)"
)


def as_torch_error(error: CommError) -> CommError:
    """Return the same error, of a class that is torch's, too."""
    kind: Any = type(error)
    if issubclass(kind, dist.DistBackendError):
        return error
    args = error.args
    if isinstance(error, TimeoutError_) and len(args) == 1:
        args = (f"{args[0]}{_WHOSE_LIMIT}",)
    made: CommError = _class_of(kind)(*args)
    made.__dict__.update(error.__dict__)
    made.__cause__ = error.__cause__
    made.__traceback__ = error.__traceback__
    return made


def wrong_call(what: str) -> CommError:
    """Return a UsageError, torch's, too, about what is wrong with a call."""
    return as_torch_error(UsageError(what))


@cache
def _class_of(kind: Any) -> Any:
    return type(kind.__name__, (kind, dist.DistBackendError), {})
