# SPDX-License-Identifier: Apache-2.0
"""How process groups' operations run: options of groups, wishes of calls."""

from __future__ import annotations

import math
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from process_groups import job
from torch.distributed.device_mesh import init_device_mesh

from commrt import _native
from commrt.arrays.host import view
from commrt.calls.methods import if_cached
from commrt.comm import core_of
from commrt.errors import BufferError_, CommError, MismatchError, TableError, UsageError
from commrt.torch import Options, explain, using
from commrt.vocabulary.dtypes import DTYPES

DEADLINE_S = 300.0


def runs(tensor: torch.Tensor, op: Any = "all_reduce", **how: Any) -> str:
    """Return the candidate that would run, without its parameters."""
    return explain(tensor, op, **how).choice.candidate.name


# -- options -------------------------------------------------------------------------


def test_options_say_what_all_operations_and_what_one_is_to_run() -> None:
    said = Options(
        algorithm="ring,allreduce:shm/direct{chunk=4096}",
        backend="shm",
        params={"chunk": 65536},
    ).wishes("group g")
    assert str(said.others) == "shm/ring{chunk=65536}"
    assert str(said.named["allreduce"]) == "shm/direct{chunk=4096}"
    by_name = Options(algorithm={"all_reduce": "ring", "bcast": "mpi/native"})
    wishes = by_name.wishes("group g")
    assert {name: str(one) for name, one in wishes.named.items()} == {
        "allreduce": "ring",
        "bcast": "mpi/native",
    }
    assert wishes.others is None
    assert str(Options(backend="mpi").wishes("group g").others) == "mpi/*"
    assert not Options().wishes("group g")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (Options(algorithm="rign"), "g asks for 'rign', which no operation has; did"),
        (Options(algorithm={"all_reduse": "ring"}), "did you mean 'all_reduce'"),
        (Options(algorithm={"all_reduce": "pairwise"}), "which allreduce has not"),
        (Options(algorithm=3), "algorithm=3 must be a string, or a mapping"),
        (Options(backend="sm"), "g asks for 'sm', which no operation has"),
        (Options(backend=["shm"]), "backend=.'shm'. must be a string"),
        (Options(backend="mpi", algorithm="shm/ring"), "'mpi' contradicts 'shm/ring'"),
        (Options(params={"chunk": 1}), "are of an algorithm or a backend"),
    ],
)
def test_wrong_options_are_named(options: Options, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        options.wishes("g")


def test_limits_are_seconds() -> None:
    assert Options().timeout_s is None
    assert Options(timeout=2).timeout_s == 2.0
    assert Options(timeout=timedelta(milliseconds=1500)).timeout_s == 1.5
    for wrong in (0, -1, True, "1", math.nan):
        with pytest.raises(UsageError, match=r"torch\.Options: timeout="):
            _ = Options(timeout=wrong).timeout_s  # type: ignore[arg-type]


# -- groups --------------------------------------------------------------------------


def chosen(table: str) -> dict[str, Any]:
    """Groups with options, calls within contexts, and what explain says of them."""
    found: dict[str, Any] = {}
    x, block = torch.ones(1000), torch.ones(64)
    with job(pg_options=Options(algorithm="ring", timeout=770)):
        world = dist.group.WORLD
        found["limit"] = world.communicator.timeout_s
        found["group"] = str(explain(x)).splitlines()[:2]
        one = dist.new_group(
            pg_options=Options(algorithm={"all_reduce": "direct"}, check=True)
        )
        found["one"] = [runs(x, group=one), runs(x, "alltoall", group=one)]
        with using("recursive_doubling"):
            found["call"] = str(explain(x)).splitlines()[:2]
            with using(backend="shm"):
                inner = explain(x).choice
                found["inner"] = [inner.source, inner.candidate.backend]
        other = dist.new_group(pg_options=Options(table=table))
        found["table"] = [runs(x, group=other), other.communicator.table_digest]
        same = dist.new_group(pg_options=Options(deterministic=True))
        found["deterministic"] = same.communicator.deterministic
        found["operations"] = [
            runs(block, dist.all_gather_into_tensor),
            explain(block, "all_gather_into_tensor").query.nbytes,
            explain(block, "reduce_scatter_tensor").query.nbytes,
            explain(x, dist.all_to_all_single).query.nbytes,
            explain(x, "broadcast", root=1).query.root,
            explain(torch.ones(5, dtype=torch.complex64)).query.dtype,
            explain(x, reduction=dist.ReduceOp.MAX).query.op,
        ]
        with using("shm/ring{chunk=4096}"):
            dist.all_reduce(x, group=one)
            dist.all_reduce(x, async_op=True).wait()
            coalesced = [block.clone(), block[:3].clone()]
            dist.group.WORLD.allreduce_coalesced(coalesced).wait()
        found["coalesced"] = [one.sum().item() for one in coalesced]
        found["sum"] = [x[0].item(), x[-1].item()]
        labels = {plan.label for plan in core_of(world.communicator).kept_plans()}
        found["labels"] = sorted(labels)
        with using("rign"), pytest.raises(RuntimeError, match="call asks for 'rign'"):
            dist.all_reduce(x)
        dist.all_reduce(x)
        found["after"] = x[0].item()
    return found


def wrong_groups() -> list[str]:
    """What is wrong with options is said on all ranks, and nobody hangs."""
    said = []
    with job() as rank:
        for kind, options in (
            (UsageError, Options(algorithm="rign")),
            (UsageError, Options(backend="mpi")),
            (UsageError, Options(check=1)),  # type: ignore[arg-type]
            (UsageError, Options(timeout=-1)),
            (UsageError, Options(algorithm={"sparse_allreduce": "rung"})),
            (TableError, Options(table="/nowhere/t.yaml")),
            (MismatchError, Options(algorithm="ring" if rank else "direct")),
            (MismatchError, Options(check=True) if rank else None),
        ):
            with pytest.raises(kind) as raised:
                dist.new_group(pg_options=options)
            said.append(str(raised.value))
        for call in (
            lambda: explain(torch.ones(2), "all_redcue"),
            lambda: explain(torch.ones(2).to_sparse()),
            lambda: explain(torch.ones(2), group="x"),
            lambda: explain(torch.ones(2, dtype=torch.float8_e8m0fnu)),
        ):
            with pytest.raises(UsageError) as refused:
                call()
            said.append(str(refused.value))
        x = torch.ones(3)
        dist.all_reduce(x)
        assert x.tolist() == [2.0] * 3
    return said


def sparse() -> list[Any]:
    """Sums of sparse tensors are chosen by the call, then by the group."""
    found: list[Any] = []
    with job() as rank:
        options = Options(algorithm={"sparse_allreduce": "ring"})
        group = dist.new_group(pg_options=options)

        def ran() -> str:
            x = torch.eye(8)[rank : rank + 2].to_sparse()
            dist.all_reduce(x, group=group)
            want = torch.eye(8)[:2] + torch.eye(8)[1:3]
            assert torch.equal(x.to_dense(), want)
            return group.communicator.sparse_report.algorithm

        found.append(ran())
        for name in ("split", "recursive_doubling"):
            with using(name):
                found.append(ran())
        for name in ("shm/ring", "direct", "split_dense"):
            with using(name), pytest.raises(UsageError) as raised:
                ran()
            found.append(str(raised.value))
        found.append(ran())
    return found


def meshes() -> list[Any]:
    """A dimension of a DeviceMesh may have options of its own, as any group."""
    with job():
        mine = Options(algorithm="ring", timeout=550)
        mesh = init_device_mesh(
            "cpu",
            (1, 2),
            mesh_dim_names=("dp", "tp"),
            backend_override={"dp": "commrt", "tp": ("commrt", mine)},
        )
        found = []
        for name in ("dp", "tp"):
            group = mesh.get_group(name)
            x = torch.ones(1000)
            dist.all_reduce(x, group=group)
            found.append(
                [x[0].item(), runs(x, group=group), group.communicator.timeout_s]
            )
    return found


def together(table: str) -> tuple[dict[str, Any], list[str], list[Any], list[Any]]:
    """Run them in one launch."""
    return chosen(table), wrong_groups(), sparse(), meshes()


TABLE = """
schema: commrt-tune/1
machine:
  fingerprint: {fingerprint}
  cpu: {{model: none, sockets: 1, cores: 1}}
software: {{commrt: 0.1.0, python: 3.11.7}}
defaults: {{unmatched: model, tie: keep_simpler, tie_margin: 0.04}}
rules:
- op: allreduce
  match: {{bytes: [0, null]}}
  use: {{backend: shm, alg: halving_doubling}}
"""


def test_calls_groups_and_tables_choose(torchrun: Any, tmp_path: Path) -> None:
    from commrt.select.fingerprint import Cpu, Machine

    path = tmp_path / "table.yaml"
    fingerprint = Machine(Cpu("none", 1, 1)).fingerprint
    path.write_text(TABLE.format(fingerprint=fingerprint))
    env = {"COMMRT_TABLE_ANY_MACHINE": "1", "COMMRT_ALGORITHM": "alltoall:pairwise"}
    results = torchrun(2, together, table=str(path), env=env, deadline_s=DEADLINE_S)
    for found, said, sums, (alone, tensor) in results:
        assert alone[0] == 1.0
        assert tensor == [2.0, "shm/ring", 550.0]
        assert sums[:3] == ["ring", "split", "recursive_doubling"]
        assert "which sparse sums have not" in sums[3]
        assert "unknown algorithm='direct'" in sums[4]
        assert "has a dense sum" in sums[5]
        assert sums[6] == "ring"
        assert found["limit"] == 770.0
        assert found["group"][0].endswith(": shm/ring")
        assert found["group"][1] == "  why    torch group 0 (pg_options) asks for ring"
        assert found["one"] == ["shm/direct", "shm/pairwise"]
        assert found["call"][0].endswith(": shm/recursive_doubling")
        assert found["call"][1] == "  why    the call asked for it"
        assert found["inner"] == ["call", "shm"]
        assert found["table"][0] == "shm/halving_doubling"
        assert len(found["table"][1]) == 64
        assert found["deterministic"] is True
        assert found["operations"] == [
            *("shm/ring", 256, 256, 2000, 1, "float32", "max"),
        ]
        assert found["sum"] == [4.0, 4.0]
        assert found["coalesced"] == [128.0, 6.0]
        assert any("chunk=4096" in label for label in found["labels"])
        assert found["after"] == 8.0
        for text, part in zip(said, WRONG, strict=True):
            assert part in text


WRONG = (
    "(pg_options) asks for 'rign', which no operation has; did you mean 'ring'",
    "(pg_options) asks for mpi/*, which can run no operation of this group",
    "check=1 must be True or False",
    "timeout=-1 must be above 0",
    "unknown algorithm 'rung' of sparse_allreduce; did you mean 'ring'",
    "cannot open the selection table /nowhere/t.yaml",
    "rank 1 of the job: pg_options=Options(algorithm='ring'",
    "the ranks of a new communicator disagree",
    "did you mean 'all_reduce'",
    "sparse allreduce chooses by what the ranks hold",
    "expected a group of commrt's",
    "does not reduce torch.float8_e8m0fnu; expected one of",
)

BACKENDS = """
import torch, torch.distributed as dist
from commrt.torch import Options, explain
dist.init_process_group("commrt")
rank, size = dist.get_rank(), dist.get_world_size()
native = dist.new_group(pg_options=Options(algorithm="mpi/native"))
memory = dist.new_group(pg_options=Options(backend="shm"))
x = torch.ones(9)
names = [explain(x, group=g).choice.candidate.name for g in (native, memory)]
tensors = [torch.full((50_001,), rank + i + 1.0) for i in range(6)]
works = [
    dist.all_reduce(x, group=(native, memory)[i % 2], async_op=True)
    for i, x in enumerate(tensors)
]
for work in reversed(works):
    work.wait()
sums = [sum(range(i + 1, i + size + 1)) for i in range(6)]
right = all(bool((x == total).all()) for x, total in zip(tensors, sums))
blocks = torch.empty(size * 3)
dist.all_gather_into_tensor(blocks, torch.full((3,), float(rank)), group=native)
right = right and blocks.tolist() == [float(r) for r in range(size) for _ in range(3)]
print(rank, *names, right)
dist.destroy_process_group()
"""


def test_groups_of_several_backends_work_in_one_job(
    mpirun: Any, tmp_path: Path
) -> None:
    program = tmp_path / "program.py"
    program.write_text(BACKENDS)
    done = mpirun.program(3, [str(program)])
    assert done.ok, done.describe_failure()
    lines = sorted(line for line in done.stdout.splitlines() if line)
    ways = [text.partition(" ")[2] for text in lines]
    assert [text.split()[0] for text in lines] == ["0", "1", "2"]
    assert all(way == "mpi/native shm/" + way.split("/")[2] for way in ways)
    assert all(way.endswith(" True") for way in ways)


# -- tensors at a glance ---------------------------------------------------------------

NAMES = [dtype.name for dtype in DTYPES]


@pytest.mark.parametrize("name", NAMES)
def test_plain_tensors_are_seen_natively(name: str) -> None:
    for shape in ((2, 3), (), (0, 3), (4, 1, 2)):
        x = torch.zeros(shape, dtype=getattr(torch, name))
        seen = view(x, "x")
        expected = (seen.address, seen.count, seen.dtype.code)
        assert _native.view_of_tensor(x) == expected
    transposed = torch.zeros((3, 1), dtype=getattr(torch, name)).t()
    assert _native.view_of_tensor(transposed) is not None
    weight = torch.nn.Parameter(torch.zeros(3, dtype=getattr(torch, name)), False)
    assert _native.view_of_tensor(weight)[0] == weight.data_ptr()


def odd_tensors() -> dict[str, Any]:
    """Return tensors whose memory is not just their values."""

    class Mine(torch.Tensor):
        pass

    complex_zeros = torch.zeros(3, dtype=torch.complex64)
    lists = [torch.zeros(2), torch.zeros(3)]
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = torch.zeros(3)
    return {
        "conjugate": complex_zeros.conj(),
        "negative": complex_zeros.conj().imag,
        "negative_floats": torch._neg_view(torch.zeros(3)),
        "transposed": torch.zeros(2, 3).t(),
        "expanded": torch.zeros(1).expand(4),
        "zeros_nowhere": torch._efficientzerotensor(3),
        "sparse": torch.zeros(3).to_sparse(),
        "mkldnn": torch.zeros(3).to_mkldnn(),
        "nested": torch.nested.nested_tensor(lists, layout=torch.jagged),
        "meta": torch.zeros(3, device="meta"),
        "fake": fake,
        "of_a_class": torch.zeros(3).as_subclass(Mine),
        "of_an_unknown_type": torch.zeros(3, dtype=torch.float8_e5m2fnuz),
    }


@pytest.mark.filterwarnings("ignore")
def test_other_tensors_are_left_to_python() -> None:
    for name, x in odd_tensors().items():
        assert _native.view_of_tensor(x) is None, name


def test_tensors_of_transformations_are_left_to_python() -> None:
    seen: list[Any] = []

    def look(x: torch.Tensor) -> torch.Tensor:
        seen.append(_native.view_of_tensor(x))
        return x.sum()

    torch.vmap(look)(torch.zeros(2, 3))
    torch.func.grad(look)(torch.zeros(3))
    torch.func.functionalize(look)(torch.zeros(3))
    assert seen == [None] * 3


def test_what_is_not_known_at_a_glance_is_said_without_an_error() -> None:
    from commrt.local import run

    allreduce = if_cached("allreduce")

    def rank_main(comm: Any) -> list[Any]:
        x, y = torch.ones(5), torch.ones(5)
        first = allreduce(comm, x)
        comm.allreduce(y)
        said = allreduce(comm, x)
        for wrong in (torch.ones(2, 2).t(), torch.ones(2).to_sparse(), "x"):
            assert allreduce(comm, wrong) is NotImplemented
        assert allreduce(comm, x, timeout_s=300.0) is x
        assert allreduce(comm) is NotImplemented
        with pytest.raises((BufferError_, CommError)):
            comm.allreduce(torch.ones(2, 2).t())
        request = comm.allreduce(y, nonblocking=True)
        assert request.wait() is y
        return [first is NotImplemented, said is x, x[0].item(), y[4].item()]

    assert run(2, rank_main) == [[True, True, 4.0, 4.0]] * 2
