"""The batch script of Slurm, with srun that starts one task for each rank, or one torchrun on each node.

A run that nears its time limit, or is preempted, gets SIGTERM, saves, writes its summary and ends with status 143; the script then
puts the job back into the queue, where it goes on by `--auto-resume`. Who gets the signal differs:

    srun        --signal=TERM@120      the ranks themselves
    torchrun    --signal=B:TERM@120    the script alone, which passes it on to the agents: an agent ends its ranks after a while
                                       (30 s by default), and with a status that does not tell a saved run from a failed one

A rank that fails ends the others, and so does one whose node is lost, where they notice before Slurm does. srun then ends with a
status that does not tell these from each other: it is the highest of all tasks, and those that it ended itself have 143 or 137. So
143 is a stop only where there is a new summary, and every failure but 2, a mistake in what was given, puts the job back at most
`restarts` times. A stop is not counted.

Sources: sbatch(1), scancel(1), scontrol(1); torch.distributed.run.
"""

from __future__ import annotations

from samestep.engines.wanted import LaunchRequest, shell
from samestep.training import run_folder

_FIRST_PORT = 20000


def script(wanted: LaunchRequest) -> str:
    """Return the batch script."""
    by_torchrun = wanted.site.slurm.by == "torchrun"
    tasks = 1 if by_torchrun else wanted.ranks_per_node
    lines = ["#!/bin/bash", *wanted.head("slurm", *_NOTES), *_options(wanted, tasks, "B:" if by_torchrun else ""), ""]
    lines += [*wanted.setup(), *_REQUEUE, *(_ADDRESS if wanted.nodes > 1 or by_torchrun else [])]
    return "\n".join([*lines, *(_torchrun_lines(wanted) if by_torchrun else _srun_lines(wanted))]) + "\n"


_NOTES = (
    "sbatch THIS_FILE starts the run, and again where it stopped. A run that nears its time limit or is preempted",
    "saves, and goes back into the queue.",
)
_REQUEUE = [
    "requeue() {  # unless it is cancelled",
    '    scontrol show job "$SLURM_JOB_ID" | grep -q JobState=RUNNING && scontrol requeue "$SLURM_JOB_ID"',
    "}",
]
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
        f"summary() {{ cat {shell([f'{wanted.out}/{run_folder.SUMMARY}'])} 2> /dev/null; }}",
        "",
        "before=$(summary)",
        f"srun --kill-on-bad-exit=1 {shell(wanted.train_words())}",
        "status=$?",
        'if [ $status -eq 143 ] && [ "$(summary)" != "$before" ]; then  # stopped, with a checkpoint',
        "    requeue",
        *_failed(wanted),
        "fi",
        "exit $status",
    ]


def _failed(wanted: LaunchRequest) -> list[str]:
    """Return the branch of a run that has failed, which goes on a few times; each time adds a line to a file of the job."""
    most = wanted.site.slurm.restarts
    return [
        "elif [ $status -ne 0 ] && [ $status -ne 2 ]; then  # a rank or a node is lost, or the run fails; 2 is a mistake",
        '    failures="$SLURM_JOB_NAME-$SLURM_JOB_ID.failures"',
        '    echo "$(date): status $status on $SLURM_JOB_NODELIST" >> "$failures"',
        f'    [ "$(wc -l < "$failures")" -le {most} ] && requeue',
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
        "    requeue",
        *_failed(wanted),
        "fi",
        "exit $status",
    ]
