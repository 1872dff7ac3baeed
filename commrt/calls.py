# SPDX-License-Identifier: Apache-2.0
"""The arguments of one collective call, checked, before anything is sent.

The native dispatcher hands a call over when it does not recognise something: this is
where it is decided what the call means, or what exactly is wrong with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from commrt.arrays import HostView, block_shape, empty_like_array, overlap, view
from commrt.dtypes import DTYPES, DType, ReduceOp, check_reduction, reduce_op
from commrt.errors import BufferError_, UsageError, suggest
from commrt.operations import OpSpec

__all__ = ["Bound", "Call", "bind", "parse"]

_BYTE = DTYPES[5]
_OPTIONS = ("nonblocking", "timeout_s", "algorithm", "backend", "params", "name")


@dataclass(frozen=True)
class Call:
    """The arguments as given."""

    spec: OpSpec
    x: Any
    out: Any
    reduction: ReduceOp
    root: int
    nonblocking: bool
    timeout_s: float | None
    algorithm: str | None
    backend: str | None
    params: Mapping[str, int | str] | None
    name: str | None


@dataclass(frozen=True)
class Bound:
    """The arguments as memory: what this rank sends from and receives into."""

    x: HostView | None
    """Send buffer, None where this rank has none."""
    out: HostView | None
    """Output, None where this rank has none."""
    result: Any
    """What the call returns on this rank."""
    dtype: DType
    num_elements: int
    """Length of the operation's full vector."""

    @property
    def in_elements(self) -> int:
        """Elements of the send buffer."""
        return 0 if self.x is None else self.x.count

    @property
    def out_elements(self) -> int:
        """Elements of the output."""
        return 0 if self.out is None else self.out.count


def parse(spec: OpSpec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """Return the call's arguments; TypeError or UsageError if they make no sense."""
    allowed = [*_OPTIONS]
    allowed += ["x", "out"] if spec.x_count != "none" else []
    allowed += ["op"] if spec.reduces else []
    allowed += ["root"] if spec.has_root else []
    for key in kwargs:
        if key not in allowed:
            raise TypeError(f"{spec.name}() has no argument {key!r}{suggest(key, allowed)}")
    most = 0 if spec.x_count == "none" else 1
    if len(args) > most or (args and "x" in kwargs):
        raise TypeError(
            f"{spec.name}() takes {'the array' if most else 'no array'}; everything "
            f"else is passed by keyword"
        )
    if most and not args and "x" not in kwargs:
        raise TypeError(f"{spec.name}() needs an array: comm.{spec.name}(x, ...)")
    op = kwargs.get("op", "sum")
    return Call(
        spec=spec,
        x=args[0] if args else kwargs.get("x"),
        out=kwargs.get("out"),
        reduction=reduce_op(op) if spec.reduces else ReduceOp.SUM,
        root=kwargs.get("root", 0),
        nonblocking=bool(kwargs.get("nonblocking", False)),
        timeout_s=_timeout(spec, kwargs.get("timeout_s")),
        algorithm=kwargs.get("algorithm"),
        backend=kwargs.get("backend"),
        params=kwargs.get("params"),
        name=kwargs.get("name"),
    )


def _timeout(spec: OpSpec, timeout_s: Any) -> float | None:
    if timeout_s is None:
        return None
    if not isinstance(timeout_s, int | float) or not timeout_s > 0:
        raise UsageError(
            f"{spec.name}: timeout_s={timeout_s!r} must be a number of seconds above 0"
        )
    return float(timeout_s)


def bind(call: Call, rank: int, size: int) -> Bound:
    """Check arrays against the operation's shapes; allocate the output if needed."""
    spec = call.spec
    check_root(spec, call.root, size)
    if spec.x_count == "none":
        return Bound(None, None, None, _BYTE, 0)
    is_root = rank == call.root
    if spec.name == "bcast":
        return _bind_bcast(call, is_root)
    if spec.name == "scatter":
        return _bind_scatter(call, is_root, size)
    x = view(call.x, f"{spec.name}: x")
    if spec.reduces:
        check_reduction(call.reduction, x.dtype)
    if spec.out_count == "div_size" or spec.name == "alltoall":
        _check_divisible(spec, x, size)
    factor = size if spec.out_count == "times_size" else 1
    full = x.count * factor
    if spec.output_on == "root" and not is_root:
        return Bound(x, None, None, x.dtype, full)
    out = _output(call, x, size)
    return Bound(x, out, _given(call, out), x.dtype, full)


def check_root(spec: OpSpec, root: Any, size: int) -> None:
    """Raise UsageError unless ``root`` is a rank."""
    if isinstance(root, bool) or not isinstance(root, int) or not 0 <= root < size:
        raise UsageError(
            f"{spec.name}: root={root!r} is not a rank of this communicator; "
            f"expected 0..{size - 1}"
        )


def _bind_bcast(call: Call, is_root: bool) -> Bound:
    """The root sends x; everybody's output is ``out``, or x itself."""
    x = view(call.x, "bcast: x")
    target = x if call.out is None else view(call.out, "bcast: out")
    if call.out is not None:
        _check_pair(call, x, target, x.count)
    if not (is_root and target is x):
        _check_writable(call.spec, target)
    result = target.owner if call.out is None else call.out
    result = call.x if call.out is None else result
    return Bound(x if is_root else None, target, result, x.dtype, x.count)


def _bind_scatter(call: Call, is_root: bool, size: int) -> Bound:
    """Only the root's x is read; elsewhere it may be None if ``out`` is given."""
    spec = call.spec
    if call.x is None:
        if is_root or call.out is None:
            missing = "x on the root" if is_root else "out= where x is None"
            raise UsageError(f"scatter: pass {missing}")
        out = view(call.out, "scatter: out")
        _check_writable(spec, out)
        return Bound(None, out, call.out, out.dtype, out.count * size)
    x = view(call.x, "scatter: x")
    _check_divisible(spec, x, size)
    out = _output(call, x, size)
    return Bound(x if is_root else None, out, _given(call, out), x.dtype, x.count)


def _given(call: Call, out: HostView) -> Any:
    """Return the object the caller knows the output by."""
    if call.out is not None:
        return call.out
    return call.x if call.spec.in_place else out.owner


def _output(call: Call, x: HostView, size: int) -> HostView:
    spec = call.spec
    if call.out is None:
        if spec.in_place:
            _check_writable(spec, x)
            return x
        times = spec.out_count == "times_size"
        shape = (size, *x.shape) if times else block_shape(x, size)
        return view(empty_like_array(x, shape), f"{spec.name}: out")
    out = view(call.out, f"{spec.name}: out")
    count = x.count
    if spec.out_count == "times_size":
        count = x.count * size
    elif spec.out_count == "div_size":
        count = x.count // size
    _check_pair(call, x, out, count)
    _check_writable(spec, out)
    return out


def _check_pair(call: Call, x: HostView, out: HostView, count: int) -> None:
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
    exact = out.address == x.address and out.count == x.count
    if overlap(x, out) and not (exact and call.spec.in_place):
        raise UsageError(
            f"{name}: out overlaps x; allowed are separate arrays"
            f"{' and out=x' if call.spec.in_place else ''}"
        )


def _check_writable(spec: OpSpec, out: HostView) -> None:
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
