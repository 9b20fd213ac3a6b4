"""The variables of each launcher, and the position that they give to a process: the only file that reads them.

Sources: torch.distributed.run (RANK, LOCAL_RANK, TORCHELASTIC_*), srun(1) (SLURM_PROCID, SLURM_STEP_*), mpirun(1) of Open MPI 4.1
(OMPI_*), Hydra of MPICH 4.0 (PMI_*, MPI_LOCALRANKID), and the TrainJob of Kubeflow's Trainer 2.3 (PET_*).
"""

from __future__ import annotations

import dataclasses
import re
import socket
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from samestep.errors import JobError
from samestep.runtime.processes.launch_info import UNKNOWN, LaunchInfo, check_local, check_rank, number, port

_FIRST_PORT, _NUM_PORTS = 20000, 10000
_MOST_LISTED = 65536
_MASTER = ("MASTER_ADDR", "MASTER_PORT")
ON_HOSTS = "SAMESTEP_ON_HOSTS"
"""The variable with the lines of bash that come before the command on each host over ssh, which passes no variables on."""


def _given(env: Mapping[str, str], *names: str) -> list[str]:
    return [name for name in names if env.get(name, "") != ""]


def _absent(env: Mapping[str, str], *names: str) -> list[str]:
    return [name for name in names if env.get(name, "") == ""]


def _first(env: Mapping[str, str], names: Sequence[str]) -> int | None:
    """Return the number of the first variable that is set; None where none is."""
    return next((number(env, name) for name in _given(env, *names)), None)


def _port_of(env: Mapping[str, str], names: Sequence[str]) -> int:
    """Return a port that all processes of a run derive from its name, and other runs seldom."""
    name = next((env[name] for name in names if env.get(name)), "")
    return _FIRST_PORT + zlib.crc32(name.encode()) % _NUM_PORTS


@dataclass(frozen=True)
class Launcher:
    """The variables of a launcher, here of one that gives each task its number and no address."""

    name: str
    rank: str
    size: str
    local_rank: tuple[str, ...] = ()
    local_size: tuple[str, ...] = ()
    run: tuple[str, ...] = ()
    """The names of the run, one of which is set: no other run on this host has its value."""
    node: str = ""

    def shown(self, env: Mapping[str, str]) -> list[str]:
        """Return the variables that show this launcher."""
        return _given(env, self.rank, self.size)

    def several(self, env: Mapping[str, str]) -> int:
        """Return how many processes the launcher has started, if several; else 0."""
        size = number(env, self.size, 1)
        return size if size > 1 else 0

    def missing(self, env: Mapping[str, str]) -> list[str] | None:
        """Return the variables that are needed and not set; None where nothing shows this launcher, or one task alone."""
        if not self.shown(env):
            return None
        if missing := _absent(env, self.rank, self.size):
            return missing
        if number(env, self.size) == 1 and number(env, self.rank) == 0:
            return None
        return [] if _first(env, self.local_size) == number(env, self.size) else _absent(env, *_MASTER)

    def read(self, env: Mapping[str, str]) -> LaunchInfo:
        """Return the position of this process.

        Raises:
            JobError: the variables contradict each other, or are no numbers.
        """
        rank, world = number(env, self.rank), number(env, self.size)
        check_rank(self.rank, rank, self.size, world)
        local, here = _first(env, self.local_rank), _first(env, self.local_size)
        local, here = UNKNOWN if local is None else local, world if here is None else here
        local_name = next(iter(_given(env, *self.local_rank)), "local rank")
        here_name = next(iter(_given(env, *self.local_size)), self.size)
        check_local((local_name, local), (here_name, here), (self.size, world))
        return LaunchInfo(
            self.name,
            rank,
            local,
            world,
            here if world % here == 0 else 1,
            host=env.get("MASTER_ADDR", "127.0.0.1"),
            port=port(env, "MASTER_PORT", _port_of(env, self.run)),
            node=env.get(self.node, ""),
        )


class _Torchrun(Launcher):
    """Torchrun's variables, or the same ones set by hand or by Ray Train; a world of one is one, too."""

    def shown(self, env: Mapping[str, str]) -> list[str]:
        return _given(env, self.rank, self.size, *self.local_rank)

    def missing(self, env: Mapping[str, str]) -> list[str] | None:
        if not self.shown(env):
            return None
        missing = _absent(env, self.rank, self.size)
        return missing or (_absent(env, *_MASTER) if number(env, self.size) > 1 else [])

    def read(self, env: Mapping[str, str]) -> LaunchInfo:
        launcher = "Ray" if "RAY_RAYLET_PID" in env and "TORCHELASTIC_RUN_ID" not in env else self.name
        if number(env, self.size) == 1:
            check_rank(self.rank, number(env, self.rank), self.size, 1)
            return LaunchInfo(launcher)
        return dataclasses.replace(
            super().read(env),
            launcher=launcher,
            store_is_kept=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            node=f"agent {env['GROUP_RANK']}" if "GROUP_RANK" in env else "",
        )


