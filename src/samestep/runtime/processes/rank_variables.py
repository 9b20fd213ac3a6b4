"""The variables of each launcher, and the position that they give to a process: the only file that reads them.

Sources: torch.distributed.run (RANK, LOCAL_RANK, TORCHELASTIC_*), srun(1) (SLURM_PROCID, SLURM_STEP_*), mpirun(1) of Open MPI 4.1
(OMPI_*), Hydra of MPICH 4.0 (PMI_*, MPI_LOCALRANKID), the TrainJob of Kubeflow's Trainer 2.3 (PET_*), and the documents of
SkyPilot, dstack and Flux.
"""

from __future__ import annotations

import re
import socket
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from samestep.errors import JobError
from samestep.runtime.processes.launch_info import UNKNOWN, LaunchInfo, check_local, check_rank, number, port

_FIRST_PORT, _NUM_PORTS = 20000, 10000
_MOST_LISTED = 65536
ON_HOSTS = "SAMESTEP_ON_HOSTS"
"""The variable with the lines of bash that come before the command on each host over ssh, which passes no variables on."""


@dataclass(frozen=True)
class KnownLauncher:
    """A launcher: the variables that it must set, and the function that reads them."""

    name: str
    missing: Callable[[Mapping[str, str]], Sequence[str] | None]
    """The variables that are needed and not set; None where nothing shows this launcher."""
    shown: Callable[[Mapping[str, str]], Sequence[str]]
    """The variables that show this launcher."""
    read: Callable[[Mapping[str, str]], LaunchInfo]


def _given(env: Mapping[str, str], *names: str) -> list[str]:
    return [name for name in names if env.get(name, "") != ""]


def _absent(env: Mapping[str, str], *names: str) -> list[str]:
    return [name for name in names if env.get(name, "") == ""]


_BY_HAND = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
_MASTER = ("MASTER_ADDR", "MASTER_PORT")


def _missing_torchrun(env: Mapping[str, str]) -> list[str] | None:
    if not _given(env, *_BY_HAND):
        return None
    missing = _absent(env, "RANK", "WORLD_SIZE")
    return missing or (_absent(env, *_MASTER) if number(env, "WORLD_SIZE") > 1 else [])


def _read_torchrun(env: Mapping[str, str]) -> LaunchInfo:
    """Read torchrun's variables, or the same ones set by hand or by Ray Train."""
    rank, world = number(env, "RANK"), number(env, "WORLD_SIZE")
    check_rank("RANK", rank, "WORLD_SIZE", world)
    launcher = "Ray" if "RAY_RAYLET_PID" in env and "TORCHELASTIC_RUN_ID" not in env else "torchrun"
    if world == 1:
        return LaunchInfo(launcher)
    per_node = number(env, "LOCAL_WORLD_SIZE", world)
    local = number(env, "LOCAL_RANK", UNKNOWN if "LOCAL_WORLD_SIZE" not in env else rank % max(1, per_node))
    check_local(("LOCAL_RANK", local), ("LOCAL_WORLD_SIZE", per_node), ("WORLD_SIZE", world))
    return LaunchInfo(
        launcher,
        rank,
        local,
        world,
        per_node if world % per_node == 0 else 1,
        host=env["MASTER_ADDR"],
        port=port(env, "MASTER_PORT"),
        store_is_kept=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        node=f"agent {env['GROUP_RANK']}" if "GROUP_RANK" in env else "",
    )


_BY_MPIRUN = ("OMPI_MCA_orte_launch", "OMPI_MCA_ess_base_jobid", "PRTE_LAUNCHED", "HYDI_CONTROL_FD")
"""Variables of processes that mpirun has started; its daemons may themselves be tasks of a Slurm step."""


def is_shell(env: Mapping[str, str], pid: int) -> bool:
    """Return whether a terminal of `srun --pty` runs a shell, in which this process was started."""
    return "SLURM_PTY_PORT" in env and env.get("SLURM_TASK_PID", str(pid)) != str(pid)


