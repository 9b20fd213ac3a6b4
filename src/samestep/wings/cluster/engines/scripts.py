"""The script for each engine: written, shown, kept in a file, and handed over only on request.

Each is a template in `templates/`, whose words are filled in here.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from samestep.errors import InputError, RunError, did_you_mean
from samestep.job import Job
from samestep.output.durable_files import write
from samestep.runtime.processes.rank_variables import ON_HOSTS
from samestep.training import run_folder
from samestep.wings.cluster.engines.launch_request import LaunchRequest, filled, read_site, shell, wanted_of


def _kubernetes(request: LaunchRequest) -> str:
    """Return the manifest of Kubernetes: an indexed Job with a headless Service, or a TrainJob of Kubeflow's Trainer.

    Each pod runs the command once, which starts the ranks of its node (`host_share.py`): the pods meet at the name that the Service
    gives to the first one. A pod that is evicted gets SIGTERM, saves and ends with status 143, which does not count as a failure; all
    pods start again and resume. The template is YAML, with values in JSON, so that no text is read as something else. Sources: the API
    of batch/v1, Kubernetes 1.37, and of trainer.kubeflow.org/v1alpha1, Trainer 2.3.

    Raises:
        InputError: the site names no image.
    """
    site = request.site.kubernetes
    if not site.image:
        raise InputError(
            "launch-nodes", '--on kubernetes needs the image of pods. Set image = "..." in [kubernetes] of --cluster'
        )
    is_train_job = site.kind == "TrainJob"
    # The Trainer gives its pods the variables of their rendezvous; the pods of a Job have the same ones from here.
    meeting = {
        "PET_NNODES": str(request.nodes),
        "PET_NPROC_PER_NODE": str(request.ranks_per_node),
        "PET_MASTER_ADDR": f"{request.name}-0.{request.name}",
        "PET_MASTER_PORT": str(site.port),
    }
    variables = ({} if is_train_job else meeting) | request.site.run.environment
    environment = [{"name": name, "value": _literal(value)} for name, value in variables.items()]
    limits = {"limits": {site.gpu: str(site.gpus_per_node)}}
    volumes: list[dict[str, Any]] = [{"name": "shm", "emptyDir": {"medium": "Memory"}}]
    mounts = [{"name": "shm", "mountPath": "/dev/shm"}]
    if site.claim:
        volumes.append({"name": "shared", "persistentVolumeClaim": {"claimName": site.claim}})
        mounts.append({"name": "shared", "mountPath": site.at})
    metadata = {"name": request.name, **({"namespace": site.namespace} if site.namespace else {})}
    values: Mapping[str, Any] = {
        "metadata": metadata, "run": request.name, "image": site.image, "nodes": request.nodes, "runtime": site.runtime,
        "ranks_per_node": request.ranks_per_node, "failures": site.restarts * request.nodes, "grace_s": site.grace_s,
        "port": site.port, "volumes": volumes, "mounts": mounts,
    }  # fmt: skip
    indent = " " * (4 if is_train_job else 8)
    names = ("env:", "resourcesPerNode") if is_train_job else ("", "resources")
    listed = [f"{indent}- {json.dumps(variable)}" for variable in environment]
    return filled(
        "kubernetes-trainjob.yaml" if is_train_job else "kubernetes-job.yaml",
        request,
        command=[f"{indent}- {json.dumps(word)}" for word in _command(request)],
        environment=[f"{indent}{names[0]}", *listed] if names[0] and listed else listed,
        resources=[f"{indent}{names[1]}: {json.dumps(limits)}"] if site.gpus_per_node else (),
        **{name: json.dumps(value) for name, value in values.items()},
    )


def _command(request: LaunchRequest) -> list[str]:
    """Return the command of a pod: the words alone, or in a shell after the lines of the site."""
    words, setup = request.train_words(), request.site.run.setup
    if setup:
        words = ["sh", "-c", "\n".join([*setup, 'exec "$@"']), "sh", *words]
    return [_literal(word) for word in words]


def _literal(text: str) -> str:
    """Return a text as Kubernetes passes it on: it replaces $(NAME) by a variable, and reads $$ as one $."""
    return re.sub(r"\$(?=[$(])", "$$", text)


# Slurm: srun starts one task for each rank, or one torchrun on each node. A run that nears its time limit, or is preempted, gets SIGTERM,
# saves, writes its summary and ends with status 143; the script then puts the job back into the queue, where it goes on by
# `--auto-resume`. Who gets the signal differs:
#
#     srun        --signal=TERM@120      the ranks themselves
#     torchrun    --signal=B:TERM@120    the script alone, which passes it on to the agents: an agent ends its ranks after a while
#                                        (30 s by default), and with a status that does not tell a saved run from a failed one
#
# A rank that fails ends the others, and so does one whose node is lost, where they notice before Slurm does. srun then ends with a
# status that does not tell these from each other: it is the highest of all tasks, and those that it ended itself have 143 or 137. So
# 143 is a stop only where there is a new summary, and every failure but 2, a mistake in what was given, puts the job back at most
# `restarts` times. A stop is not counted. Sources: sbatch(1), scancel(1), scontrol(1); torch.distributed.run.
_ADDRESS = (
    "# Rank 0 is on the first node of the job; its address is the one that Slurm itself uses.",
    'first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
    "MASTER_ADDR=$(scontrol show node \"$first\" | sed -n 's/.*NodeAddr=\\([^ ]*\\).*/\\1/p')",
    "export MASTER_ADDR",
)


def _slurm(request: LaunchRequest) -> str:
    """Return the batch script of Slurm."""
    slurm, torchrun = request.site.slurm, request.site.torchrun
    by_torchrun = slurm.by == "torchrun"
    named = {"partition": slurm.partition, "account": slurm.account, "qos": slurm.qos, "constraint": slurm.constraint}
    named |= {"time": slurm.time, "mem": slurm.memory}
    counts = {"gpus-per-node": slurm.gpus_per_node, "cpus-per-task": slurm.cpus_per_task}
    tasks = 1 if by_torchrun else request.ranks_per_node
    options = [f"--job-name={request.name}", f"--nodes={request.nodes}", f"--ntasks-per-node={tasks}"]
    options += [f"--{name}={value}" for name, value in (named | counts).items() if value]
    options += ["--output=%x-%j.log", "--open-mode=append", "--requeue"]
    options += [f"--signal={'B:' * by_torchrun}TERM@{slurm.signal_s}", *slurm.options]
    agent = ["torchrun", f"--nnodes={request.nodes}", f"--nproc-per-node={request.ranks_per_node}"]
    agent += ["--rdzv-backend=c10d", f"--max-restarts={torchrun.restarts}", *torchrun.options]
    return filled(
        "slurm-torchrun.sbatch" if by_torchrun else "slurm.sbatch",
        request,
        options=[f"#SBATCH {option}" for option in options],
        address=_ADDRESS if request.nodes > 1 or by_torchrun else (),
        summary=shell([f"{request.out}/{run_folder.SUMMARY}"]),
        restarts=str(slurm.restarts),
        wait_s=str(max(30, slurm.signal_s - 20)),
        torchrun=shell(agent),
    )


def _torchrun(request: LaunchRequest) -> str:
    """Return the command of torchrun, to be run on every host.

    Raises:
        InputError: the agents of several hosts have no address at which they meet.
    """
    torchrun = request.site.torchrun
    words = ["torchrun", f"--nnodes={request.nodes}", f"--nproc-per-node={request.ranks_per_node}"]
    words += [f"--max-restarts={torchrun.restarts}", *torchrun.options]
    if request.nodes == 1:
        words += ["--standalone"]
    else:
        endpoint = torchrun.endpoint or (f"{request.hosts[0]}:29400" if request.hosts else "")
        if not endpoint:
            raise InputError(
                "launch-nodes",
                '--on torchrun with several nodes needs an address: --nodes H1,H2, or endpoint = "HOST:PORT" in [torchrun] of --cluster',
            )
        words += ["--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}", f"--rdzv-id={request.name}"]
    return filled("torchrun.sh", request, torchrun=shell(words))


def _mpi(request: LaunchRequest) -> str:
    """Return the line of Open MPI or MPICH: it starts the ranks, and is asked which host has rank 0, since it gives them no address."""
    mpi = request.site.mpi
    hosts = mpi.hosts or request.hosts
    each, names = str(request.ranks_per_node), request.site.run.environment
    if mpi.by == "openmpi":
        base = ["mpirun", *(["--host", ",".join(f"{host}:{each}" for host in hosts)] if hosts else []), *mpi.options]
        ranks = ["--map-by", f"ppr:{each}:node", "--bind-to", "none", "-x", "MASTER_ADDR", "-x", "MASTER_PORT"]
        ranks += [word for name in names for word in ("-x", name)]
    else:
        base = ["mpiexec.hydra", *(["-hosts", ",".join(hosts)] if hosts else []), "-ppn", each, *mpi.options]
        ranks = ["-genvlist", ",".join(["PATH", "MASTER_ADDR", "MASTER_PORT", *names])]
    several = (
        "# Rank 0 is on the first host of mpirun's list.",
        f"MASTER_ADDR=$({shell([*base, '-n', '1', 'hostname'])})",
    )
    return filled(
        "mpi.sh",
        request,
        address=several if request.nodes > 1 else ("MASTER_ADDR=127.0.0.1",),
        port=str(mpi.port),
        mpirun=shell([*base, "-n", str(request.ranks), *ranks]),
    )


def _ssh(request: LaunchRequest) -> str:
    """Return the command that starts the agent of samestep on hosts, to be run where ssh reaches them.

    Raises:
        InputError: no hosts are named.
    """
    hosts = request.hosts or request.site.ssh.hosts
    if len(hosts) < 2:
        raise InputError(
            "launch-nodes",
            "--on ssh needs the names of two hosts or more. Use --nodes H1,H2, or hosts in [ssh] of --cluster",
        )
    if len(hosts) != request.nodes:
        raise InputError(
            "launch-nodes",
            f"--nodes {request.nodes}: [ssh] of --cluster names {len(hosts)} hosts. Use --nodes {len(hosts)}",
        )
    lines = request.setup()
    on_hosts = [f"export {ON_HOSTS}={shlex.quote(chr(10).join(lines))}"] if lines else []  # ssh passes no variables on
    return filled(
        "ssh.sh", request, on_hosts=on_hosts, train=shell([*request.train_words(), "--nodes", ",".join(hosts)])
    )


def _ray(request: LaunchRequest) -> str:
    """Return the command that hands a run to Ray Train, to be run where the cluster is reached."""
    ray = request.site.ray
    words = ["ray", "job", "submit", "--working-dir", ".", *(["--address", ray.address] if ray.address else [])]
    if request.site.run.environment:  # what is exported here does not reach the cluster
        words += ["--runtime-env-json", json.dumps({"env_vars": request.site.run.environment})]
    driver = ["python", "-m", "samestep.wings.cluster.engines.ray_job", *([request.job] if request.job else [])]
    driver += [word for setting in request.settings for word in ("--set", setting)]
    driver += ["--layout", request.layout] if request.layout else []
    driver += ["--ranks", str(request.ranks), "--out", request.out, "--failures", str(ray.failures)]
    driver += ["--cpus-per-rank", f"{ray.cpus_per_rank:g}", "--gpus-per-rank", f"{ray.gpus_per_rank:g}"]
    driver += ["--storage", ray.storage] if ray.storage else []
    return filled("ray.sh", request, submit=shell(words), run=request.name, driver=shell(driver))


@dataclass(frozen=True)
class Engine:
    """A way to start ranks on several machines: its script, and the command that takes it."""

    script: Callable[[LaunchRequest], str]
    suffix: str
    """The end of the script's name."""
    submit: tuple[str, ...]
    """The words that hand the script over, without its name."""