class _Srun(Launcher):
    """The variables that srun gives to each task of a step."""

    def several(self, env: Mapping[str, str]) -> int:
        return super().several(env) if self.missing(env) == [] else 0

    def missing(self, env: Mapping[str, str]) -> list[str] | None:
        return _missing_srun(env)

    def read(self, env: Mapping[str, str]) -> LaunchInfo:
        return _read_srun(env)


_BY_MPIRUN = ("OMPI_MCA_orte_launch", "OMPI_MCA_ess_base_jobid", "PRTE_LAUNCHED", "HYDI_CONTROL_FD")
"""Variables of processes that mpirun has started; its daemons may themselves be tasks of a Slurm step."""


def _missing_srun(env: Mapping[str, str]) -> list[str] | None:
    """Return the missing variables of a task of a step; None for a process that is the only one of its step, or in none."""
    # Only a step has SLURM_STEP_NUM_TASKS: a batch script has SLURM_PROCID=0 and its job's SLURM_NTASKS, yet runs once.
    if _given(env, *_BY_MPIRUN):
        return None
    if "SLURM_STEP_NUM_TASKS" not in env:
        return ["SLURM_STEP_NUM_TASKS"] if number(env, "SLURM_PROCID", 0) > 0 else None
    if number(env, "SLURM_STEP_NUM_TASKS") < 2:
        return None
    needed = ["SLURM_PROCID"]
    needed += [] if "MASTER_PORT" in env else ["SLURM_JOB_ID"]
    if "MASTER_ADDR" not in env and not env.get("SLURM_JOB_NODELIST"):
        needed += ["SLURM_STEP_NODELIST"]
    return _absent(env, *needed)


def _resolves(host: str) -> bool:
    try:
        socket.getaddrinfo(host, None)
    except OSError:
        return False
    return True


def _read_srun(env: Mapping[str, str], resolves: Callable[[str], bool] = _resolves) -> LaunchInfo:
    """Read the variables that srun gives to each task of a step."""
    rank, world = number(env, "SLURM_PROCID"), number(env, "SLURM_STEP_NUM_TASKS")
    check_rank("SLURM_PROCID", rank, "SLURM_STEP_NUM_TASKS", world)
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST", "")
    host = _first_host(nodes)  # rank 0 runs there, in every distribution but `arbitrary`
    per_node = _tasks_per_node(env.get("SLURM_STEP_TASKS_PER_NODE", ""))
    if nodes and not re.search(r"[,\[]", nodes):
        host, per_node = "127.0.0.1", world
    elif not resolves(host) and "SLURM_LAUNCH_NODE_IPADDR" in env:
        host = env["SLURM_LAUNCH_NODE_IPADDR"]
    if not env.get("MASTER_ADDR", host):
        raise JobError(
            "launcher-variables",
            f"{nodes!r} of SLURM_STEP_NODELIST names no host. Start by srun, which sets it, or set MASTER_ADDR",
        )
    if env.get("SLURM_DISTRIBUTION", "block").startswith(("cyclic", "plane", "arbitrary")) or world % per_node:
        per_node = 1  # neighbouring ranks are not on one machine
    local = number(env, "SLURM_LOCALID", UNKNOWN)
    check_local(("SLURM_LOCALID", local), ("SLURM_STEP_NUM_TASKS", world), ("SLURM_STEP_NUM_TASKS", world))
    # Each step needs a different port that all its tasks can derive.
    derived = _FIRST_PORT + (number(env, "SLURM_JOB_ID", 0) * 31 + number(env, "SLURM_STEP_ID", 0)) % _NUM_PORTS
    return LaunchInfo(
        "srun",
        rank,
        local,
        world,
        per_node,
        host=env.get("MASTER_ADDR", host),
        port=port(env, "MASTER_PORT", derived),
        node=env.get("SLURMD_NODENAME", ""),
    )


def _first_host(nodes: str) -> str:
    """Return the first host of a Slurm list: `n[03-05,7],m1` -> `n03`."""
    head = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", head.group() if head else "")


def _tasks_per_node(text: str) -> int:
    """Return the number of tasks on every node: `4(x2)` -> 4; 1 where they differ (`4(x2),3`) or are not given."""
    counts = {int(count) for count in re.findall(r"(\d+)(?:\(x\d+\))?(?:,|$)", text)}
    return counts.pop() if len(counts) == 1 else 1