def missing_srun(env: Mapping[str, str]) -> list[str] | None:
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


@dataclass(frozen=True)
class _TaskVariables:
    """The variables of a launcher that gives each task its number and no address."""

    launcher: str
    rank: str
    size: str
    local_rank: tuple[str, ...]
    local_size: tuple[str, ...] = ()
    num_hosts: str = ""
    run: tuple[str, ...] = ()
    """The names of the run, one of which is set: no other run on this host has its value."""
    node: str = ""

    def shown(self, env: Mapping[str, str]) -> list[str]:
        return _given(env, self.rank, self.size)

    def missing(self, env: Mapping[str, str]) -> list[str] | None:
        """Return the variables that are needed and not set; None where nothing shows this launcher, or one task alone."""
        if not self.shown(env):
            return None
        if missing := _absent(env, self.rank, self.size):
            return missing
        if number(env, self.size) == 1 and number(env, self.rank) == 0:
            return None
        return [] if self._is_one_host(env) else _absent(env, *_MASTER)

    def _is_one_host(self, env: Mapping[str, str]) -> bool:
        size = self._first(env, self.local_size)
        return (size is not None and size == number(env, self.size)) or (
            self.num_hosts != "" and number(env, self.num_hosts, 0) == 1
        )

    def _first(self, env: Mapping[str, str], names: Sequence[str]) -> int | None:
        return next((number(env, name) for name in names if env.get(name)), None)

    def read(self, env: Mapping[str, str]) -> LaunchInfo:
        rank, world = number(env, self.rank), number(env, self.size)
        check_rank(self.rank, rank, self.size, world)
        local, here = self._first(env, self.local_rank), self._first(env, self.local_size)
        names = [*_given(env, *self.local_rank), "local rank"], [*_given(env, *self.local_size), self.size]
        local = UNKNOWN if local is None else local
        here = world if here is None else here
        check_local((names[0][0], local), (names[1][0], here), (self.size, world))
        return LaunchInfo(
            self.launcher,
            rank,
            local,
            world,
            here if world % here == 0 else 1,
            host=env.get("MASTER_ADDR", "127.0.0.1"),
            port=port(env, "MASTER_PORT", _port_of(env, self.run)),
            node=env.get(self.node, "") if self.node else "",
        )


