# SPDX-License-Identifier: Apache-2.0
"""The arguments of one collective call, checked, before anything is sent.

The dispatcher in C++ hands a call over when it does not recognise something. Then this
module decides what the call means, or says exactly what is wrong with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any

import numpy as np

from commrt import _native
from commrt.arrays.device import is_jax
from commrt.arrays.host import (
    HostView,
    block_shape,
    copy_of,
    empty_like_array,
    never_changes,
    numpy_type,
    overlap,
    view_anywhere,
    view_new,
)
from commrt.arrays.places import places_of
from commrt.errors import BufferError_, UsageError, shown, suggest
from commrt.select.facts import Query
from commrt.vocabulary.checks import as_integer, check_flag
from commrt.vocabulary.dtypes import (
    DTYPES,
    DType,
    ReduceOp,
    check_factor,
    check_reduction,
    dtype_by_name,
)
from commrt.vocabulary.limits import check_timeout
from commrt.vocabulary.operations import OpSpec, by_name, operation
from commrt.vocabulary.reduction_names import reduce_op
from commrt.vocabulary.reductions import Reduction
from commrt.vocabulary.wire_formats import EXACT, check_compress

__all__ = [
    "Bound",
    "Call",
    "allreduce_in_place",
    "bind",
    "check_overlap",
    "check_pair",
    "check_question",
    "check_reduced",
    "check_root",
    "check_wishes",
    "check_writable",
    "output_object",
    "parse",
]

_BYTE = DTYPES[5]
_MOST_NBYTES = 2**63 - 1
_OPTIONS = (
    *("nonblocking", "timeout_s", "algorithm", "backend", "params", "name", "stream"),
)
_ELSEWHERE = {
    "async_op": "nonblocking",
    "src": "root",
    "dst": "root",
    "dest": "root",
    "source": "root",
    "timeout": "timeout_s",
    "tensor": "x",
    "input": "x",
    "sendbuf": "x",
    "output": "out",
    "recvbuf": "out",
    "algo": "algorithm",
    "recvcounts": "counts",
    "sendcounts": "send_counts",
    "input_split_sizes": "send_counts",
    "output_split_sizes": "recv_counts",
}
"""Names of arguments in torch and mpi4py, for messages."""


@dataclass(frozen=True)
class Call:
    """The arguments as given."""

    spec: OpSpec
    x: Any
    out: Any
    reduction: ReduceOp
    factor: int | float | None
    """Factor of premul_sum, else None; may differ between ranks."""
    root: int
    nonblocking: bool
    timeout_s: float | None
    algorithm: str | None
    backend: str | None
    params: Mapping[str, int | str] | None
    name: str | None
    user: Reduction | None = None
    """The user's own reduction; ``reduction`` then says nothing."""
    counts: tuple[Any, ...] = ()
    """Values of the operation's ``count_arguments``, None where not given."""
    compress: str | None = None
    """The wire format, ``none`` for exact; None: whatever a table says."""
    residual: Any = None
    """The rounding errors that earlier compressed calls still owe."""
    stream: Any = None
    """The stream that orders a call on device arrays; None: the current one."""

    def view(self, array: Any, argument: str) -> HostView:
        """Return the view of an argument, of a type that this call takes."""
        what = f"{self.spec.name}: {argument}"
        return view_anywhere(array, what, any_type=self.user is not None)

    def view_new(self, made: Any, x: HostView, shape: tuple[int, ...]) -> HostView:
        """Return the view of an output that was made for ``x`` with this shape."""
        return view_new(made, x, shape, f"{self.spec.name}: out")

    @property
    def op(self) -> str | None:
        """Name of the reduction, for messages and selection; None without one."""
        if not self.spec.reduces:
            return None
        return self.reduction.name.lower() if self.user is None else self.user.label


