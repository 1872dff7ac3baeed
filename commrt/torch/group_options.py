# SPDX-License-Identifier: Apache-2.0
"""``pg_options`` of ``init_process_group`` and ``new_group``: a group's own choices."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from commrt.backends.catalog import check_wishes
from commrt.errors import UsageError, suggest
from commrt.select.facts import ParamValue
from commrt.select.wishes import Wish, Wishes, parse_wishes
from commrt.sparse.cost import ALGORITHMS
from commrt.vocabulary.limits import check_timeout, timedelta_seconds
from commrt.vocabulary.operations import COLLECTIVES, OPERATIONS, SPARSE_OF_TORCH

__all__ = ["Options", "commrt_name"]

_NAMES = {name: spec.name for spec in OPERATIONS for name in spec.torch_calls}
"""commrt's names of the operations that torch calls otherwise."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of one process group; equal on all of its ranks.

    It comes before COMMRT_ALGORITHM and the job's table, and after
    ``commrt.torch.using``. For a field that is None the environment decides.
    """

    algorithm: str | Mapping[str, str] | None = None
    """``ring`` or ``shm/ring`` for all operations that have it; for one of them
    ``allreduce:shm/ring``, or ``{"all_reduce": "shm/ring"}``. In a mapping
    ``sparse_allreduce`` is that of sparse tensors, such as ``split``."""
    backend: str | None = None
    """The backend that runs what it can, such as ``shm`` or ``mpi``."""
    params: Mapping[str, ParamValue] | None = None
    """Parameters of ``algorithm`` and ``backend``, as in ``{"chunk": 131072}``."""
    table: str | os.PathLike[str] | None = None
    """Selection table, a file that the group's rank 0 reads, instead of the job's."""
    check: bool | None = None
    """True if every call is compared across ranks before data moves."""
    deterministic: bool | None = None
    """True if results are bitwise the same whatever algorithm runs."""
    nan_check: bool | None = None
    """True if tensors on the host with NaN or infinity are refused, before anything is
    sent."""
    timeout: timedelta | float | None = None
    """Limit of the calls, in seconds if it is a number; None: what torch is given."""
    enable_reconfigure: bool = False
    """True if the group is connected by ``dist._reconfigure`` only, as with
    ``init_process_group(enable_reconfigure=True)``; ``new_group`` has no such argument.
    """

    @property
    def timeout_s(self) -> float | None:
        """The limit in seconds; UsageError where it is none."""
        given = self.timeout
        if given is None:
            return None
        seconds = timedelta_seconds(given) if isinstance(given, timedelta) else given
        if isinstance(seconds, bool) or not isinstance(seconds, int | float):
            raise UsageError(
                f"commrt.torch.Options: timeout={given!r} must be seconds or a "
                f"timedelta"
            )
        if not seconds > 0:
            raise UsageError(f"commrt.torch.Options: timeout={given!r} must be above 0")
        return check_timeout("commrt.torch.Options", seconds)

    @property
    def _timeout(self) -> timedelta | None:
        """The limit by the name that DeviceMesh asks of any backend's options."""
        limit = self.timeout_s
        return None if limit is None else timedelta(seconds=limit)

    @property
    def sparse_algorithm(self) -> str | None:
        """Return the algorithm of sparse sums; UsageError if there is none."""
        if not isinstance(self.algorithm, Mapping):
            return None
        name = self.algorithm.get(SPARSE_OF_TORCH)
        if name is not None and name not in ALGORITHMS:
            raise UsageError(
                f"commrt.torch.Options: unknown algorithm {name!r} of {SPARSE_OF_TORCH}"
                f"{suggest(str(name), ALGORITHMS)}"
            )
        return name

    def wishes(self, who: str) -> Wishes:
        """Return the wishes of the group; UsageError for names that nothing has."""
        named: dict[str, Wish] = {}
        if isinstance(self.algorithm, Mapping):
            for name, text in self.algorithm.items():
                if name == SPARSE_OF_TORCH:
                    continue
                one = parse_wishes(f"{commrt_name(who, name)}:{text}", who)
                named |= one.named
            asked = Wishes(who, named)
        elif self.algorithm is None or isinstance(self.algorithm, str):
            asked = parse_wishes(self.algorithm, who)
        else:
            raise UsageError(
                f"{who}: algorithm={self.algorithm!r} must be a string, or a mapping "
                f"of operations to strings"
            )
        return check_wishes(self._with_backend(asked), named=True)

    def _with_backend(self, asked: Wishes) -> Wishes:
        """Add the backend to what names none, and the parameters to what is for all."""
        if self.backend is not None and not isinstance(self.backend, str):
            raise UsageError(
                f"{asked.who}: backend={self.backend!r} must be a string: a group of "
                f"several backends names them by operation, in algorithm="
            )
        named = {coll: self._completed(asked.who, w) for coll, w in asked.named.items()}
        others = asked.others
        if others is not None or (self.backend is not None and not named):
            others = self._completed(asked.who, others or Wish(), self.params or {})
        elif self.params:
            raise UsageError(
                f"{asked.who}: params={dict(self.params)!r} are of an algorithm or a "
                f"backend for all operations: name one, or write parameters of one "
                f"operation as in allreduce:shm/ring{{chunk=131072}}"
            )
        return Wishes(asked.who, named, others)

    def _completed(
        self, who: str, wish: Wish, params: Mapping[str, ParamValue] | None = None
    ) -> Wish:
        if self.backend is not None and wish.backend not in (None, self.backend):
            raise UsageError(
                f"{who}: backend={self.backend!r} contradicts {str(wish)!r}: give one "
                f"of them"
            )
        return Wish(
            wish.backend or self.backend,
            wish.algorithm,
            {**wish.params, **(params or {})},
        )


def commrt_name(who: str, name: Any) -> str:
    """Return commrt's name of an operation that may have torch's; UsageError if none.

    A function of torch.distributed stands for its name.
    """
    text = getattr(name, "__name__", name)
    if not isinstance(text, str):
        raise UsageError(
            f"{who}: {name!r} is no name of an operation; expected a string, such as "
            f"'allreduce'"
        )
    found = _NAMES.get(text, text)
    if found not in COLLECTIVES:
        known = [*COLLECTIVES, *_NAMES]
        raise UsageError(f"{who}: unknown operation {text!r}{suggest(text, known)}")
    return found
