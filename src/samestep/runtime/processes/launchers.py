"""The launcher of this process, and the process's position in the run.

`discover` looks for one launcher after another, and takes the first whose variables are complete:

```
one process for each rank    torchrun, Ray Train     RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT
                             srun                    SLURM_PROCID, SLURM_STEP_*
                             mpirun of Open MPI      OMPI_COMM_WORLD_*
                             mpiexec of MPICH, PALS  PMI_RANK, PMI_SIZE
                             Flux                    FLUX_TASK_RANK, FLUX_JOB_SIZE
one process for each host    Kubernetes              PET_*, JOB_COMPLETION_INDEX
                             SkyPilot, dstack        SKYPILOT_*, DSTACK_*
```
A process that is started once on each host starts that host's ranks. Variables of which some are missing, and variables that
contradict each other, are refused by name. A shell inside an allocation has the variables of the allocation, yet is no
task of a step of several: it starts workers of its own.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

from samestep.errors import JobError
from samestep.runtime.processes.launch_info import ALONE, UNKNOWN, LaunchInfo, number
from samestep.runtime.processes.rank_variables import ENGINES, HOSTS, TASKS, is_shell, missing_srun


def discover(env: Mapping[str, str] | None = None, *, pid: int | None = None) -> LaunchInfo:
    """Return the position that the environment gives to this process.

    Args:
        env: the variables; by default those of this process.
        pid: the number of the process, by which a task of a Slurm step differs from what a shell in it starts.

    Raises:
        JobError: variables of a launcher are missing, contradict each other, or are no whole numbers.
    """
    env, pid = os.environ if env is None else env, os.getpid() if pid is None else pid
    half = ""
    for engine in ENGINES:
        if (engine.name == "srun" and is_shell(env, pid)) or (missing := engine.missing(env)) is None:
            continue
        if not missing:
            info = engine.read(env)
            _check_against_others(info, env, pid)
            return info
        shown = engine.shown(env)
        half = half or (
            f"{' and '.join(shown)} {'is' if len(shown) == 1 else 'are'} set but {' and '.join(missing)} not; "
            f"{engine.name} sets all of them"
        )
    if half:
        raise JobError("launcher-variables", half)
    return LaunchInfo(ALONE, inside=_allocation(env))


def _check_against_others(launch_info: LaunchInfo, env: Mapping[str, str], pid: int) -> None:
    """Refuse what other variables say otherwise than the launcher that was found.

    Raises:
        JobError: they contradict it.
    """
    if launch_info.num_hosts > 1:
        _check_hosts(launch_info, env)
        return
    if launch_info.launcher == "Ray":  # a cluster of Ray may be inside any step
        return
    if launch_info.launcher == "torchrun":
        for name, tasks in (*_tasks(env, pid), *_hosts(env)):
            if launch_info.world_size == 1:
                raise JobError(
                    "launcher-variables",
                    f"{name}={tasks}, yet WORLD_SIZE=1: each of the {tasks} processes would be a run of its own. Use no RANK and "
                    f"WORLD_SIZE, or torchrun --nnodes {tasks} --rdzv-backend c10d --rdzv-endpoint HOST:PORT",
                )
        for name, tasks in _tasks(env, pid):
            if "TORCHELASTIC_RUN_ID" not in env and launch_info.world_size % tasks:
                raise JobError(
                    "launcher-variables",
                    f"WORLD_SIZE={launch_info.world_size} contradicts {name}={tasks}. Use WORLD_SIZE={tasks}, or no WORLD_SIZE",
                )
        return
    theirs = {"RANK": launch_info.rank, "WORLD_SIZE": launch_info.world_size, "LOCAL_RANK": launch_info.local_rank}
    for name, value in theirs.items():
        if name in env and value != UNKNOWN and number(env, name) != value:
            raise JobError(
                "launcher-variables",
                f"{name}={env[name]} contradicts {launch_info.launcher}, which sets {value}. Remove {name}",
            )
    for name, value in _ranks_by_others(launch_info, env):
        if number(env, name, value) != value:
            raise JobError(
                "launcher-variables",
                f"{name}={env[name]} contradicts {launch_info.launcher}, which sets {value}. Use one launcher alone, inside of no step of another",
            )


def _ranks_by_others(launch_info: LaunchInfo, env: Mapping[str, str]) -> Iterator[tuple[str, int]]:
    """Yield the variables in which other launchers of ranks say where this process is, with the value that agrees."""
    if launch_info.launcher == "Open MPI":
        yield "PMIX_RANK", launch_info.rank
    for rank, size in TASKS:
        if number(env, size, 1) > 1 and env.get(rank):  # one task of one may start all of them
            yield rank, launch_info.rank
            yield size, launch_info.world_size


def _check_hosts(launch_info: LaunchInfo, env: Mapping[str, str]) -> None:
    """Refuse the position of a host that another launcher of hosts gives otherwise.

    Raises:
        JobError: they contradict each other.
    """
    for engine in ENGINES:
        if engine.name in HOSTS and engine.name != launch_info.launcher and engine.missing(env) == []:
            other = engine.read(env)
            if (other.host_index, other.num_hosts) != (launch_info.host_index, launch_info.num_hosts):
                raise JobError(
                    "launcher-variables",
                    f"{engine.name} says that this is host {other.host_index} of {other.num_hosts}, which contradicts {launch_info.launcher}, "
                    f"which sets {launch_info.host_index} of {launch_info.num_hosts}. Use the variables of one of both",
                )


def _tasks(env: Mapping[str, str], pid: int) -> Iterator[tuple[str, int]]:
    """Yield the variables in which a launcher says that this process is one of several tasks, with their number."""
    if not is_shell(env, pid) and missing_srun(env) == []:
        yield "SLURM_STEP_NUM_TASKS", number(env, "SLURM_STEP_NUM_TASKS")
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "FLUX_JOB_SIZE"):
        if number(env, name, 1) > 1:
            yield name, number(env, name)


def _hosts(env: Mapping[str, str]) -> Iterator[tuple[str, int]]:
    """Yield the variables in which a launcher says that this host is one of several, with their number."""
    for name in ("PET_NNODES", "SKYPILOT_NUM_NODES", "DSTACK_NODES_NUM"):
        if env.get(name, "").isdecimal() and int(env[name]) > 1:
            yield name, int(env[name])


def _allocation(env: Mapping[str, str]) -> str:
    """Return the allocation that this process is inside of, in words; empty where it is in none."""
    if "SLURM_JOB_ID" in env:
        nodes = env.get("SLURM_JOB_NUM_NODES") or env.get("SLURM_NNODES", "")
        of = f" of {nodes} nodes" if nodes.isdecimal() and int(nodes) > 1 else ""
        return f"Slurm job {env['SLURM_JOB_ID']}{of}"
    for name, words in (
        ("FLUX_JOB_ID", "Flux job"),
        ("SKYPILOT_TASK_ID", "SkyPilot task"),
        ("DSTACK_RUN_ID", "dstack run"),
    ):
        if name in env:
            return f"{words} {env[name]}"
    return ""