OPEN_MPI = _TaskVariables(
    "Open MPI",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    ("OMPI_COMM_WORLD_LOCAL_RANK",),
    ("OMPI_COMM_WORLD_LOCAL_SIZE",),
    run=("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
    node="PMIX_HOSTNAME",
)
_MPICH = _TaskVariables(
    "MPICH",
    "PMI_RANK",
    "PMI_SIZE",
    ("MPI_LOCALRANKID", "PALS_LOCAL_RANKID", "PMI_LOCAL_RANK"),
    ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"),
    run=("PMI_JOBID", "PALS_APID"),
)
_FLUX = _TaskVariables(
    "Flux",
    "FLUX_TASK_RANK",
    "FLUX_JOB_SIZE",
    ("FLUX_TASK_LOCAL_ID",),
    num_hosts="FLUX_JOB_NNODES",
    run=("FLUX_JOB_ID",),
)


TASKS = tuple((launcher.rank, launcher.size) for launcher in (OPEN_MPI, _MPICH, _FLUX))
"""The variables of the rank and of their number, of launchers that give each task its number and no address."""
HOSTS = ("Kubernetes", "SkyPilot", "dstack")
"""The launchers that start one process for each host."""


def _port_of(env: Mapping[str, str], names: Sequence[str]) -> int:
    """Return a port that all processes of a run derive from its name, and other runs seldom."""
    name = next((env[name] for name in names if env.get(name)), "")
    return _FIRST_PORT + zlib.crc32(name.encode()) % _NUM_PORTS


_PET = ("PET_NNODES", "PET_MASTER_ADDR", "PET_MASTER_PORT")
_KUBERNETES = (*_PET, "PET_NODE_RANK", "PET_NPROC_PER_NODE", "JOB_COMPLETION_INDEX")


def _missing_kubernetes(env: Mapping[str, str]) -> list[str] | None:
    """Return the missing variables of a pod; one that may be the only pod of its Job is no pod of several."""
    shown = _given(env, *_PET, "PET_NODE_RANK")
    is_one = env.get("PET_NNODES") in ("1", "1:1") and env.get("PET_NODE_RANK", "0") == "0"
    if is_one or (not shown and number(env, "JOB_COMPLETION_INDEX", 0) == 0):
        return None
    index = [] if "JOB_COMPLETION_INDEX" in env else _absent(env, "PET_NODE_RANK")
    return [*_absent(env, *_PET), *index]


def _read_kubernetes(env: Mapping[str, str]) -> LaunchInfo:
    """Read the variables of one pod of several, of a TrainJob or of an indexed Job that sets the same."""
    least, _, most = env["PET_NNODES"].partition(":")
    if most and least != most:
        raise JobError(
            "launcher-variables",
            f"PET_NNODES={env['PET_NNODES']} is a range, which torchrun takes. Use torchrun --no-python samestep",
        )
    num_hosts = number({"PET_NNODES": least}, "PET_NNODES")
    index = number(env, "PET_NODE_RANK" if env.get("PET_NODE_RANK") else "JOB_COMPLETION_INDEX")
    both = _given(env, "PET_NODE_RANK", "JOB_COMPLETION_INDEX")
    if len(both) == 2 and number(env, both[0]) != number(env, both[1]):
        raise JobError(
            "launcher-variables",
            f"PET_NODE_RANK={index} contradicts JOB_COMPLETION_INDEX={env['JOB_COMPLETION_INDEX']}. Use one of both",
        )
    return _host_info(
        "Kubernetes",
        (both[0], index),
        ("PET_NNODES", num_hosts),
        env["PET_MASTER_ADDR"],
        port(env, "PET_MASTER_PORT"),
        ("PET_NPROC_PER_NODE", env.get("PET_NPROC_PER_NODE", "")),
    )


def _missing_skypilot(env: Mapping[str, str]) -> list[str] | None:
    if not _given(env, "SKYPILOT_NODE_RANK", "SKYPILOT_NODE_IPS"):
        return None
    missing = _absent(env, "SKYPILOT_NODE_RANK", "SKYPILOT_NODE_IPS")
    count = number(env, "SKYPILOT_NUM_NODES", len(env.get("SKYPILOT_NODE_IPS", "").split()))
    is_one = count == 1 and number(env, "SKYPILOT_NODE_RANK", 0) == 0
    return None if is_one and not missing else missing


def _read_skypilot(env: Mapping[str, str]) -> LaunchInfo:
    addresses = env["SKYPILOT_NODE_IPS"].split()
    num_hosts = number(env, "SKYPILOT_NUM_NODES", len(addresses))
    if num_hosts != len(addresses):
        raise JobError(
            "launcher-variables",
            f"SKYPILOT_NUM_NODES={num_hosts} contradicts the {len(addresses)} addresses of SKYPILOT_NODE_IPS",
        )
    index, at = number(env, "SKYPILOT_NODE_RANK"), port(env, "MASTER_PORT", _port_of(env, ("SKYPILOT_TASK_ID",)))
    per_host = ("SKYPILOT_NUM_GPUS_PER_NODE", env.get("SKYPILOT_NUM_GPUS_PER_NODE", ""))
    return _host_info(
        "SkyPilot", ("SKYPILOT_NODE_RANK", index), ("SKYPILOT_NUM_NODES", num_hosts), addresses[0], at, per_host
    )


_BY_DEVICE = ("", "auto", "cpu", "gpu", "xpu")
"""Words of torchrun's for the ranks of a host: as many as it has devices."""
_DSTACK = ("DSTACK_NODE_RANK", "DSTACK_NODES_NUM", "DSTACK_MASTER_NODE_IP")


def _missing_dstack(env: Mapping[str, str]) -> list[str] | None:
    is_one = number(env, "DSTACK_NODES_NUM", 0) == 1 and number(env, "DSTACK_NODE_RANK", 0) == 0
    return None if is_one or not _given(env, *_DSTACK) else _absent(env, *_DSTACK)


def _read_dstack(env: Mapping[str, str]) -> LaunchInfo:
    index, num_hosts = number(env, "DSTACK_NODE_RANK"), number(env, "DSTACK_NODES_NUM")
    at = port(env, "MASTER_PORT", _port_of(env, ("DSTACK_RUN_ID", "DSTACK_RUN_NAME")))
    per_host = ("DSTACK_GPUS_PER_NODE", env.get("DSTACK_GPUS_PER_NODE", ""))
    first = env["DSTACK_MASTER_NODE_IP"]
    return _host_info("dstack", ("DSTACK_NODE_RANK", index), ("DSTACK_NODES_NUM", num_hosts), first, at, per_host)


def _host_info(
    launcher: str, index: tuple[str, int], count: tuple[str, int], host: str, port: int, per_host: tuple[str, str]
) -> LaunchInfo:
    """Return the position of one host of several; ranks that the launcher does not count (auto, gpu, 0) are 0.

    Raises:
        JobError: the position is none of the hosts, or the ranks of a host are neither a number nor a word of torchrun's.
    """
    check_rank(*index, *count)
    ranks = 0 if per_host[1] in _BY_DEVICE else number({per_host[0]: per_host[1]}, per_host[0])
    if ranks < 0:
        raise JobError("value-out-of-range", f"{per_host[0]}={ranks} is below 0; the launcher sets it")
    return LaunchInfo(
        launcher,
        ranks_per_node=ranks,
        host=host,
        port=port,
        num_hosts=count[1],
        host_index=index[1],
        store_is_kept=True,
    )


ENGINES = (
    KnownLauncher("torchrun", _missing_torchrun, lambda env: _given(env, *_BY_HAND), _read_torchrun),
    KnownLauncher("srun", missing_srun, lambda env: _given(env, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"), _read_srun),
    KnownLauncher("Open MPI", OPEN_MPI.missing, OPEN_MPI.shown, OPEN_MPI.read),
    KnownLauncher("MPICH", _MPICH.missing, _MPICH.shown, _MPICH.read),
    KnownLauncher("Kubernetes", _missing_kubernetes, lambda env: _given(env, *_KUBERNETES), _read_kubernetes),
    KnownLauncher(
        "SkyPilot",
        _missing_skypilot,
        lambda env: _given(env, "SKYPILOT_NODE_RANK", "SKYPILOT_NODE_IPS"),
        _read_skypilot,
    ),
    KnownLauncher("dstack", _missing_dstack, lambda env: _given(env, *_DSTACK), _read_dstack),
    KnownLauncher("Flux", _FLUX.missing, _FLUX.shown, _FLUX.read),
)


def shown(launcher: str, env: Mapping[str, str]) -> tuple[str, ...]:
    """Return the variables by which a launcher is known, as NAME=VALUE; none for a process that is alone."""
    known = {"Ray": "torchrun"}.get(launcher, launcher)
    names = [name for engine in ENGINES if engine.name == known for name in engine.shown(env)]
    return tuple(f"{name}={env[name]}" for name in dict.fromkeys([*names, *_given(env, *_MASTER)]) if names)


def listed_hosts(env: Mapping[str, str]) -> tuple[str, ...]:
    """Return the hosts that a launcher lists, by the names that it uses; empty where it lists none."""
    if nodes := env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST", ""):
        return tuple(name for part in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", nodes) for name in _expanded(part))
    return tuple(env.get("SKYPILOT_NODE_IPS", "").split())


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
