"""Where launchers put a process, by the variables of each."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.distributed import HashStore

from samestep.errors import JobError, LayoutError, WorkerError
from samestep.layout import Layout
from samestep.runtime.processes import join, launch_info
from samestep.runtime.processes.launch_info import LOOPBACK, LaunchInfo, check_interfaces
from samestep.runtime.processes.launchers import discover
from samestep.runtime.processes.rank_variables import _first_host, _read_srun, _tasks_per_node
from samestep.runtime.processes.this_host import agreed_name
from samestep.training.elastic import fitted_layout


def test_torchruns_variables() -> None:
    env = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "h"}
    env["MASTER_PORT"] = "29500"
    assert discover(env) == LaunchInfo("torchrun", 5, 1, 8, 4, host="h", port=29500)
    kept = env | {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "2"}
    assert discover(kept) == LaunchInfo("torchrun", 5, 1, 8, 4, host="h", port=29500, store_is_kept=True)


def test_ranks_agree_on_a_name_in_a_store_that_dead_ranks_have_written_to() -> None:
    store, names = HashStore(), []
    for _ in range(3):
        with ThreadPoolExecutor() as threads:
            took = [threads.submit(agreed_name, store, rank, 4, 20.0) for rank in (3, 1, 0, 2)]
        assert len({one.result() for one in took}) == 1
        names.append(took[0].result())
        store.set("word/2", "of a rank that died before it took the name")
    assert len({*names}) == 3
    with pytest.raises(WorkerError, match=r"rank 1 did not come to the store within 0.2 s"):
        agreed_name(store, 0, 2, 0.2)


_TASK = {"SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_STEP_NUM_TASKS": "8", "SLURM_JOB_ID": "1234"}
_TASK |= {"SLURM_STEP_ID": "3", "SLURM_STEP_NODELIST": "n[03-04]", "SLURM_STEP_TASKS_PER_NODE": "4(x2)"}
_TASK |= {"SLURM_LAUNCH_NODE_IPADDR": "10.0.0.9"}


def test_sruns_variables() -> None:
    port = 20000 + (1234 * 31 + 3) % 10000
    found = _read_srun(_TASK, resolves=lambda host: True)
    assert found == LaunchInfo("srun", 5, 1, 8, 4, host="n03", port=port)
    assert _read_srun(_TASK, resolves=lambda host: False).host == "10.0.0.9"
    assert _read_srun(_TASK | {"MASTER_ADDR": "m", "MASTER_PORT": "9"}).port == 9
    one_node = _read_srun(_TASK | {"SLURM_STEP_NODELIST": "n03", "SLURM_STEP_TASKS_PER_NODE": "8"})
    assert (one_node.host, one_node.ranks_per_node) == ("127.0.0.1", 8)
    dealt_out = _read_srun(_TASK | {"SLURM_DISTRIBUTION": "cyclic"}, resolves=lambda host: True)
    assert dealt_out.ranks_per_node == 1


@pytest.mark.parametrize(
    ("nodes", "first"), [("n1", "n1"), ("n[03-05,7],m1", "n03"), ("a,b", "a"), ("r[1-2]n[4,6]x", "r1n4x"), ("", "")]
)
def test_first_host_of_a_node_list(nodes: str, first: str) -> None:
    assert _first_host(nodes) == first


@pytest.mark.parametrize(("text", "tasks"), [("4(x2)", 4), ("4(x2),3", 1), ("2", 2), ("2,2", 2), ("", 1)])
def test_tasks_per_node(text: str, tasks: int) -> None:
    assert _tasks_per_node(text) == tasks


# ---------------------------------------------------------------- laws, of environments as each launcher makes them


@dataclass(frozen=True)
class Process:
    """One process of a run, as a launcher counts it."""

    rank: int
    world: int
    local: int
    here: int
    host: int
    num_hosts: int


@st.composite
def processes(draw: st.DrawFn) -> Process:
    """Any process of a run of at least two, on hosts with different numbers of them, in blocks or in turn."""
    counts = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4).filter(lambda counts: sum(counts) > 1))
    places = [(host, local) for host, count in enumerate(counts) for local in range(count)]
    if draw(st.booleans()):
        places.sort(key=lambda place: (place[1], place[0]))
    rank = draw(st.integers(0, len(places) - 1))
    host, local = places[rank]
    return Process(rank, len(places), local, counts[host], host, len(counts))


_AT = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}


def _by_torchrun(one: Process) -> dict[str, str]:
    given = {"RANK": one.rank, "WORLD_SIZE": one.world, "LOCAL_RANK": one.local, "LOCAL_WORLD_SIZE": one.here}
    return {name: str(value) for name, value in given.items()} | _AT


def _by_srun(one: Process) -> dict[str, str]:
    given = {"SLURM_PROCID": one.rank, "SLURM_STEP_NUM_TASKS": one.world, "SLURM_LOCALID": one.local}
    more = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": f"10.0.0.[1-{one.num_hosts}]"}
    return {name: str(value) for name, value in given.items()} | more | {"SLURMD_NODENAME": f"n{one.host}"}


def _by_open_mpi(one: Process) -> dict[str, str]:
    given = {"RANK": one.rank, "SIZE": one.world, "LOCAL_RANK": one.local, "LOCAL_SIZE": one.here}
    return {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in given.items()} | _AT


def _by_mpich(one: Process) -> dict[str, str]:
    given = {"PMI_RANK": one.rank, "PMI_SIZE": one.world, "MPI_LOCALRANKID": one.local, "MPI_LOCALNRANKS": one.here}
    return {name: str(value) for name, value in given.items()} | _AT


RANKS = {"torchrun": _by_torchrun, "srun": _by_srun, "Open MPI": _by_open_mpi, "MPICH": _by_mpich}
NEEDED = {
    "torchrun": ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    "srun": ("SLURM_PROCID", "SLURM_STEP_NODELIST", "SLURM_JOB_ID"),
    "Open MPI": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    "MPICH": ("PMI_RANK", "PMI_SIZE"),
}


@given(processes(), st.sampled_from([*RANKS]))
def test_each_launchers_variables_give_its_position(one: Process, launcher: str) -> None:
    found = discover(RANKS[launcher](one))
    assert (found.launcher, found.rank, found.world_size, found.local_rank) == (
        launcher,
        one.rank,
        one.world,
        one.local,
    )
    assert found.is_engine
    assert found.host
    assert 0 < found.port < 1 << 16


@given(processes(), st.sampled_from([*RANKS]), st.data())
def test_a_half_set_environment_is_refused_by_the_missing_variable(one: Process, launcher: str, data: Any) -> None:
    gone = data.draw(st.sampled_from(NEEDED[launcher]))
    env = RANKS[launcher](one)
    env[gone] = ""
    if data.draw(st.booleans()):
        del env[gone]
    with pytest.raises(JobError, match=rf"(set but|and) {gone}\b.* not; {launcher} sets all of them"):
        discover(env)


@given(processes(), st.lists(st.sampled_from([*RANKS]), min_size=2, max_size=4, unique=True))
def test_the_first_complete_launcher_is_taken(one: Process, launchers: list[str]) -> None:
    env: dict[str, str] = {}
    for launcher in launchers:
        env |= RANKS[launcher](one)
    found = discover(env)
    assert found.launcher == next(name for name in RANKS if name in launchers)
    assert (found.rank, found.world_size) == (one.rank, one.world)


@given(processes(), st.sampled_from([*RANKS][1:]), st.sampled_from(["RANK", "WORLD_SIZE", "LOCAL_RANK"]), st.data())
def test_a_variable_of_another_launcher_that_contradicts_is_refused_by_name(
    one: Process, launcher: str, name: str, data: Any
) -> None:
    env, right = RANKS[launcher](one), {"RANK": one.rank, "WORLD_SIZE": one.world, "LOCAL_RANK": one.local}[name]
    assert discover(env | {name: str(right)}) == discover(env)
    wrong = data.draw(st.integers(0, 20).filter(lambda number: number != right))
    with pytest.raises(JobError, match=f"{name}={wrong} contradicts {launcher}, which sets {right}"):
        discover(env | {name: str(wrong)})


@given(processes(), st.sampled_from([*RANKS]))
def test_no_rank_beyond_the_world_is_taken(one: Process, launcher: str) -> None:
    env = RANKS[launcher](dataclasses.replace(one, rank=one.world))
    with pytest.raises(JobError, match=rf"={one.world} is not a rank of \w+={one.world}"):
        discover(env)
    if launcher in ("torchrun", "Open MPI", "MPICH"):
        with pytest.raises(JobError, match=f"={one.here} contradicts"):
            discover(RANKS[launcher](dataclasses.replace(one, local=one.here)))
        with pytest.raises(JobError, match=f"={one.world + 1} contradicts"):
            discover(RANKS[launcher](dataclasses.replace(one, here=one.world + 1)))


@given(processes(), st.sampled_from([*RANKS][1:]))
def test_a_task_of_many_with_a_world_of_one_is_refused(one: Process, launcher: str) -> None:
    world_of_one = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    with pytest.raises(JobError, match=f"={one.world}, yet WORLD_SIZE=1: each of the {one.world} processes"):
        discover(RANKS[launcher](one) | world_of_one)
    with pytest.raises(JobError, match="yet WORLD_SIZE=1"):
        discover(RANKS[launcher](one) | world_of_one | {"TORCHELASTIC_RUN_ID": "x"})
    assert discover(RANKS[launcher](one) | world_of_one | {"RAY_RAYLET_PID": "1"}).launcher == "Ray"


def test_what_torchrun_starts_in_each_task_of_a_step_is_torchruns() -> None:
    task = _by_srun(Process(1, 2, 0, 1, 1, 2))
    rank = _by_torchrun(Process(5, 8, 1, 4, 1, 2)) | {"TORCHELASTIC_RUN_ID": "x", "GROUP_RANK": "1"}
    assert discover(task | rank) == LaunchInfo("torchrun", 5, 1, 8, 4, host="10.0.0.1", port=29500, node="agent 1")
    odd = _by_torchrun(Process(2, 3, 0, 1, 1, 2))
    assert discover(task | odd | {"TORCHELASTIC_RUN_ID": "x"}).world_size == 3
    with pytest.raises(JobError, match="WORLD_SIZE=3 contradicts SLURM_STEP_NUM_TASKS=2"):
        discover(task | odd)


def test_what_mpirun_starts_by_daemons_that_are_tasks_of_a_step_is_mpiruns() -> None:
    daemon, rank = _by_srun(Process(1, 2, 0, 1, 1, 2)), _by_open_mpi(Process(5, 8, 1, 4, 1, 2))
    assert discover(daemon | rank | {"OMPI_MCA_ess_base_jobid": "7"}).rank == 5
    with pytest.raises(JobError, match="OMPI_COMM_WORLD_RANK=5 contradicts srun, which sets 1"):
        discover(daemon | rank)


_JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_NTASKS": "4", "SLURM_JOB_NODELIST": "n[1-2]"}
SHELLS = {
    "salloc": _JOB,
    "sbatch": _JOB | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_TASK_PID": "10"},
    "an interactive step": _JOB | {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_ID": "4294967290"},
    "a terminal": _by_srun(Process(0, 4, 0, 2, 0, 2)) | _JOB | {"SLURM_PTY_PORT": "1", "SLURM_TASK_PID": "10"},
}


@pytest.mark.parametrize("shell", SHELLS)
def test_a_shell_inside_an_allocation_is_no_task(shell: str) -> None:
    assert discover(SHELLS[shell], pid=11) == LaunchInfo("alone", inside="Slurm job 7 of 2 nodes")


def test_a_task_in_a_terminal_is_a_task() -> None:
    assert discover(SHELLS["a terminal"], pid=10).world_size == 4


HOSTS: dict[str, Callable[[int, int, int], dict[str, str]]] = {
    "Kubernetes": lambda index, count, ranks: (
        {"PET_NNODES": f"{count}", "PET_NODE_RANK": f"{index}", "PET_NPROC_PER_NODE": f"{ranks}"}
        | {"PET_MASTER_ADDR": "h0", "PET_MASTER_PORT": "29500"}
    )
}
HOSTS_NEED = {"Kubernetes": ("PET_NNODES", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT")}


@given(st.sampled_from([*HOSTS]), st.integers(2, 5), st.integers(0, 9), st.data())
def test_a_process_on_each_host_is_told_its_host(launcher: str, count: int, ranks: int, data: Any) -> None:
    index = data.draw(st.integers(0, count - 1))
    env = HOSTS[launcher](index, count, ranks)
    found = discover(env)
    assert (found.launcher, found.host_index, found.num_hosts, found.host) == (launcher, index, count, "h0")
    assert found.ranks_per_node == ranks
    assert not found.is_engine
    gone = data.draw(st.sampled_from(HOSTS_NEED[launcher]))
    with pytest.raises(JobError, match=rf"(set but|and) {gone}\b.* not; {launcher} sets all of them"):
        discover({name: value for name, value in env.items() if name != gone})
    with pytest.raises(JobError, match=f"={count} is not a rank of"):
        discover(HOSTS[launcher](count, count, ranks))
    assert discover(HOSTS[launcher](0, 1, ranks)).launcher == "alone"
    with pytest.raises(JobError, match=f"={count}, yet WORLD_SIZE=1"):
        discover(env | {"RANK": "0", "WORLD_SIZE": "1"})


@given(processes(), st.lists(st.sampled_from(["srun", "Open MPI", "MPICH"]), min_size=2, unique=True))
def test_two_launchers_that_say_otherwise_are_refused(one: Process, launchers: list[str]) -> None:
    """A step inside of a step of another: whichever is taken first, its ranks would be counted twice."""
    assume(one.world > 1)
    other = Process(**{**dataclasses.asdict(one), "rank": (one.rank + 1) % one.world})
    first, *more = (RANKS[name](one if index == 0 else other) for index, name in enumerate(launchers))
    with pytest.raises(JobError, match="contradicts"):
        discover(first | more[0])


@pytest.mark.parametrize(
    ("env", "text"),
    [
        (
            _AT | {"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "70000"},
            "MASTER_PORT=70000 must be a port from 1 to 65535",
        ),
        (_AT | {"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "0"}, "MASTER_PORT=0 must be a port"),
        (_AT | {"RANK": "1_0", "WORLD_SIZE": "20"}, "RANK=1_0 is not a whole number"),
        (_AT | {"RANK": "0", "WORLD_SIZE": "9" * 5000}, "WORLD_SIZE=9999999999999999999999999999999999999999... is"),
        (
            HOSTS["Kubernetes"](0, 2, 1) | {"PET_NPROC_PER_NODE": "junk"},
            "PET_NPROC_PER_NODE=junk is not a whole number",
        ),
        (HOSTS["Kubernetes"](0, 2, 1) | {"PET_NPROC_PER_NODE": "-1"}, "PET_NPROC_PER_NODE=-1 is below 0"),
        (HOSTS["Kubernetes"](0, 2, 1) | {"PET_MASTER_PORT": "99999"}, "PET_MASTER_PORT=99999 must be a port"),
        (
            {
                "OMPI_COMM_WORLD_RANK": "1",
                "OMPI_COMM_WORLD_SIZE": "2",
                "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
                "PMIX_RANK": "0",
            },
            "PMIX_RANK=0 contradicts Open MPI, which sets 1",
        ),
        (
            {"SLURM_JOB_ID": "4", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "["},
            "names no host",
        ),
    ],
)
def test_what_no_launcher_sets_is_refused_by_name(env: dict[str, str], text: str) -> None:
    with pytest.raises(JobError, match=re.escape(text)):
        discover(env)


@pytest.mark.parametrize("words", [{}, {"SLURM_ARRAY_TASK_ID": "3", "SLURM_ARRAY_TASK_COUNT": "8"}])
def test_tasks_of_array_jobs_and_of_several_components(words: dict[str, str]) -> None:
    """As Slurm 22.05 sets them: a step over components has one job, one list of nodes and one count, and uneven tasks."""
    step = {
        "SLURM_HET_SIZE": "2",
        "SLURM_JOB_ID_HET_GROUP_0": "1",
        "SLURM_JOB_ID_HET_GROUP_1": "2",
        "SLURM_JOB_ID": "1",
    }
    step |= {"SLURM_STEP_NODELIST": "n[1-2]", "SLURM_STEP_TASKS_PER_NODE": "2,1", "SLURM_STEP_NUM_TASKS": "3"}
    step |= {"SLURM_STEP_ID": "0", "SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1", **words}
    found = [discover(step | {"SLURM_PROCID": f"{rank}", "SLURM_LOCALID": f"{rank % 2}"}) for rank in range(3)]
    assert [one.rank for one in found] == [0, 1, 2]
    assert {(one.world_size, one.ranks_per_node, one.host, one.port) for one in found} == {
        (3, 1, found[0].host, found[0].port)
    }
    alone = {
        "SLURM_JOB_ID": "9",
        "SLURM_PROCID": "0",
        "SLURM_STEP_NUM_TASKS": "1",
        "SLURM_STEP_NODELIST": "n1",
        **words,
    }
    assert discover(alone).world_size == 1


def test_a_pod_of_an_indexed_job() -> None:
    env = {"PET_NNODES": "2", "PET_MASTER_ADDR": "h0", "PET_MASTER_PORT": "1", "JOB_COMPLETION_INDEX": "1"}
    assert discover(env).host_index == 1
    with pytest.raises(JobError, match="PET_NODE_RANK=0 contradicts JOB_COMPLETION_INDEX=1"):
        discover(env | {"PET_NODE_RANK": "0"})
    with pytest.raises(JobError, match="JOB_COMPLETION_INDEX is set but PET_NNODES and PET_MASTER_ADDR and PET_MASTER"):
        discover({"JOB_COMPLETION_INDEX": "1"})
    assert discover({"JOB_COMPLETION_INDEX": "0"}).launcher == "alone"
    with pytest.raises(JobError, match="PET_NNODES=1:4 is a range, which torchrun takes"):
        discover(env | {"PET_NNODES": "1:4"})


@pytest.mark.parametrize(
    ("layout", "world", "taken"),
    [
        ("dp=4 tp=2", 8, "dp=4 tp=2"),
        ("dp=4 tp=2", 6, "dp=3 tp=2"),
        ("dp_replicate=2 dp_shard=2", 2, "dp_shard=2"),
        ("dp=4 tp=2", 7, ""),
        ("dp=2", 4, ""),
        ("auto", 3, "auto"),
        (None, 3, "None"),
    ],
)
def test_a_layout_for_the_ranks_that_a_launcher_has_started(layout: str | None, world: int, taken: str) -> None:
    if taken:
        assert str(fitted_layout(layout, world)) == (str(Layout(taken)) if "=" in taken else taken)
    else:
        with pytest.raises(LayoutError, match=f"and the launcher started {world}: its data degrees shrink"):
            fitted_layout(layout, world)


@pytest.mark.parametrize(
    ("variable", "value", "is_here"),
    [
        ("GLOO_SOCKET_IFNAME", "eth9", False),
        ("GLOO_SOCKET_IFNAME", "eth9,ib7", False),
        ("NCCL_SOCKET_IFNAME", "=eth9", False),
        ("GLOO_SOCKET_IFNAME", LOOPBACK, True),
        ("NCCL_SOCKET_IFNAME", f"eth9,{LOOPBACK}", True),
        ("NCCL_SOCKET_IFNAME", "^docker", True),
        ("NCCL_SOCKET_IFNAME", "", True),
    ],
)
def test_a_variable_that_names_an_interface_of_another_host_is_named(
    variable: str, value: str, is_here: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    monkeypatch.setattr(launch_info.socket, "if_nameindex", lambda: [(1, LOOPBACK), (2, "ens3")])
    if is_here:
        check_interfaces(variable)
        return
    words = (
        rf"^{variable}={value} in the environment names no .*, which has {LOOPBACK}, ens3. .* or set {variable}=ens3$"
    )
    with pytest.raises(JobError, match=words):
        check_interfaces(variable)


@pytest.mark.parametrize(("host", "knows"), [("no-such-host.invalid", False), ("127.0.0.1", True)])
def test_an_address_that_is_no_host_is_named(host: str, knows: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any) -> Any:
        raise RuntimeError("The client socket has timed out after 8000ms")

    monkeypatch.setenv("MASTER_ADDR", host)
    monkeypatch.setattr(join, "_store_of", never)
    words = (
        "timed out after"
        if knows
        else f"MASTER_ADDR={host} names no host that can be reached from here. Use the name or address"
    )
    with pytest.raises(WorkerError, match=f"rank 1 of 2 .*did not meet the other ranks at {host}:9 .*{words}"):
        join._meet(LaunchInfo("torchrun", 1, 1, 2, 2, host=host, port=9), 8.0)
