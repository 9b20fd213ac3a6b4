"""Where launchers put a process: torchrun's variables, srun's, and half of them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import HashStore

from samestep.errors import JobError, WorkerError
from samestep.runtime.processes.launchers import LaunchInfo, _first_host, _srun_info, _tasks_per_node, launch_info_from
from samestep.runtime.processes.this_host import agreed_name


def test_torchruns_variables() -> None:
    env = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "h"}
    env["MASTER_PORT"] = "29500"
    assert launch_info_from(env) == LaunchInfo("torchrun", 5, 1, 8, 4, host="h", port=29500)
    kept = env | {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "2"}
    assert launch_info_from(kept) == LaunchInfo("torchrun", 5, 1, 8, 4, host="h", port=29500, store_is_kept=True)


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


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR and MASTER_PORT not; torchrun sets all of them"),
        ({"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1"}, "RANK=2 is not a rank"),
        ({"RANK": "x", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1"}, "RANK=x is not a whole number"),
    ],
)
def test_a_half_set_environment_is_refused(env: dict[str, str], words: str) -> None:
    with pytest.raises(JobError, match=words):
        launch_info_from(env)


_TASK = {"SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_STEP_NUM_TASKS": "8", "SLURM_JOB_ID": "1234"}
_TASK |= {"SLURM_STEP_ID": "3", "SLURM_STEP_NODELIST": "n[03-04]", "SLURM_STEP_TASKS_PER_NODE": "4(x2)"}
_TASK |= {"SLURM_LAUNCH_NODE_IPADDR": "10.0.0.9"}


def test_sruns_variables() -> None:
    port = 20000 + (1234 * 31 + 3) % 10000
    found = _srun_info(_TASK, resolves=lambda host: True)
    assert found == LaunchInfo("srun", 5, 1, 8, 4, host="n03", port=port)
    assert _srun_info(_TASK, resolves=lambda host: False).host == "10.0.0.9"
    assert _srun_info(_TASK | {"MASTER_ADDR": "m", "MASTER_PORT": "9"}).port == 9
    one_node = _srun_info(_TASK | {"SLURM_STEP_NODELIST": "n03", "SLURM_STEP_TASKS_PER_NODE": "8"})
    assert (one_node.host, one_node.ranks_per_node) == ("127.0.0.1", 8)
    dealt_out = _srun_info(_TASK | {"SLURM_DISTRIBUTION": "cyclic"}, resolves=lambda host: True)
    assert dealt_out.ranks_per_node == 1


@pytest.mark.parametrize(
    ("nodes", "first"), [("n1", "n1"), ("n[03-05,7],m1", "n03"), ("a,b", "a"), ("r[1-2]n[4,6]x", "r1n4x"), ("", "")]
)
def test_first_host_of_a_node_list(nodes: str, first: str) -> None:
    assert _first_host(nodes) == first


@pytest.mark.parametrize(("text", "tasks"), [("4(x2)", 4), ("4(x2),3", 1), ("2", 2), ("2,2", 2), ("", 1)])
def test_tasks_per_node(text: str, tasks: int) -> None:
    assert _tasks_per_node(text) == tasks