@dataclass(frozen=True)
class Bound:
    """The arguments as memory: what this rank sends from and receives into."""

    x: HostView | None
    """Send buffer, None where this rank has none."""
    out: HostView | None
    """Output, None where this rank has none."""
    result: Any
    """The value that the call returns on this rank."""
    dtype: DType
    num_elements: int
    """Length of the operation's full vector; of an alltoallv, what this rank sends."""
    counts: tuple[tuple[int, ...], ...] = ()
    """Elements per rank, for each of the operation's ``count_arguments``."""
    given_elements: int = 0
    """Elements of ``x`` as it was given, also where it is not sent; with counts."""
    x_is_own_block: bool = False
    """True if ``x`` is this rank's block of ``out``, and the same memory."""

    def apart(self) -> Bound:
        """Return the same with a copy of ``x``, if it is a block of ``out``."""
        if not self.x_is_own_block or self.x is None:
            return self
        return replace(self, x=copy_of(self.x), x_is_own_block=False)

    @property
    def places(self) -> _native.Places:
        """Where its arrays lie at this moment, for a call that runs more than once."""
        return places_of(each.array for each in (self.x, self.out) if each is not None)

    @property
    def in_elements(self) -> int:
        """Elements of the send buffer."""
        return 0 if self.x is None else self.x.count

    @property
    def device(self) -> int | None:
        """Number of the device of its memory; None for the host's."""
        x, out = self.x, self.out
        if x is not None and x.on is not None:
            return x.device
        return None if out is None else out.device

    @property
    def on(self) -> Any:
        """The device of its memory, of any of it; None for the host's."""
        x, out = self.x, self.out
        if x is not None and x.on is not None:
            return x.on
        return None if out is None else out.on

    @property
    def out_elements(self) -> int:
        """Elements of the output."""
        return 0 if self.out is None else self.out.count


def allreduce_in_place(
    array: HostView, reduction: ReduceOp, stream: Any = None
) -> tuple[Call, Bound]:
    """Return the nonblocking call that buckets make, with all else left open."""
    call = Call(
        spec=operation("allreduce"),
        x=array,
        out=None,
        reduction=reduction,
        factor=None,
        root=0,
        nonblocking=True,
        timeout_s=None,
        algorithm=None,
        backend=None,
        params=None,
        name=None,
        stream=stream,
    )
    return call, Bound(array, array, array, array.dtype, array.count)


