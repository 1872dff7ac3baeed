# SPDX-License-Identifier: Apache-2.0
"""Wrong calls: a typed error that names what, where, what was expected and the cure.

Nothing is sent and no sequence number is used up, so the corrected call of the same
rank meets the other ranks' first one.
"""

from __future__ import annotations

import array
import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from commrt.backends.local import LocalRanks, run
from commrt.errors import BufferError_, ClosedError, UsageError

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
        "x has dtype object, which cannot be communicated; supported: bool, int8",
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
        "list",
        lambda c: c.allreduce([1.0, 2.0]),
        BufferError_,
        "allreduce: x is a list: expected a numpy array",
    ),
    (
        "number",
        lambda c: c.allreduce(1.5),
        BufferError_,
        "x is a float: expected a numpy array",
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
        TypeError,
        r"allreduce\(\) takes the array; everything else is passed by keyword",
    ),
    ("no array", lambda c: c.allreduce(), TypeError, r"allreduce\(\) needs an array"),
    (
        "array for a barrier",
        lambda c: c.barrier(np.zeros(4, F)),
        TypeError,
        r"barrier\(\) takes no array",
    ),
    (
        "unknown reduction",
        lambda c: c.allreduce(np.zeros(4, F), op="summ"),
        UsageError,
        r"unknown reduction op='summ'; did you mean 'sum'\? Known: avg, band",
    ),
    (
        "reduction that is no string",
        lambda c: c.allreduce(np.zeros(4, F), op=np.add),
        UsageError,
        r"allreduce: unknown reduction op=<ufunc 'add'>: expected a name\. Known: avg",
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
        r"allreduce: unknown reduction op=None: expected a name\. Known: avg",
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
        r"asks for 'pairwise'.*\)\. Known: direct",
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
        "chunk=0 must be a positive integer",
    ),
    (
        "parameter of another kind",
        lambda c: c.allreduce(np.zeros(4, F), params={"chunk": 1.5}),
        UsageError,
        "'chunk': 1.5 must be a name with an integer or a string",
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


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [wrong[1:] for wrong in BUFFERS + ARGUMENTS],
    ids=[wrong[0] for wrong in BUFFERS + ARGUMENTS],
)
def test_refused_before_anything_is_sent(
    call: Callable[[Any], Any], error: type[Exception], message: str
) -> None:
    def rank_main(comm: Any) -> tuple[int, float]:
        # A plan for these arguments is in the cache: neither way may let them pass.
        comm.bcast(np.zeros(4, F))
        comm.allreduce(np.zeros(4, F))
        before = comm.next_seq
        if comm.rank == 1:
            with pytest.raises(error, match=message):
                call(comm)
            with pytest.raises(error, match=message):
                call(comm)
        assert comm.next_seq == before
        total = comm.allreduce(np.ones(4, F))
        return comm.next_seq, float(total.sum())

    assert run(2, rank_main, timeout_s=20) == [(3, 8.0)] * 2


def test_integers_of_any_library_are_ranks_and_tags() -> None:
    class Index:
        def __index__(self) -> int:
            return 1

    def rank_main(comm: Any) -> list[float]:
        got = []
        for one in (np.int64(1), np.uint8(1), np.array(1), Index()):
            x = np.full(3, float(comm.rank))
            comm.bcast(x, root=one)
            comm.reduce(x, root=one)
            if comm.rank == 0:
                comm.send(x, dest=one, tag=one)
                comm.sendrecv(x, dest=one, out=x.copy(), source=one, recvtag=one)
            else:
                zero = np.int16(0)
                comm.recv(x, source=zero, tag=one)
                out = x.copy()
                comm.sendrecv(x, dest=zero, sendtag=one, out=out, source=zero)
            comm.allreduce(x, params={"chunk": np.int64(4096)})
            with comm.split(np.int64(3), key=np.int8(-comm.rank)) as turned:
                assert turned.rank == 1 - comm.rank
            with comm.create_group(np.array([1, 0])) as turned:
                assert turned.rank == 1 - comm.rank
            got.append(float(x[0]))
        return got

    assert run(2, rank_main, timeout_s=30) == [[2.0] * 4] * 2


@pytest.mark.parametrize("wrong", [True, np.True_, 1.0, np.float64(0), "0", None])
def test_what_is_no_integer_is_no_rank_and_no_tag(wrong: Any) -> None:
    def rank_main(comm: Any) -> None:
        x = np.zeros(3)
        for call, message in (
            (lambda: comm.send(x, dest=wrong), "send: dest=.* is not a rank"),
            (lambda: comm.recv(x, source=wrong), "recv: source=.* is not a rank"),
            (lambda: comm.send(x, dest=0, tag=wrong), "send: tag=.* must be an integ"),
            (lambda: comm.create_group([wrong]), "create_group: ranks=.* is not a ra"),
            (lambda: comm.split(0, wrong), "split: key=.* must be an integer"),
        ):
            with pytest.raises(UsageError, match=message):
                call()

    run(1, rank_main)


