# SPDX-License-Identifier: Apache-2.0
"""Reductions of the user's own: ``commrt.reduction(fn)`` is passed as ``op=``."""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable, Sequence
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from commrt.errors import UsageError, shown
from commrt.vocabulary.checks import check_name

__all__ = ["BoundReduction", "Reduction", "reduction"]

Bytes = npt.NDArray[np.uint8]


class Reduction:
    """A reduction of the user's own; ``commrt.reduction`` makes one.

    Attributes:
        name: what messages call it; in check mode equal on all ranks.
        commutative: whether operands may meet in any order.
        dtype: the only element type that it takes; None: any.
        address: of a C function; None for a Python one.
    """

    __slots__ = ("address", "commutative", "dtype", "fn", "name")

    def __init__(
        self, fn: Any, commutative: bool, name: str | None, dtype: Any
    ) -> None:
        self.address = _address(fn)
        if self.address is None and not callable(fn):
            raise UsageError(
                f"reduction: {shown(fn)} is neither a Python function of two arrays "
                "nor a function pointer of ctypes or cffi"
            )
        if not isinstance(commutative, bool):
            raise UsageError(
                f"reduction: commutative={shown(commutative)} must be True or False"
            )
        name = check_name("reduction", name)
        self.fn = fn
        self.commutative = commutative
        self.name = name or getattr(fn, "__name__", None) or type(fn).__name__
        self.dtype = None if dtype is None else _dtype(dtype)
        if self.address is not None and self.dtype is None:
            raise UsageError(
                f"reduction: {self.name} is a C function, which cannot see what type "
                f"the elements have: say it, as in dtype='float64'"
            )

    def __call__(self, a: Any, b: Any) -> Any:
        """Return the result of the Python function for two arrays; for a trial."""
        if self.address is not None:
            raise UsageError(f"reduction: {self.name} is a C function; call it itself")
        result = self.fn(a, b)
        return b if result is None else result

    def __repr__(self) -> str:
        kind = "commutative" if self.commutative else "in rank order"
        return f"<commrt.reduction {self.name}, {kind}>"

    @property
    def label(self) -> str:
        """The word for ``op`` where calls are compared and explained."""
        return f"{self.name}()" if self.commutative else f"{self.name}() in rank order"


@overload
def reduction(
    fn: None = None,
    *,
    commutative: bool = False,
    name: str | None = None,
    dtype: Any = None,
) -> Callable[[Any], Reduction]: ...
@overload
def reduction(
    fn: Any, *, commutative: bool = False, name: str | None = None, dtype: Any = None
) -> Reduction: ...
def reduction(
    fn: Any = None,
    *,
    commutative: bool = False,
    name: str | None = None,
    dtype: Any = None,
) -> Any:
    """Return a reduction that collectives take as ``op=``; also a decorator.

        log_sum = commrt.reduction(np.logaddexp, commutative=True)
        comm.allreduce(x, op=log_sum)

    A Python function is called as ``fn(a, b)`` with two arrays of the call's element
    type and equal lengths, where ``a`` comes from lower ranks than ``b``. It returns
    ``a ⊕ b``, an array of the same type and length; or None after writing the result
    into ``b``. Element i of the result may depend on element i of ``a`` and ``b`` only:
    arrays come in pieces. ``a`` is read-only; both may be kept. The function runs in a
    thread that waits for or calls commrt, with the GIL, and must not call commrt. An
    exception in it fails the operation with a ReductionError.

    A C function is a pointer of ctypes or cffi to
    ``void fn(const void *a, void *b, size_t count)``, which sets b[i] = a[i] ⊕ b[i].
    The engine calls it, in any thread, without the GIL.

    Args:
        fn: the function. It must be associative.
        commutative: whether operands may meet in any order. If not, they meet in rank
            order, and only algorithms that are proved to keep it are used.
        name: for messages; the function's name, if left out.
        dtype: the only element type it takes; a C function's must be said.
    """
    if fn is None:
        return lambda given: Reduction(given, commutative, name, dtype)
    return Reduction(fn, commutative, name, dtype)


def _dtype(dtype: Any) -> np.dtype[Any]:
    try:
        found: np.dtype[Any] = np.dtype(dtype)
    except Exception as error:  # noqa: BLE001 - numpy raises what the value raises
        raise UsageError(f"reduction: dtype={shown(dtype)}: {error}") from None
    return found


def _address(fn: Any) -> int | None:
    """Return the address of a C function, None for anything else."""
    if isinstance(fn, ctypes._CFuncPtr):  # type: ignore[attr-defined]
        kept = getattr(fn, "_objects", None) or {}
        if any(type(each).__name__ == "CThunkObject" for each in kept.values()):
            raise UsageError(
                "reduction: a ctypes callback into Python would wait for the GIL where "
                "others wait for it: pass the Python function itself"
            )
        address = ctypes.cast(fn, ctypes.c_void_p).value
    elif type(fn).__module__ == "_cffi_backend":
        if "(*)" not in repr(fn):
            raise UsageError(
                "reduction: of cffi a function pointer is expected, such as "
                "ffi.addressof(lib, 'name')"
            )
        ffi = importlib.import_module("cffi").FFI()
        address = int(ffi.cast("uintptr_t", fn))
    else:
        return None
    if not address:
        raise UsageError(
            "reduction: the function pointer is null: pass the address of a C function"
        )
    return address


class BoundReduction:
    """A reduction with the element type of one plan; the engine calls it."""

    def __init__(self, of: Reduction, dtype: np.dtype[Any]) -> None:
        self.reduction = of
        self.dtype = dtype
        self.error: Exception | None = None
        """The exception of the function; the cause of the operation's error."""

    @property
    def address(self) -> int:
        """Address of a C function; 0 for a Python function."""
        return self.reduction.address or 0

    def __call__(self, arrays: Sequence[Bytes]) -> Bytes | str:
        """Return the value of all arrays, lowest ranks first, or what went wrong."""
        try:
            total: npt.NDArray[Any] = arrays[0].view(self.dtype)
            for raw in arrays[1:]:
                total.flags.writeable = False
                total = self._combined(total, raw.view(self.dtype))
            return np.ascontiguousarray(total).view(np.uint8)
        except Exception as error:  # noqa: BLE001 - anything may come from a user's function
            self.error = error
            kind = type(error).__name__
            return f"the reduction {self.reduction.name} raised {kind}: {error}"

    def _combined(
        self, total: npt.NDArray[Any], operand: npt.NDArray[Any]
    ) -> npt.NDArray[Any]:
        result = self.reduction.fn(total, operand)
        if result is None:
            return operand
        found = np.asanyarray(result)
        if found.dtype != self.dtype or found.shape != total.shape:
            raise TypeError(
                f"it returned {found.dtype} of shape {found.shape}, expected "
                f"{self.dtype} of shape {total.shape}: end it with .astype(a.dtype)"
            )
        # A view: the caller's flags are not ours to change.
        own: npt.NDArray[Any] = found.view()
        return own
