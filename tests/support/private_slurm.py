# SPDX-License-Identifier: Apache-2.0
"""A Slurm of one's own on this machine: srun for tests, where its programs are.

Debian's and Ubuntu's packages have them (``apt-get install slurmctld slurmd munge``).
Its daemons belong to the test: they have their configuration, key, ports and files in a
folder of their own, and end with it. Two nodes are pretended, a slurmd for each; their
names are addresses of this machine, as nobody else would know them.
"""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from commrt.bootstrap.base import poll_until
from commrt.launch.mpiexec import Completed, child_environment, run_process

__all__ = ["PrivateSlurm", "private_slurm"]

NODES = ("127.0.0.1", "127.0.0.2")
DAEMONS = ("munged", "slurmctld", "slurmd")
SYSTEM = ("/usr/sbin", "/usr/local/sbin", "/sbin")
"""Where daemons are, which is not on everybody's PATH."""
START_S = 300
CONFIGURATION = """
ClusterName=private
SlurmctldHost={host}
SlurmUser={user}
SlurmdUser={user}
SlurmctldPort={ports[0]}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/linear
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SlurmdParameters=config_overrides
NodeName={names[0]} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=8
NodeName={names[1]} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=8
PartitionName=all Nodes=ALL Default=YES State=UP OverSubscribe=FORCE:8
"""


class PrivateSlurm:
    """A running Slurm, as srun sees it."""

    def __init__(self, configuration: Path) -> None:
        self._environ = {"SLURM_CONF": str(configuration)}

    def srun(
        self,
        options: str,
        *program: str,
        deadline_s: float = 300,
        **variables: str,
    ) -> Completed:
        """Run a program by ``srun OPTIONS``, and return how that ended."""
        environ = {**child_environment(program[0]), **self._environ, **variables}
        return run_process(
            ["srun", "--quiet", *options.split(), *program],
            environ,
            timeout_s=deadline_s,
        )

    def is_up(self) -> bool:
        """Whether both nodes can be given to somebody."""
        found = subprocess.run(
            ["sinfo", "--noheader", "--format=%t", "--Node"],
            env={**os.environ, **self._environ},
            capture_output=True,
            text=True,
            timeout=START_S,
            check=False,
        )
        return found.stdout.split() == ["idle"] * len(NODES)


@contextmanager
def private_slurm() -> Iterator[PrivateSlurm]:
    """Yield a Slurm that has started; skip where one of its programs is missing."""
    programs = {name: _found(name) for name in (*DAEMONS, "srun", "sinfo")}
    with tempfile.TemporaryDirectory(prefix="slurm-") as name, ExitStack() as daemons:
        folder = Path(name)
        configuration = _configured(folder)
        environ = {**os.environ, "SLURM_CONF": str(configuration)}
        munge = [
            *("--foreground", "--force", f"--key-file={folder}/munge.key"),
            *(f"--socket={folder}/munge.socket", f"--pid-file={folder}/munge.pid"),
            *(f"--seed-file={folder}/munge.seed", f"--log-file={folder}/munge.log"),
        ]
        commands = [
            [programs["munged"], *munge],
            [programs["slurmctld"], "-D", "-f", str(configuration)],
            *([programs["slurmd"], "-D", "-N", node] for node in NODES),
        ]
        said = daemons.enter_context((folder / "said.log").open("w"))
        for command in commands:
            daemons.callback(
                _end,
                subprocess.Popen(command, env=environ, stdout=said, stderr=said),
            )
            if command is commands[0]:
                poll_until((folder / "munge.socket").is_socket, START_S)
        slurm = PrivateSlurm(configuration)
        if not poll_until(slurm.is_up, START_S):
            pytest.fail((folder / "said.log").read_text()[-4000:])
        yield slurm


def _configured(folder: Path) -> Path:
    # munge lets only its owner in, and only he may have written the key.
    folder.chmod(0o755)
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    for name in ("state", *(f"spool-{node}" for node in NODES)):
        (folder / name).mkdir()
    path = folder / "slurm.conf"
    path.write_text(
        CONFIGURATION.format(
            folder=folder,
            host=socket.gethostname().partition(".")[0],
            user=pwd.getpwuid(os.getuid()).pw_name,
            ports=_free_ports(1 + len(NODES)),
            names=NODES,
        )
    )
    return path


def _free_ports(count: int) -> list[int]:
    with ExitStack() as open_ones:
        probes = [open_ones.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


def _found(name: str) -> str:
    path = shutil.which(name) or shutil.which(name, path=os.pathsep.join(SYSTEM))
    if path is None:
        pytest.skip(
            f"no {name} here, so there is no Slurm: apt-get install slurmctld slurmd "
            f"slurm-client munge"
        )
    return path


def _end(daemon: subprocess.Popen[bytes]) -> None:
    daemon.terminate()
    try:
        daemon.wait(timeout=START_S)
    except subprocess.TimeoutExpired:
        daemon.kill()
        daemon.wait()