def parse(spec: OpSpec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """Return the call's arguments; TypeError or UsageError if they make no sense."""
    allowed = [*_OPTIONS]
    allowed += ["x", "out"] if spec.x_count != "none" else []
    allowed += ["op", "factor"] if spec.reduces else []
    allowed += ["root"] if spec.has_root else []
    allowed += spec.count_arguments
    allowed += ["compress", "residual"] if spec.compresses else []
    kwargs = by_name(spec, args, kwargs)
    for key in kwargs:
        if key not in allowed:
            raise TypeError(
                f"{spec.name}() has no argument {shown(key)}"
                f"{suggest(key, allowed, _ELSEWHERE)}"
            )
    if not spec.is_empty and "x" not in kwargs:
        raise TypeError(f"{spec.name}() needs an array: comm.{spec.name}(x, ...)")
    params = kwargs.get("params")
    op = kwargs.get("op", "sum")
    user = op if isinstance(op, Reduction) else None
    reduction = ReduceOp.SUM if user is not None else _reduction(spec, op)
    root = kwargs.get("root", 0)
    root_rank = as_integer(root)
    return Call(
        spec=spec,
        x=kwargs.get("x"),
        out=kwargs.get("out"),
        reduction=reduction,
        factor=_factor(spec, reduction, kwargs.get("factor")),
        root=root if root_rank is None else root_rank,
        nonblocking=check_flag(
            spec.name, "nonblocking", kwargs.get("nonblocking", False)
        ),
        timeout_s=_optional_timeout(spec, kwargs.get("timeout_s")),
        algorithm=_optional_text(spec.name, "algorithm", kwargs.get("algorithm")),
        backend=_optional_text(spec.name, "backend", kwargs.get("backend")),
        params=None if params is None else _params(spec.name, params),
        name=_optional_text(spec.name, "name", kwargs.get("name")),
        user=user,
        counts=tuple(kwargs.get(argument) for argument in spec.count_arguments),
        compress=_compress(spec, kwargs.get("compress"), kwargs.get("residual")),
        residual=kwargs.get("residual"),
        stream=kwargs.get("stream"),
    )


def _compress(spec: OpSpec, compress: Any, residual: Any) -> str | None:
    try:
        found = None if compress is None else check_compress(compress)
    except UsageError as error:
        raise UsageError(f"{spec.name}: {error}") from None
    if residual is not None and found in (None, EXACT):
        raise UsageError(
            f"{spec.name}: residual= keeps what compression loses: give compress=, too"
        )
    return found


def check_question(
    what: str, coll: Any, nbytes: Any, dtype: Any, op: Any, root: Any, size: int
) -> Query:
    """Return the query of ``explain`` and ``candidates``; UsageError if it has none."""
    spec = operation(coll)
    kind = dtype_by_name(dtype)
    reduction = _reduction(spec, op)
    if spec.reduces:
        check_reduction(reduction, kind)
    number = as_integer(nbytes)
    if number is None or not 0 <= number <= _MOST_NBYTES:
        raise UsageError(
            f"{what}: nbytes={shown(nbytes)} must be a number of bytes, an integer "
            f"from 0 to {_MOST_NBYTES}"
        )
    root_rank = as_integer(root)
    if spec.has_root:
        check_root(spec, root if root_rank is None else root_rank, size)
    return Query(
        coll=spec.name,
        nbytes=0 if spec.rule_bytes == "any" else number,
        dtype=kind.name,
        op=reduction.name.lower() if spec.reduces else None,
        root=root_rank if spec.has_root else None,
    )


def _optional_timeout(spec: OpSpec, timeout_s: Any) -> float | None:
    return None if timeout_s is None else check_timeout(spec.name, timeout_s)


def check_wishes(
    what: str, backend: Any, algorithm: Any, params: Any
) -> tuple[str | None, str | None, dict[str, int | str] | None]:
    """Return what a call asks for instead of the automatic choice, checked."""
    return (
        _optional_text(what, "backend", backend),
        _optional_text(what, "algorithm", algorithm),
        None if params is None else _params(what, params),
    )


def _optional_text(what: str, argument: str, value: Any) -> str | None:
    if value is not None and not isinstance(value, str):
        raise UsageError(f"{what}: {argument}={shown(value)} must be a string or None")
    return value


def _num_contributors(spec: OpSpec) -> str:
    """Return the number of ranks that a rank's reduction combines, as a formula."""
    first, end = spec.combines
    if first is None:
        return f"rank + {end}" if end else "rank"
    return f"size - rank - {first}" if first else "size - rank"


def _reduction(spec: OpSpec, op: Any) -> ReduceOp:
    if not spec.reduces:
        return ReduceOp.SUM
    try:
        found = reduce_op(op)
    except UsageError as error:
        raise UsageError(f"{spec.name}: {error}") from None
    _native.remember_reduction(op, found)  # the engine knows it from now on
    if spec.combines_some and found is ReduceOp.AVG:
        raise UsageError(
            f"{spec.name}: op='avg' would divide by another number on every rank: take "
            f"op='sum' and divide by {_num_contributors(spec)}"
        )
    return found


def _factor(spec: OpSpec, reduction: ReduceOp, factor: Any) -> int | float | None:
    if reduction is not ReduceOp.PREMUL_SUM:
        if factor is not None:
            raise UsageError(
                f"{spec.name}: factor={shown(factor)} belongs to op='premul_sum', not "
                f"to op={reduction.name.lower()!r}"
            )
        return None
    if factor is None:
        raise UsageError(
            f"{spec.name}: op='premul_sum' needs factor=, the number that this rank's "
            f"x is multiplied by before the sum"
        )
    whole = as_integer(factor)
    if whole is not None:
        return whole
    if isinstance(factor, bool | np.bool_) or not isinstance(factor, Real):
        raise UsageError(f"{spec.name}: factor={shown(factor)} must be a real number")
    return float(factor)


def _params(what: str, params: Any) -> dict[str, int | str]:
    if not isinstance(params, Mapping):
        raise UsageError(
            f"{what}: params={shown(params)} must be a mapping of names to "
            "integers or strings"
        )
    found: dict[str, int | str] = {}
    for name, value in params.items():
        known = value if isinstance(value, str) else as_integer(value)
        if not isinstance(name, str) or known is None:
            raise UsageError(
                f"{what}: params: {shown(name)}: {shown(value)} must be a name "
                "with an integer or a string"
            )
        found[name] = known
    return found


def bind(call: Call, rank: int, size: int) -> Bound:
    """Check arrays against the operation's shapes; allocate the output if needed."""
    spec = call.spec
    check_root(spec, call.root, size)
    if spec.x_count == "none":
        return Bound(None, None, None, _BYTE, 0)
    is_root = rank == call.root
    if spec.input_on == "root":
        scatters = spec.out_count == "div_size"
        return (
            _bind_scatter(call, is_root, size)
            if scatters
            else _bind_bcast(call, is_root)
        )
    x = call.view(call.x, "x")
    if spec.reduces:
        check_reduced(call, x)
    if spec.out_count == "div_size" or spec.by_pair:
        _check_divisible(spec, x, size)
    factor = size if spec.out_count == "times_size" else 1
    full = x.count * factor
    if spec.output_on == "root" and not is_root:
        return Bound(x, None, None, x.dtype, full)
    out = _output(call, x, size)
    result = output_object(call, out)
    if not spec.in_place and _own_block(x, out, rank, size):
        if spec.out_count == "times_size":
            return Bound(x, out, result, x.dtype, full, x_is_own_block=True)
        x = copy_of(x)
    else:
        check_overlap(call, x, out)
    return Bound(x, out, result, x.dtype, full)


def check_reduced(call: Call, x: HostView) -> None:
    """Raise UsageError for a reduction or a factor that the type cannot have."""
    dtype = x.dtype
    if call.user is not None:
        wanted = call.user.dtype
        if wanted is not None and wanted != numpy_type(x):
            raise UsageError(
                f"{call.spec.name}: x has dtype {numpy_type(x)}, and the reduction "
                f"{call.user.name} takes {wanted} only"
            )
        return
    try:
        check_reduction(call.reduction, dtype)
        if call.factor is not None:
            check_factor(call.factor, dtype)
    except UsageError as error:
        raise UsageError(f"{call.spec.name}: {error}") from None


def _own_block(x: HostView, out: HostView, rank: int, size: int) -> bool:
    """Return whether one array is this rank's block of the other (NCCL's in place).

    Schedules may use all of ``out`` before they have read all of ``x``. So such an
    operation works on a copy of ``x``, unless its plan leaves that block as it is.
    """
    small, large = (x, out) if x.nbytes <= out.nbytes else (out, x)
    at = large.address + rank * small.nbytes
    return small.address == at and small.count * size == large.count


def check_root(spec: OpSpec, root: Any, size: int) -> None:
    """Raise UsageError unless ``root`` is a rank."""
    if type(root) is not int or not 0 <= root < size:
        raise UsageError(
            f"{spec.name}: root={shown(root)} is not a rank of this communicator; "
            f"expected 0..{size - 1}"
        )


def _bind_bcast(call: Call, is_root: bool) -> Bound:
    """The root sends x; everybody's output is ``out``, or x itself."""
    if call.x is None:
        name = call.spec.name
        raise BufferError_(
            f"{name}: x is None: every rank passes an array like the root's, to "
            f"receive into; {name}_object(x, root) looks at the root's x only"
        )
    x = call.view(call.x, "x")
    target = x if call.out is None else call.view(call.out, "out")
    if call.out is not None:
        check_pair(call, x, target, x.count)
        check_overlap(call, x, target)
    elif not is_root and never_changes(x):
        target = call.view_new(_new(call, x), x, x.shape)
    if not (is_root and target is x):
        check_writable(call.spec, target)
    result = output_object(call, target)
    return Bound(x if is_root else None, target, result, x.dtype, x.count)


def _bind_scatter(call: Call, is_root: bool, size: int) -> Bound:
    """Only the root's x is read; elsewhere it may be None if ``out`` is given."""
    spec = call.spec
    if call.x is None:
        if is_root or call.out is None:
            missing = "x on the root" if is_root else "out= where x is None"
            raise UsageError(f"{spec.name}: pass {missing}")
        out = call.view(call.out, "out")
        check_writable(spec, out)
        return Bound(None, out, call.out, out.dtype, out.count * size)
    x = call.view(call.x, "x")
    _check_divisible(spec, x, size)
    out = _output(call, x, size)
    if not is_root:
        return Bound(None, out, output_object(call, out), x.dtype, x.count)
    if _own_block(x, out, call.root, size):
        x = copy_of(x)
    else:
        check_overlap(call, x, out)
    return Bound(x, out, output_object(call, out), x.dtype, x.count)


def output_object(call: Call, out: HostView) -> Any:
    """Return the object the caller knows the output by."""
    if call.out is not None:
        return call.out
    return call.x if call.spec.in_place and not is_jax(call.x) else out.array


def _output(call: Call, x: HostView, size: int) -> HostView:
    spec = call.spec
    if call.out is None:
        if spec.in_place and not never_changes(x):
            check_writable(spec, x)
            return x
        if spec.in_place:
            return call.view_new(_new(call, x), x, x.shape)
        times = spec.out_count == "times_size"
        shape = (size, *x.shape) if times else block_shape(x, size)
        return call.view_new(empty_like_array(x, shape), x, shape)
    out = call.view(call.out, "out")
    count = x.count
    if spec.out_count == "times_size":
        count = x.count * size
    elif spec.out_count == "div_size":
        count = x.count // size
    check_pair(call, x, out, count)
    check_writable(spec, out)
    return out


def _new(call: Call, x: HostView) -> Any:
    """Return the array that takes the result of an ``x`` that never changes."""
    made = empty_like_array(x, x.shape)
    if call.spec.output_on == "all but rank 0":  # which has no result
        made[...] = np.asarray(call.x)
    return made


def check_pair(call: Call, x: HostView, out: HostView, count: int) -> None:
    """Raise unless ``out`` has ``count`` elements of the type of ``x``."""
    name = call.spec.name
    if out.dtype is not x.dtype:
        raise BufferError_(
            f"{name}: out has dtype {out.dtype.name}, x has {x.dtype.name}; they must "
            f"be equal"
        )
    if out.count != count:
        raise UsageError(
            f"{name}: out has {out.count} elements (shape {out.shape}), expected "
            f"{count} for x of {x.count} elements"
        )


def check_overlap(
    call: Call, x: HostView, out: HostView, *, in_place: bool | None = None
) -> None:
    """Raise UsageError where ``out`` overlaps ``x``, unless it is x and may be."""
    allowed = call.spec.in_place if in_place is None else in_place
    exact = out.address == x.address and out.count == x.count
    if overlap(x, out) and not (exact and allowed):
        also = "out=x" if call.spec.in_place else "this rank's own block"
        raise UsageError(
            f"{call.spec.name}: out overlaps x; pass separate arrays, or {also}"
        )


def check_writable(spec: OpSpec, out: HostView) -> None:
    """Raise BufferError_ for an output that cannot be written."""
    if not out.writable:
        raise BufferError_(
            f"{spec.name}: the output array is read-only: pass a writable out="
        )


def _check_divisible(spec: OpSpec, x: HostView, size: int) -> None:
    if x.count % size:
        raise UsageError(
            f"{spec.name}: x has {x.count} elements, which is not a multiple of the "
            f"{size} ranks; pad it"
        )
