# SPDX-License-Identifier: Apache-2.0
"""Wrong calls as data: the call, the error it must raise, a pattern of its text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from commrt.errors import BufferError_, UsageError

F = np.float32


def frozen(number: int = 4) -> Any:
    """Return a read-only array."""
    x = np.zeros(number, F)
    x.flags.writeable = False
    return x


def halves() -> tuple[Any, Any]:
    """Return two arrays that overlap without being equal."""
    whole = np.zeros(6, F)
    return whole[:4], whole[2:]


Wrong = tuple[str, Callable[[Any], Any], type[Exception], str]

BUFFERS: list[Wrong] = [
    (
        "strided",
        lambda c: c.allreduce(np.zeros(8, F)[::2]),
        BufferError_,
        r"allreduce: x with shape \(4,\) and strides \(8,\) is not C-contiguous.*"
        r"ascontiguousarray",
    ),
    (
        "fortran order",
        lambda c: c.bcast(np.zeros((2, 3), F, order="F")),
        BufferError_,
        "bcast: x .* not C-contiguous",
    ),
    (
        "broadcast view",
        lambda c: c.allgather(np.broadcast_to(np.zeros(1, F), (4,))),
        BufferError_,
        r"allgather: x .* strides \(0,\) is not C-contiguous",
    ),
    (
        "unaligned",
        lambda c: c.allreduce(np.zeros(17, np.uint8)[1:].view(F)),
        BufferError_,
        "not C-contiguous and aligned",
    ),
    (
        "read-only in place",
        lambda c: c.allreduce(frozen()),
        BufferError_,
        "allreduce: the output array is read-only: pass a writable out=",
    ),
    (
        "read-only out",
        lambda c: c.allreduce(np.zeros(4, F), out=frozen()),
        BufferError_,
        "read-only",
    ),
    (
        "objects",
        lambda c: c.allreduce(np.zeros(4, object)),
        BufferError_,
        "x has dtype object, .* as it is: its elements are references",
    ),
    (
        "strings",
        lambda c: c.bcast(np.array(["a", "b"])),
        BufferError_,
        "dtype <U1",
    ),
    (
        "structured",
        lambda c: c.allreduce(np.zeros(4, [("a", "f4"), ("b", "i4")])),
        BufferError_,
        "which cannot be communicated",
    ),
    (
        "big-endian",
        lambda c: c.allreduce(np.zeros(4, ">f4")),
        BufferError_,
        r"foreign byte order \(>f4\): convert it with x.astype",
    ),
    (
        "datetime",
        lambda c: c.allreduce(np.zeros(4, "datetime64[ns]")),
        BufferError_,
        r"datetime64\[ns\], which cannot be communicated",
    ),
    (
        "long double",
        lambda c: c.allreduce(np.zeros(4, np.longdouble)),
        BufferError_,
        "cannot be communicated",
    ),
    (
        "masked",
        lambda c: c.allreduce(np.ma.masked_less(np.zeros(4, F), 1)),
        BufferError_,
        r"masked array, whose mask would be lost: pass x.filled",
    ),
    (
        "list of words",
        lambda c: c.allreduce([1.0, "two"]),
        BufferError_,
        "allreduce: x is a list of other things than numbers",
    ),
    (
        "no array at all",
        lambda c: c.allreduce({1.5}),
        BufferError_,
        "x is a set: expected a numpy array",
    ),
    ("none", lambda c: c.allreduce(None), BufferError_, "x is a NoneType"),
    (
        "bytes as output",
        lambda c: c.allreduce(b"1234"),
        BufferError_,
        "read-only",
    ),
    (
        "out of another type",
        lambda c: c.allreduce(np.zeros(4, F), out=np.zeros(4)),
        BufferError_,
        "allreduce: out has dtype float64, x has float32; they must be equal",
    ),
    (
        "out too short",
        lambda c: c.allgather(np.zeros(4, F), out=np.zeros(7, F)),
        UsageError,
        r"allgather: out has 7 elements \(shape \(7,\)\), expected 8 for x of 4",
    ),
    (
        "out too long",
        lambda c: c.reduce_scatter(np.zeros(4, F), out=np.zeros(4, F)),
        UsageError,
        "reduce_scatter: out has 4 elements .* expected 2",
    ),
    (
        "overlap",
        lambda c: (lambda x, out: c.allreduce(x, out=out))(*halves()),
        UsageError,
        "allreduce: out overlaps x; pass separate arrays, or out=x",
    ),
    (
        "overlap with a foreign block",
        lambda c: (lambda out: c.allgather(out[2 - 2 * c.rank :][:2], out=out))(
            np.zeros(4, F)
        ),
        UsageError,
        "allgather: out overlaps x; pass separate arrays, or this rank's own block",
    ),
    (
        "not divisible",
        lambda c: c.reduce_scatter(np.zeros(5, F)),
        UsageError,
        "reduce_scatter: x has 5 elements, which is not a multiple of the 2 ranks; pad",
    ),
    (
        "alltoall not divisible",
        lambda c: c.alltoall(np.zeros(3, F)),
        UsageError,
        "not a multiple of the 2 ranks",
    ),
    (
        "scatter not divisible",
        lambda c: c.scatter(np.zeros(3, F), root=1),
        UsageError,
        "not a multiple of the 2 ranks",
    ),
    (
        "scatter without x on the root",
        lambda c: c.scatter(None, root=c.rank),
        UsageError,
        "scatter: pass x on the root",
    ),
    (
        "scatter without anything",
        lambda c: c.scatter(None, root=1 - c.rank),
        UsageError,
        "scatter: pass out= where x is None",
    ),
]

ARGUMENTS: list[Wrong] = [
    (
        "average of a prefix",
        lambda c: c.scan(np.zeros(4, F), op="avg"),
        UsageError,
        r"scan: op='avg' would divide by another number on every rank: take op='sum' "
        r"and divide by rank \+ 1",
    ),
    (
        "average of the ranks below",
        lambda c: c.explain("exscan", 64, op="avg"),
        UsageError,
        "exscan: op='avg' would divide .* divide by rank$",
    ),
    (
        "exscan into a short output",
        lambda c: c.exscan(np.zeros(4, F), out=np.zeros(3, F)),
        UsageError,
        "exscan: out has 3 elements .* expected 4",
    ),
    (
        "unknown keyword",
        lambda c: c.allreduce(np.zeros(4, F), non_blocking=True),
        TypeError,
        r"allreduce\(\) has no argument 'non_blocking'; did you mean 'nonblocking'\?",
    ),
    (
        "root where there is none",
        lambda c: c.allreduce(np.zeros(4, F), root=0),
        TypeError,
        r"allreduce\(\) has no argument 'root'",
    ),
    (
        "op where there is none",
        lambda c: c.allgather(np.zeros(4, F), op="sum"),
        TypeError,
        r"allgather\(\) has no argument 'op'",
    ),
    (
        "positional out",
        lambda c: c.allreduce(np.zeros(4, F), np.zeros(4, F)),
        UsageError,
        "unknown reduction op=array.* is an array: pass it by keyword, as out=",
    ),
    ("no array", lambda c: c.allreduce(), TypeError, r"allreduce\(\) needs an array"),
    (
        "array for a barrier",
        lambda c: c.barrier(np.zeros(4, F)),
        TypeError,
        r"barrier\(\) takes nothing by position",
    ),
    (
        "unknown reduction",
        lambda c: c.allreduce(np.zeros(4, F), op="summ"),
        UsageError,
        r"unknown reduction op='summ'; did you mean 'sum'\? Known: avg, band",
    ),
    (
        "reduction that is no string",
        lambda c: c.allreduce(np.zeros(4, F), op=np.hypot),
        UsageError,
        r"allreduce: unknown reduction op=<ufunc 'hypot'>: a function of your own is "
        r"passed as commrt\.reduction\(fn\)\. Known: avg",
    ),
    (
        "reduction without its factor",
        lambda c: c.allreduce(np.zeros(4, F), op="premul_sum"),
        UsageError,
        "allreduce: op='premul_sum' needs factor=, the number that this rank's x",
    ),
    (
        "no reduction",
        lambda c: c.allreduce(np.zeros(4, F), op=None),
        UsageError,
        r"allreduce: unknown reduction op=None: expected a name, or .*\. Known: avg",
    ),
    (
        "factor of a plain sum",
        lambda c: c.allreduce(np.zeros(4, F), factor=2.0),
        UsageError,
        r"allreduce: factor=2\.0 belongs to op='premul_sum', not to op='sum'",
    ),
    *(
        (
            f"factor {factor!r}",
            lambda c, factor=factor: c.allreduce(
                np.zeros(4, F), op="premul_sum", factor=factor
            ),
            UsageError,
            r"allreduce: factor=.* must be a real number",
        )
        for factor in (True, "2", 1j, np.ones(2), [1.0])
    ),
    (
        "fraction of integers",
        lambda c: c.allreduce(np.zeros(4, int), op="premul_sum", factor=0.5),
        UsageError,
        r"allreduce: factor=0\.5 must be an integer for int64",
    ),
    (
        "factor beyond the type",
        lambda c: c.allreduce(np.zeros(4, np.int8), op="premul_sum", factor=200),
        UsageError,
        r"allreduce: factor=200 does not fit into int8: expected -128\.\.127",
    ),
    (
        "scaled bool",
        lambda c: c.allreduce(np.zeros(4, bool), op="premul_sum", factor=2),
        UsageError,
        "allreduce: op='premul_sum' is not defined for bool",
    ),
    (
        "bitwise on floats",
        lambda c: c.allreduce(np.zeros(4, F), op="bxor"),
        UsageError,
        "op='bxor' is not defined for float32: cast the array",
    ),
    (
        "average of bool",
        lambda c: c.allreduce(np.zeros(4, bool), op="avg"),
        UsageError,
        "op='avg' is not defined for bool",
    ),
    (
        "order of complex",
        lambda c: c.allreduce(np.zeros(4, np.complex64), op="max"),
        UsageError,
        "op='max' is not defined for complex64",
    ),
    (
        "unknown algorithm",
        lambda c: c.allreduce(np.zeros(4, F), algorithm="rign"),
        UsageError,
        r"asks for 'rign', which does not exist or cannot run allreduce\(16 B.*"
        r"did you mean 'ring'\?",
    ),
    (
        "algorithm of another operation",
        lambda c: c.allreduce(np.zeros(4, F), algorithm="pairwise"),
        UsageError,
        r"asks for 'pairwise'.*\)\. Known: .*direct",
    ),
    (
        "unknown backend",
        lambda c: c.allreduce(np.zeros(4, F), backend="locl"),
        UsageError,
        r"asks for 'locl'.*did you mean 'local'\?",
    ),
    (
        "contradiction",
        lambda c: c.allreduce(np.zeros(4, F), backend="local", algorithm="mpi/ring"),
        UsageError,
        "contradicts",
    ),
    (
        "unknown parameter",
        lambda c: c.allreduce(np.zeros(4, F), params={"chnk": 3}),
        UsageError,
        r"allreduce \w+: unknown parameter 'chnk'; did you mean 'chunk'\?",
    ),
    (
        "unknown parameter in a name",
        lambda c: c.allreduce(np.zeros(4, F), algorithm="local/ring{chnk=3}"),
        UsageError,
        r"allreduce ring: unknown parameter 'chnk'; did you mean 'chunk'\?",
    ),
    (
        "unknown parameter that is a word",
        lambda c: c.bcast(np.zeros(4, F), params={"stor": "plain"}),
        UsageError,
        r"bcast \w+: unknown parameter 'stor'; did you mean 'store'\?",
    ),
    (
        "unknown parameter of the algorithm",
        lambda c: c.allreduce(np.zeros(4, F), algorithm="direct", params={"shot": 2}),
        UsageError,
        r"allreduce direct: unknown parameter 'shot'; did you mean 'shots'\?",
    ),
    (
        "backend that is no string",
        lambda c: c.allreduce(np.zeros(4, F), backend=3),
        UsageError,
        "allreduce: backend=3 must be a string or None",
    ),
    (
        "parameter out of range",
        lambda c: c.allreduce(np.zeros(4, F), params={"chunk": 0}),
        UsageError,
        r"parameter chunk=0 must be an integer in 1\.\.1073741824",
    ),
    (
        "parameter of another kind",
        lambda c: c.allreduce(np.zeros(4, F), params={"chunk": 1.5}),
        UsageError,
        "'chunk': 1.5 must be a name with an integer or a string",
    ),
    (
        "parameter too large",
        lambda c: c.allreduce(np.zeros(4, F), params={"chunk": 1 << 40}),
        UsageError,
        r"chunk=1099511627776 must be an integer in 1\.\.1073741824",
    ),
    (
        "store that is no string",
        lambda c: c.allreduce(np.zeros(4, F), params={"store": 3}),
        UsageError,
        r"unknown store=3: expected a name\. Known: auto, plain, stream",
    ),
    (
        "store of nowhere",
        lambda c: c.barrier(params={"store": "foo"}),
        UsageError,
        r"unknown store='foo'\. Known: auto, plain, stream",
    ),
    (
        "torch's name of an argument",
        lambda c: c.allreduce(np.zeros(4, F), async_op=True),
        TypeError,
        r"allreduce\(\) has no argument 'async_op'; did you mean 'nonblocking'\?",
    ),
    (
        "torch's name of the root",
        lambda c: c.reduce(np.zeros(4, F), dst=0),
        TypeError,
        r"reduce\(\) has no argument 'dst'; did you mean 'root'\?",
    ),
    (
        "a root's name where there is none",
        lambda c: c.allgather(np.zeros(4, F), dst=0),
        TypeError,
        r"allgather\(\) has no argument 'dst'\. Known: algorithm",
    ),
    (
        "a sign for a reduction",
        lambda c: c.allreduce(np.zeros(4, F), op="+"),
        UsageError,
        r"unknown reduction op='\+'; did you mean 'sum'\?",
    ),
    (
        "another library's reduction",
        lambda c: c.allreduce(np.zeros(4, F), op=np.fmax),
        UsageError,
        r"unknown reduction op=<ufunc 'fmax'>: a function of your own is passed as "
        r"commrt\.reduction\(fn\)",
    ),
    (
        "unknown store",
        lambda c: c.allreduce(np.zeros(4, F), params={"store": "strem"}),
        UsageError,
        r"store='strem'; did you mean 'stream'\?",
    ),
    (
        "parameters that are no mapping",
        lambda c: c.allreduce(np.zeros(4, F), params=[1]),
        UsageError,
        r"params=\[1\] must be a mapping",
    ),
    (
        "algorithm that is no string",
        lambda c: c.allreduce(np.zeros(4, F), algorithm=3),
        UsageError,
        "algorithm=3 must be a string or None",
    ),
    (
        "name that is no string",
        lambda c: c.barrier(name=7),
        UsageError,
        "barrier: name=7 must be a string",
    ),
    (
        "nonblocking that is no bool",
        lambda c: c.allreduce(np.zeros(4, F), nonblocking="no"),
        UsageError,
        "nonblocking='no' must be True or False",
    ),
    *(
        (
            f"root {root!r}",
            lambda c, root=root: c.bcast(np.zeros(4, F), root=root),
            UsageError,
            r"bcast: root=.* is not a rank of this communicator; expected 0\.\.1",
        )
        for root in (2, -1, 2**32, 2**70, 1.0, True, np.True_, np.int64(2), "0", None)
    ),
    *(
        (
            f"timeout {timeout_s!r}",
            lambda c, t=timeout_s: c.barrier(timeout_s=t),
            UsageError,
            "barrier: timeout_s=.* must be a number of seconds above 0",
        )
        for timeout_s in (-1, 0, float("nan"), "5", True)
    ),
]
