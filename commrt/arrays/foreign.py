# SPDX-License-Identifier: Apache-2.0
"""Questions to arrays of other libraries, whose answers may be errors of any kind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from commrt.errors import BufferError_, CommError

__all__ = ["asking"]


@contextmanager
def asking(array: Any, what: str) -> Iterator[None]:
    """Raise whatever an array raises about itself as BufferError_ that names ``what``.

    Args:
        array: the array that is asked within the context.
        what: name of the argument.
    """
    try:
        yield
    except CommError:
        raise
    except Exception as error:
        raise BufferError_(
            f"{what} is a {type(array).__name__} that fails when it is asked for its "
            f"memory ({type(error).__name__}: {error}): pass an array of numpy or "
            f"torch, or one whose protocol works"
        ) from error