def test_usage_errors_are_python_errors_too() -> None:
    def rank_main(comm: Any) -> None:
        with pytest.raises(ValueError, match="not a rank"):
            comm.bcast(np.zeros(1), root=5)
        with pytest.raises(TypeError, match="list"):
            comm.bcast([1])

    run(1, rank_main)


def test_a_freed_communicator_says_so_everywhere() -> None:
    def rank_main(comm: Any) -> None:
        comm.allreduce(np.zeros(4, F))
        comm.free()
        comm.free()
        assert "freed" in repr(comm)
        for call in (
            lambda: comm.allreduce(np.zeros(4, F)),
            lambda: comm.barrier(),
            lambda: comm.send(np.zeros(4, F), dest=0),
            lambda: comm.recv(np.zeros(4, F), source=0),
            lambda: comm.sendrecv(np.zeros(1), dest=0, out=np.zeros(1), source=0),
            lambda: comm.split(0),
            lambda: comm.dup(),
            lambda: comm.create_group([0]),
        ):
            with pytest.raises(ClosedError, match="was freed: make a new communicator"):
                call()

    run(2, rank_main)


def test_leaving_a_with_block_frees() -> None:
    def rank_main(comm: Any) -> None:
        with comm.dup() as copy:
            copy.barrier()
        with pytest.raises(ClosedError):
            copy.barrier()
        comm.barrier()

    run(2, rank_main)


@pytest.mark.parametrize("ranks", [[0], [0, 0, 1], [0, 1, 2], [1, -1], ["1"]])
def test_groups_of_wrong_ranks(ranks: list[Any]) -> None:
    def rank_main(comm: Any) -> None:
        if comm.rank == 1:
            with pytest.raises(UsageError, match="create_group: ranks"):
                comm.create_group(ranks)
        with comm.create_group([1, 0]) as group:
            assert group.rank == 1 - comm.rank

    run(2, rank_main, timeout_s=20)


def test_splits_by_something_else_than_integers() -> None:
    def rank_main(comm: Any) -> None:
        with pytest.raises(
            UsageError, match="split: color='a' must be an integer or None"
        ):
            comm.split("a")
        with pytest.raises(UsageError, match=r"split: key=0\.5 must be an integer$"):
            comm.split(0, 0.5)
        with comm.split(0) as same:
            assert same.size == 2

    run(2, rank_main, timeout_s=20)


def test_questions_about_what_does_not_exist() -> None:
    def rank_main(comm: Any) -> None:
        with pytest.raises(UsageError, match="did you mean 'allreduce'"):
            comm.explain("all_reduce", 8)
        with pytest.raises(UsageError, match="did you mean 'float32'"):
            comm.candidates("allreduce", 8, dtype="float23")
        with pytest.raises(UsageError, match="did you mean 'sum'"):
            comm.explain("allreduce", 8, op="sun")

    run(1, rank_main)


def test_buffers_of_other_libraries_and_subclasses_work() -> None:
    class Tagged(np.ndarray):  # type: ignore[type-arg]
        pass

    def rank_main(comm: Any) -> list[float]:
        plain = array.array("d", [1.0, 2.0])
        raw = (ctypes.c_float * 2)(1.0, 2.0)
        tagged = np.array([1.0, 2.0]).view(Tagged)
        assert comm.allreduce(plain) is plain
        assert comm.allreduce(raw) is raw
        assert comm.allreduce(tagged) is tagged
        gathered = comm.allgather(memoryview(b"ab"))
        assert gathered.tolist() == [list(b"ab")] * 2
        return [plain[1], raw[1], tagged[1]]

    assert run(2, rank_main) == [[4.0, 4.0, 4.0]] * 2


def test_memory_of_a_buffer_cannot_move_while_in_flight() -> None:
    with LocalRanks(2) as ranks:
        x = array.array("d", [1.0] * 100)
        first = ranks.comms[0].allreduce(x, nonblocking=True)
        with pytest.raises(BufferError):
            x.extend([0.0] * 10_000)
        second = ranks.comms[1].allreduce(np.ones(100), nonblocking=True)
        while not (first.test() and second.test()):
            pass
        assert x[99] == 2.0
