"""The command line: parse words, call one function, print. Each verb is imported when it is called.

Exit status: 0 done, 1 a run failed (a worker died, numbers are not finite), 2 what was given cannot run.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from collections.abc import Sequence
from importlib import metadata, resources
from pathlib import Path
from typing import Any

from samestep import job as jobs
from samestep.errors import LayoutError, NonFiniteError, SamestepError, WorkerError
from samestep.layout import Layout


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb; return the exit status. A user's mistake prints one line, never a traceback."""
    warnings.showwarning = _say_warning
    words = _parser().parse_args(arguments)
    try:
        return int(words.verb(words) or 0)
    except (NonFiniteError, WorkerError) as error:
        return _fail(error, 1)
    except SamestepError as error:
        return _fail(error, 2)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        sys.stderr.close()
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="samestep",
        description="Distributed training for PyTorch: changing the layout never changes the result.",
    )
    parser.add_argument("--version", action="version", version=f"samestep {metadata.version('samestep')}")
    verbs = parser.add_subparsers(title="verbs", required=True, metavar="VERB")
    _add_train(verbs)
    _add_simulate(verbs)
    _add_layouts(verbs)
    env = verbs.add_parser("env", help="versions and devices, for a bug report")
    env.set_defaults(verb=_env)
    return parser


def _add_job(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("job", nargs="?", type=Path, metavar="JOB.toml", help="default: samestep's own default job")
    parser.add_argument("--layout", metavar='"dp=2 zero=3"', help="where: layout words; default: the job's own")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a key of the job")


def _add_train(verbs: Any) -> None:
    parser = verbs.add_parser("train", help="train a job on this machine, or as a rank of torchrun or srun")
    _add_job(parser)
    parser.add_argument("--ranks", type=_positive, metavar="N", help="worker processes; default: as the layout says")
    parser.add_argument("--steps", type=_positive, metavar="N", help="end after step N; the schedule stays as it is")
    parser.add_argument("--out", type=Path, metavar="DIR", help="run folder; default: a new one below runs/")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint in the run folder")
    parser.add_argument("--dry-run", action="store_true", help="print what would run, and start nothing")
    parser.set_defaults(verb=_train)


def _add_simulate(verbs: Any) -> None:
    parser = verbs.add_parser("simulate", help="print the step as a program and play it on a clock; needs no torch")
    _add_job(parser)
    parser.add_argument("--hardware", default="cpu-laptop", metavar="NAME|FILE", help="default: cpu-laptop")
    parser.add_argument("--devices", type=_positive, metavar="N", help="must equal the layout's ranks")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="write a Chrome trace (Perfetto opens it)")
    parser.set_defaults(verb=_simulate)


def _add_layouts(verbs: Any) -> None:
    parser = verbs.add_parser("layouts", help="which layouts a job may have on N devices, and why not the others")
    parser.add_argument("job", nargs="?", type=Path, metavar="JOB.toml", help="default: samestep's own default job")
    parser.add_argument("--devices", type=_positive, required=True, metavar="N")
    parser.add_argument("--why-not", metavar='"dp=2 ..."', help="say what one layout is refused for")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a key of the job")
    parser.add_argument("--markdown", action="store_true", help="print the table for a document")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table")
    parser.set_defaults(verb=_layouts)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return number


def _job(words: argparse.Namespace) -> jobs.Job:
    """Read the job that the words name; a resumed run goes on with its own."""
    path = words.job
    if path is None and getattr(words, "resume", False) and words.out is not None:
        own = words.out / "job.toml"
        path = own if own.exists() else None
    if path is not None:
        return jobs.load(path, words.set)
    with resources.as_file(resources.files("samestep") / "default_job.toml") as default:
        return jobs.load(default, words.set)


def _train(words: argparse.Namespace) -> int:
    # Before torch is imported: a process that has used an OpenMP pool cannot be forked.
    job = _job(words)
    os.environ.setdefault("OMP_NUM_THREADS", str(job.run.threads))
    from samestep.training import train

    if words.dry_run:
        return _dry_run(words, job)
    train(job, layout=words.layout, ranks=words.ranks, steps=words.steps, out=words.out, resume=words.resume)
    return 0