class HostLauncher(Launcher):
    """Kubernetes, which starts one process for each host: the rank and size of its variables count hosts."""

    def shown(self, env: Mapping[str, str]) -> list[str]:
        """Return the variables that show this launcher."""
        return _given(env, self.rank, self.size, *_POD)

    def several(self, env: Mapping[str, str]) -> int:
        """Return how many hosts there are, if several; else 0."""
        text = env.get(self.size, "")
        return int(text) if text.isdecimal() and int(text) > 1 else 0

    def missing(self, env: Mapping[str, str]) -> list[str] | None:
        """Return the variables that are needed and not set; None where nothing shows this launcher, or one host alone."""
        needed = (self.size, _ADDRESS, _PORT)
        # One that may be the only pod of its Job is no pod of several.
        is_shown = _given(env, self.rank, *needed) or number(env, _INDEX, 0) > 0
        if not is_shown or (self._count(env) == 1 and number(env, self.rank, 0) == 0):
            return None
        return [*_absent(env, *needed), *([] if _given(env, self.rank, _INDEX) else [self.rank])]

    def _count(self, env: Mapping[str, str]) -> int:
        """Return the number of hosts, also of a range that is one number."""
        least, _, most = env.get(self.size, "").partition(":")
        if most and least != most:
            raise JobError(
                "launcher-variables",
                f"{self.size}={env[self.size]} is a range, which torchrun takes. Use torchrun --no-python samestep",
            )
        return number({self.size: least}, self.size, 0)

    def read(self, env: Mapping[str, str]) -> LaunchInfo:
        """Return the position of one host of several; ranks that the launcher does not count (auto, gpu, 0) are 0.

        Raises:
            JobError: variables of the launcher contradict each other.
        """
        both, count = _given(env, self.rank, _INDEX), self._count(env)
        index = number(env, both[0])
        if len(both) == 2 and number(env, both[1]) != index:
            raise JobError(
                "launcher-variables", f"{both[0]}={index} contradicts {both[1]}={env[both[1]]}. Use one of both"
            )
        check_rank(both[0], index, self.size, count)
        ranks = 0 if env.get(_PER_HOST, "") in _BY_DEVICE else number(env, _PER_HOST)
        if ranks < 0:
            raise JobError("value-out-of-range", f"{_PER_HOST}={ranks} is below 0; the launcher sets it")
        return LaunchInfo(
            self.name,
            ranks_per_node=ranks,
            host=env[_ADDRESS],
            port=port(env, _PORT),
            num_hosts=count,
            host_index=index,
            store_is_kept=True,
        )


_POD = _INDEX, _ADDRESS, _PORT, _PER_HOST = (
    "JOB_COMPLETION_INDEX",
    "PET_MASTER_ADDR",
    "PET_MASTER_PORT",
    "PET_NPROC_PER_NODE",
)
"""The other variables of a pod: another number of the host, the address and port of the first one, and the ranks of each."""
_BY_DEVICE = ("", "auto", "cpu", "gpu", "xpu")
"""Words of torchrun's for the ranks of a host: as many as it has devices."""

ENGINES: tuple[Launcher, ...] = (
    _Torchrun("torchrun", "RANK", "WORLD_SIZE", ("LOCAL_RANK",), ("LOCAL_WORLD_SIZE",)),
    _Srun("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    Launcher(
        "Open MPI",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        ("OMPI_COMM_WORLD_LOCAL_RANK",),
        ("OMPI_COMM_WORLD_LOCAL_SIZE",),
        run=("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
        node="PMIX_HOSTNAME",
    ),
    Launcher(
        "MPICH",
        "PMI_RANK",
        "PMI_SIZE",
        ("MPI_LOCALRANKID", "PALS_LOCAL_RANKID", "PMI_LOCAL_RANK"),
        ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"),
        run=("PMI_JOBID", "PALS_APID"),
    ),
    HostLauncher("Kubernetes", "PET_NODE_RANK", "PET_NNODES"),
)


def shown(launcher: str, env: Mapping[str, str]) -> tuple[str, ...]:
    """Return the variables by which a launcher is known, as NAME=VALUE; none for a process that is alone."""
    known = {"Ray": "torchrun"}.get(launcher, launcher)
    names = [name for engine in ENGINES if engine.name == known for name in engine.shown(env)]
    return tuple(f"{name}={env[name]}" for name in dict.fromkeys([*names, *_given(env, *_MASTER)]) if names)


def listed_hosts(env: Mapping[str, str]) -> tuple[str, ...]:
    """Return the hosts that a launcher lists, by the names that it uses; empty where it lists none."""
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST", "")
    return tuple(name for part in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", nodes) for name in _expanded(part))


def _expanded(part: str) -> list[str]:
    """Return the names of one part of a Slurm list: `n[03-05,7]` -> n03, n04, n05, n7."""
    head, bracket, rest = part.partition("[")
    if not bracket:
        return [part]
    inner, _, tail = rest.partition("]")
    names = []
    for span in inner.split(","):
        first, _, last = span.partition("-")
        if not first.isdecimal() or not (last or first).isdecimal() or int(last or first) - int(first) >= _MOST_LISTED:
            return [part]
        names += [f"{head}{number:0{len(first)}d}" for number in range(int(first), int(last or first) + 1)]
    return [name + end for name in names for end in _expanded(tail)]