ENGINES: Mapping[str, Engine] = {
    "slurm": Engine(_slurm, ".sbatch", ("sbatch",)),
    "kubernetes": Engine(_kubernetes, ".yaml", ("kubectl", "apply", "-f")),
    "ray": Engine(_ray, ".sh", ("bash",)),
    "mpi": Engine(_mpi, ".sh", ("bash",)),
    "ssh": Engine(_ssh, ".sh", ("bash",)),
    "torchrun": Engine(_torchrun, ".sh", ("bash",)),
}


def engine_of(name: str) -> Engine:
    """Return the engine of a name.

    Raises:
        InputError: there is none.
    """
    if name not in ENGINES:
        raise InputError("engine-unknown", f"--on {name}{did_you_mean(str(name), ENGINES)}. Use {', '.join(ENGINES)}")
    return ENGINES[name]


def submit_script(on: str, file: Path) -> None:
    """Hand a script over to its engine.

    Raises:
        InputError: the engine's command is not here.
        RunError: it failed.
    """
    words = [*engine_of(on).submit, str(file)]
    try:
        status = subprocess.run(words, check=False).returncode
    except FileNotFoundError:
        raise InputError(
            "submit-failed", f"submit runs {words[0]}, which is not on this machine: copy {file} to one that has it"
        ) from None
    if status:
        raise RunError("submit-failed", f"{' '.join(words)} ended with status {status}")


