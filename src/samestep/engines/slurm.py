"""The batch script of Slurm, with srun that starts one task for each rank, or one torchrun on each node.

A run that nears its time limit, or is preempted, gets SIGTERM, saves and ends with status 143; the script then puts the job back
into the queue, where it goes on by `--auto-resume`. Who gets the signal differs:

    srun        --signal=TERM@120      the ranks themselves
    torchrun    --signal=B:TERM@120    the script alone, which passes it on to the agents: an agent ends its ranks after a while
                                       (30 s by default), and with a status that does not tell a saved run from a failed one

Sources: sbatch(1), scancel(1), scontrol(1); torch.distributed.run.
"""

from __future__ import annotations

from samestep.engines.wanted import LaunchRequest, shell

_FIRST_PORT = 20000


def script(wanted: LaunchRequest) -> str:
    """Return the batch script."""
    by_torchrun = wanted.site.slurm.by == "torchrun"
    tasks = 1 if by_torchrun else wanted.ranks_per_node
    lines = ["#!/bin/bash", *wanted.head("slurm", *_NOTES), *_options(wanted, tasks, "B:" if by_torchrun else ""), ""]
    lines += [*wanted.setup(), *(_ADDRESS if wanted.nodes > 1 or by_torchrun else [])]
    return "\n".join([*lines, *(_torchrun_lines(wanted) if by_torchrun else _srun_lines(wanted))]) + "\n"


_NOTES = (
    "sbatch THIS_FILE starts the run, and again where it stopped. A run that nears its time limit or is preempted",
    "saves, and goes back into the queue.",
)
_REQUEUE = 'scontrol show job "$SLURM_JOB_ID" | grep -q JobState=RUNNING && scontrol requeue "$SLURM_JOB_ID"  # unless it is cancelled'
_ADDRESS = [
    "# Rank 0 is on the first node of the job; its address is the one that Slurm itself uses.",
    'first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
    "MASTER_ADDR=$(scontrol show node \"$first\" | sed -n 's/.*NodeAddr=\\([^ ]*\\).*/\\1/p')",
    "export MASTER_ADDR",
]


def _options(wanted: LaunchRequest, tasks: int, to: str) -> list[str]:
    """Return the options of sbatch, one a line."""
    slurm = wanted.site.slurm
    named = {"partition": slurm.partition, "account": slurm.account, "qos": slurm.qos, "constraint": slurm.constraint}
    named |= {"time": slurm.time, "mem": slurm.memory}
    counts = {"gpus-per-node": slurm.gpus_per_node, "cpus-per-task": slurm.cpus_per_task}
    options = [f"--job-name={wanted.name}", f"--nodes={wanted.nodes}", f"--ntasks-per-node={tasks}"]
    options += [f"--{name}={value}" for name, value in (named | counts).items() if value]
    options += ["--output=%x-%j.log", "--open-mode=append", "--requeue", f"--signal={to}TERM@{slurm.signal_s}"]
    return [f"#SBATCH {option}" for option in (*options, *slurm.options)]


def _srun_lines(wanted: LaunchRequest) -> list[str]:
    return [
        "",
        f"srun --kill-on-bad-exit=1 {shell(wanted.train_words())}",
        "status=$?",
        "if [ $status -eq 143 ]; then  # stopped, with a checkpoint",
        f"    {_REQUEUE}",
        "fi",
        "exit $status",
    ]


def _torchrun_lines(wanted: LaunchRequest) -> list[str]:
    torchrun = wanted.site.torchrun
    words = ["torchrun", f"--nnodes={wanted.nodes}", f"--nproc-per-node={wanted.ranks_per_node}", "--rdzv-backend=c10d"]
    words += [f"--max-restarts={torchrun.restarts}", *torchrun.options]
    wait_s = max(30, wanted.site.slurm.signal_s - 20)
    return [
        f"port=$(({_FIRST_PORT} + SLURM_JOB_ID % 10000))",
        f"export TORCH_ELASTIC_SHUTDOWN_TIMEOUT={wait_s}  # seconds that the agents leave the ranks to save",
        "",
        "stopped=0",
        "trap 'stopped=1; scancel --signal=TERM \"$SLURM_JOB_ID\"' TERM  # to the tasks, not to this script",
        f'srun {shell(words)} --rdzv-endpoint="$MASTER_ADDR:$port" --rdzv-id="$SLURM_JOB_ID-${{SLURM_RESTART_COUNT:-0}}" \\',
        f"    --no-python {shell(wanted.train_words())} &",
        "wait $!",
        "status=$?",
        "if [ $stopped -eq 1 ]; then",
        "    wait $!  # the trap has ended the first wait",
        f"    {_REQUEUE}",
        "fi",
        "exit $status",
    ]