def _dry_run(words: argparse.Namespace, job: jobs.Job) -> int:
    from samestep.memory import at_rest
    from samestep.strategies import program_of
    from samestep.training import Workload, resolve_layout, step_samples

    layout, ranks = resolve_layout(job, words.layout, words.ranks)
    workload = Workload(job)
    program = program_of(workload.spec, job, layout)
    print(job.to_toml())
    print(f'layout "{layout}": {ranks} ranks, {program.step.num_microbatches} micro-batches of at most ', end="")
    print(f"{program.step.microbatch_samples} samples")
    samples = step_samples(job, layout, workload.dataset)
    for rank in range(ranks):
        use = at_rest(program, rank=rank)
        print(
            f"rank {rank}: weights {use.weights:,} B, gradients {use.gradients:,} B, optimizer {use.optimizer:,} B; "
            f"samples of step 1: {' '.join(map(str, samples[rank]))}"
        )
    return 0


def _simulate(words: argparse.Namespace) -> int:
    from samestep import catalog, clock, hardware, memory
    from samestep.strategies import program_of

    job = _job(words)
    machine = hardware.load(words.hardware)
    layout = Layout.parse(words.layout) if words.layout is not None else Layout.of(job.layout)
    if words.devices not in (None, layout.world_size):
        if words.layout is not None or job.layout:
            raise LayoutError(
                f"--devices {words.devices}, but layout {str(layout)!r} has {layout.world_size} ranks: "
                "leave --devices out, or let the degrees multiply to it"
            )
        layout = Layout(dp_replicate=words.devices)
    program = program_of(catalog.model_spec(job), job, layout, job.run.ranks_per_node or machine.devices_per_node)
    timeline = clock.play(program, machine)
    use = memory.during_step(program)
    _print_program(program)
    print(timeline.to_text(100))
    numbers = {
        "layout": str(layout),
        "hardware": machine.name,
        "devices": layout.world_size,
        "step_s": timeline.step_s,
        "samples_per_s": program.step.global_batch / timeline.step_s,
        "exposed_comm_s": timeline.exposed_s(0),
        "memory_bytes": {
            "weights": use.weights,
            "gradients": use.gradients,
            "optimizer": use.optimizer,
            "activations": use.activations,
            "buffers": use.buffers,
            "peak": use.total,
        },
    }
    print(json.dumps(numbers, indent=1))
    if words.json:
        words.json.write_text(json.dumps(numbers, indent=1) + "\n")
    if words.trace:
        words.trace.write_text(json.dumps(timeline.to_chrome_trace()))
    return 0


def _layouts(words: argparse.Namespace) -> int:
    from samestep import catalog, legality

    job = _job(words)
    model = catalog.model_spec(job)
    if words.why_not is not None:
        row = legality.row_of(model, job, Layout.parse(words.why_not))
        print(row.reason or f'"{row.layout}" is legal')
        return 0
    rows = [legality.row_of(model, job, layout) for layout in legality.layouts_of(words.devices)]
    print(legality.as_markdown(rows) if words.markdown else legality.as_text(rows))
    if words.json:
        words.json.write_text(json.dumps([legality.as_record(row) for row in rows], indent=1) + "\n")
    return 0


def _print_program(program: Any) -> None:
    """Print tasks and bodies: the step as data."""
    tasks = " ".join(f"{task.body}[{task.microbatch}]" for task in program.stages[0])
    print(f'program of "{program.step.layout}": {tasks}')
    for key, ops in program.bodies.items():
        print(f"  {key}")
        for op in ops:
            size = f"{op.size_bytes:>12,} B {op.dtype} over {op.axis}" if op.axis else f"{op.flops:>12,} FLOPs"
            print(f"    {op.name:<40} {size}{'  (by FSDP2)' if op.implied else ''}")


def _env(words: argparse.Namespace) -> int:
    import platform

    print(f"python {platform.python_version()} on {platform.platform()}, {os.cpu_count()} cores")
    for package in ("samestep", "torch", "numpy", "transformers", "tokenizers", "safetensors"):
        try:
            print(package, metadata.version(package))
        except metadata.PackageNotFoundError:
            print(package, "is not installed")
    import torch

    for index in range(torch.cuda.device_count()):
        print("GPU", index, torch.cuda.get_device_name(index))
    return 0


def _fail(error: Exception, status: int) -> int:
    print(f"samestep: {error}", file=sys.stderr)
    return status


def _say_warning(message: Warning | str, category: Any, *_: Any, **__: Any) -> None:
    """Print a warning as one line; those of libraries under us are for developers."""
    if category is UserWarning:
        print(f"samestep: warning: {message}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
