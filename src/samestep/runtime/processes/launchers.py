"""The launcher of this process, and the process's position in the run: the only file that reads rank variables.

Sources: torch.distributed.run (RANK, LOCAL_RANK, TORCHELASTIC_*), srun(1) (SLURM_PROCID, SLURM_STEP_*).
"""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from samestep.errors import JobError


@dataclass(frozen=True)
class LaunchInfo:
    """The position that a launcher gives to one process, before it joins."""

    launcher: str
    """Name of the launcher: samestep, torchrun, srun, or alone."""
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    ranks_per_node: int = 1
    host: str = ""
    port: int = 0
    path: str = ""
    """File through which samestep's workers find each other; others use host:port."""
    store_is_kept: bool = False
    """Whether the store at host:port is that of another process, and may hold what earlier starts wrote; else rank 0 holds it."""


def by_torchrun(env: Mapping[str, str]) -> bool:
    """Return whether the rank variables are set, by torchrun or by hand."""
    return "RANK" in env and "WORLD_SIZE" in env


def by_srun(env: Mapping[str, str]) -> bool:
    """Return whether srun started this process as one task of several."""
    # Only a step has SLURM_STEP_NUM_TASKS: a batch script has SLURM_PROCID=0 and its job's SLURM_NTASKS, yet runs once.
    return "SLURM_PROCID" in env and _number(env, "SLURM_STEP_NUM_TASKS", 1) > 1


def launch_info_from(env: Mapping[str, str]) -> LaunchInfo:
    """Return the position that the environment gives to this process.

    Raises:
        JobError: the variables are incomplete, or not integers.
    """
    if by_torchrun(env):
        return _torchrun_info(env)
    return _srun_info(env) if by_srun(env) else LaunchInfo("alone")


def _torchrun_info(env: Mapping[str, str]) -> LaunchInfo:
    """Read torchrun's variables, or the same ones set by hand."""
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in env]
    rank, world = _number(env, "RANK"), _number(env, "WORLD_SIZE")
    if missing and world > 1:
        raise JobError(f"RANK and WORLD_SIZE are set but {' and '.join(missing)} not; torchrun sets all of them")
    if not 0 <= rank < world:
        raise JobError(f"RANK={rank} is not a rank of WORLD_SIZE={world}; ranks are 0 to WORLD_SIZE - 1")
    if world == 1:
        return LaunchInfo("torchrun")
    per_node = _number(env, "LOCAL_WORLD_SIZE", world)
    return LaunchInfo(
        "torchrun",
        rank,
        _number(env, "LOCAL_RANK", rank % per_node),
        world,
        per_node if world % per_node == 0 else 1,
        host=env["MASTER_ADDR"],
        port=_number(env, "MASTER_PORT"),
        store_is_kept=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def _resolves(host: str) -> bool:
    try:
        socket.getaddrinfo(host, None)
    except OSError:
        return False
    return True


def _srun_info(env: Mapping[str, str], resolves: Callable[[str], bool] = _resolves) -> LaunchInfo:
    """Read the variables that srun gives to each task of a step."""
    rank, world = _number(env, "SLURM_PROCID"), _number(env, "SLURM_STEP_NUM_TASKS")
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST", "")
    host = _first_host(nodes)  # rank 0 runs there, in every distribution but `arbitrary`
    per_node = _tasks_per_node(env.get("SLURM_STEP_TASKS_PER_NODE", ""))
    if not re.search(r"[,\[]", nodes):
        host, per_node = "127.0.0.1", world
    elif not resolves(host) and "SLURM_LAUNCH_NODE_IPADDR" in env:
        host = env["SLURM_LAUNCH_NODE_IPADDR"]
    if env.get("SLURM_DISTRIBUTION", "block").startswith(("cyclic", "plane", "arbitrary")) or world % per_node:
        per_node = 1  # neighbouring ranks are not on one machine
    # Each step needs a different port that all its tasks can derive.
    port = 20000 + (_number(env, "SLURM_JOB_ID", 0) * 31 + _number(env, "SLURM_STEP_ID", 0)) % 10000
    return LaunchInfo(
        "srun",
        rank,
        _number(env, "SLURM_LOCALID", 0),
        world,
        per_node,
        host=env.get("MASTER_ADDR", host),
        port=_number(env, "MASTER_PORT", port),
    )


def _first_host(nodes: str) -> str:
    """Return the first host of a Slurm list: `n[03-05,7],m1` -> `n03`."""
    head = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", head.group() if head else "")


def _tasks_per_node(text: str) -> int:
    """Return the number of tasks on every node: `4(x2)` -> 4; 1 where they differ (`4(x2),3`) or are not given."""
    counts = {int(count) for count in re.findall(r"(\d+)(?:\(x\d+\))?(?:,|$)", text)}
    return counts.pop() if len(counts) == 1 else 1


def _number(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    """Return an integer from the environment.

    Raises:
        JobError: the variable is not an integer.
    """
    if name not in env and default is not None:
        return default
    try:
        return int(env[name])
    except ValueError:
        raise JobError(f"{name}={env[name]} is not a whole number; the launcher (torchrun, srun) sets it") from None
