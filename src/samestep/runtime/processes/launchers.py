"""The launcher of this process, and the process's position in the run.

`discover` looks for one launcher after another, and takes the first whose variables are complete:

```
one process for each rank    torchrun, Ray Train     RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT
                             srun                    SLURM_PROCID, SLURM_STEP_*
                             mpirun of Open MPI      OMPI_COMM_WORLD_*
                             mpiexec of MPICH, PALS  PMI_RANK, PMI_SIZE
one process for each host    Kubernetes              PET_*, JOB_COMPLETION_INDEX
```
A process that is started once on each host starts that host's ranks. Variables of which some are missing, and variables that
contradict each other, are refused by name. A shell inside an allocation has the variables of the allocation, yet is no
task of a step of several: it starts workers of its own.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from samestep.errors import JobError
from samestep.runtime.processes.launch_info import ALONE, UNKNOWN, LaunchInfo, number
from samestep.runtime.processes.rank_variables import ENGINES, HostLauncher, Launcher


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
        if _is_shell(engine, env, pid) or (missing := engine.missing(env)) is None:
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
    if launch_info.launcher == "Ray" or launch_info.num_hosts > 1:  # a cluster of Ray may be inside any step
        return
    others = [engine for engine in ENGINES if engine.name != launch_info.launcher]
    if launch_info.launcher == "torchrun":
        _check_processes(launch_info, env, [engine for engine in others if not _is_shell(engine, env, pid)])
        return
    names = {"RANK": launch_info.rank, "WORLD_SIZE": launch_info.world_size, "LOCAL_RANK": launch_info.local_rank}
    for name, value in names.items():
        if name in env and value != UNKNOWN and number(env, name) != value:
            raise JobError(
                "launcher-variables",
                f"{name}={env[name]} contradicts {launch_info.launcher}, which sets {value}. Remove {name}",
            )
    ranks = {"PMIX_RANK": launch_info.rank} if launch_info.launcher == "Open MPI" else {}
    for engine in others:
        # One task of one may start all of them.
        if type(engine) is Launcher and engine.several(env) and env.get(engine.rank):
            ranks |= {engine.rank: launch_info.rank, engine.size: launch_info.world_size}
    for name, value in ranks.items():
        if number(env, name, value) != value:
            raise JobError(
                "launcher-variables",
                f"{name}={env[name]} contradicts {launch_info.launcher}, which sets {value}. Use one launcher alone, inside of no step of another",
            )


def _check_processes(launch_info: LaunchInfo, env: Mapping[str, str], others: Sequence[Launcher]) -> None:
    """Refuse a world of torchrun's variables that other launchers have started several times, or in parts of other sizes."""
    for engine in others:
        if not (tasks := engine.several(env)):
            continue
        if launch_info.world_size == 1:
            raise JobError(
                "launcher-variables",
                f"{engine.size}={tasks}, yet WORLD_SIZE=1: each of the {tasks} processes would be a run of its own. Use no RANK and "
                f"WORLD_SIZE, or torchrun --nnodes {tasks} --rdzv-backend c10d --rdzv-endpoint HOST:PORT",
            )
        is_of_hosts = isinstance(engine, HostLauncher)
        if not is_of_hosts and "TORCHELASTIC_RUN_ID" not in env and launch_info.world_size % tasks:
            raise JobError(
                "launcher-variables",
                f"WORLD_SIZE={launch_info.world_size} contradicts {engine.size}={tasks}. Use WORLD_SIZE={tasks}, or no WORLD_SIZE",
            )


def _is_shell(engine: Launcher, env: Mapping[str, str], pid: int) -> bool:
    """Return whether a terminal of `srun --pty` runs a shell, in which this process was started."""
    is_terminal = engine.name == "srun" and "SLURM_PTY_PORT" in env
    return is_terminal and env.get("SLURM_TASK_PID", str(pid)) != str(pid)


def _allocation(env: Mapping[str, str]) -> str:
    """Return the allocation that this process is inside of, in words; empty where it is in none."""
    if "SLURM_JOB_ID" in env:
        nodes = env.get("SLURM_JOB_NUM_NODES") or env.get("SLURM_NNODES", "")
        of = f" of {nodes} nodes" if nodes.isdecimal() and int(nodes) > 1 else ""
        return f"Slurm job {env['SLURM_JOB_ID']}{of}"
    return ""
