# SPDX-License-Identifier: Apache-2.0
"""Starts processes with the variables that Slurm's srun gives them.

``python srun_stand_in.py NODELIST TASKS_PER_NODE PROGRAM...``, as in ``127.0.0.[1-2]
2,1 python train.py``. All of them run on this machine.
"""

from __future__ import annotations

import os
import subprocess
import sys


def variables(nodelist: str, per_node: list[int], rank: int) -> dict[str, str]:
    """Return what a task of the step finds in its environment."""
    node = next(i for i in range(len(per_node)) if sum(per_node[: i + 1]) > rank)
    first = sum(per_node[:node])
    tasks, nodes = str(sum(per_node)), str(len(per_node))
    counts = ",".join(map(str, per_node))
    return {
        "SLURM_CLUSTER_NAME": "cluster",
        "SLURM_GTIDS": ",".join(map(str, range(first, first + per_node[node]))),
        "SLURM_JOBID": "4711",
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NODELIST": nodelist,
        "SLURM_JOB_NUM_NODES": nodes,
        "SLURM_LAUNCH_NODE_IPADDR": "192.0.2.1",
        "SLURM_LOCALID": str(rank - first),
        "SLURM_NNODES": nodes,
        "SLURM_NODEID": str(node),
        "SLURM_NODELIST": nodelist,
        "SLURM_NPROCS": tasks,
        "SLURM_NTASKS": tasks,
        "SLURM_PROCID": str(rank),
        "SLURM_STEPID": "0",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": nodelist,
        "SLURM_STEP_NUM_NODES": nodes,
        "SLURM_STEP_NUM_TASKS": tasks,
        "SLURM_STEP_RESV_PORTS": os.environ.get("SLURM_STEP_RESV_PORTS", ""),
        "SLURM_STEP_TASKS_PER_NODE": counts,
        "SLURM_TASKS_PER_NODE": counts,
        "SLURM_TASK_PID": str(os.getpid()),
    }


def main() -> int:
    """Run the tasks; return the largest of their exit statuses."""
    nodelist, counts, *program = sys.argv[1:]
    per_node = [int(count) for count in counts.split(",")]
    tasks = [
        subprocess.Popen(
            program, env={**os.environ, **variables(nodelist, per_node, rank)}
        )
        for rank in range(sum(per_node))
    ]
    return max(task.wait() for task in tasks)


if __name__ == "__main__":
    sys.exit(main())