def write_script(
    job: Job | str | os.PathLike[str] | None,
    on: str,
    emit: str | Path | None,
    submit: bool,
    *,
    cluster: str | Path | None,
    show: Callable[[str], None] = lambda text: None,
    **settings: Any,
) -> tuple[str, Path | None]:
    """Write the script with which an engine trains a job, and hand it over if `submit`.

    Args:
        job: a job, or the path of its file; None for the default job.
        on: the name of the engine.
        emit: the file to write the script to; with `submit` alone it is named after the job.
        submit: hand the script over to the engine, for which it is written to a file.
        cluster: a TOML file with the settings of the cluster (`launch_request.py`).
        show: takes the script before it is handed over.
        settings: the further arguments of `wanted_of`.

    Returns:
        The script, and its file, None if none was written.

    Raises:
        InputError: the job, the engine or the settings do not fit each other.
        RunError: the command of the engine failed.
    """
    engine = engine_of(on)
    path = _as_file(job, emit, submit) if isinstance(job, Job) else Path(job) if job else None
    request = wanted_of(path, **settings, site=read_site(cluster))
    text, file = engine.script(request), Path(emit or f"{request.name}{engine.suffix}")
    if emit or submit:
        write(file, text)
    show(text)
    if submit:
        submit_script(on, file)
    return text, file if emit or submit else None


def _as_file(job: Job, emit: str | Path | None, submit: bool) -> Path:
    """Write a job into the folder of the script that runs it, and return its path.

    Raises:
        InputError: no script is kept, so that the job has no place.
    """
    if emit is None and not submit:
        raise InputError(
            "command-options",
            'a job in memory is written beside its script. Use path="run.sbatch", or the path of a job file',
        )
    path = Path(emit or "job").with_suffix(".toml")
    write(path, job.to_toml(with_folder=True))
    return path
