"""The commands of the core: those that run a job or what it has left, and those that print a table; and how a command line names its job."""

from __future__ import annotations

import os
from argparse import Namespace
from dataclasses import asdict
from typing import Any

from samestep import hardware, wings
from samestep import job_files as jobs
from samestep.errors import InputError, JobError, LayoutError, WorkerError
from samestep.job import Job
from samestep.layout import Layout
from samestep.models import published
from samestep.models.presets import PRESETS
from samestep.output import temporary_folder
from samestep.output.results import Result, VerbFailure
from samestep.training import run_folder


def train(words: Namespace) -> Result:
    """Train a job on this machine or on several hosts, or print what would run."""
    out = run_folder.newest() if words.resume and words.out is None else words.out
    goes_on = (words.resume or words.auto_resume) and words.job is None and out and (out / run_folder.JOB).exists()
    if goes_on:
        words.job = out / run_folder.JOB
    words.set += [f"train.record={words.record}"] if words.record else []
    job = allowing(words)
    if goes_on and "code" not in words.allow:
        from samestep.training import foreign_code

        foreign_code.refuse(job, words.job, jobs.default(words.set))
    limit_threads(job.run.threads)
    least_ranks, ranks = words.ranks
    options = {"layout": words.layout, "ranks": ranks, "steps": words.steps, "out": out}
    options |= {"resume": words.resume, "auto_resume": words.auto_resume, "init_from": words.init_from}
    options["allow_code"] = "code" in words.allow
    if words.dry_run:
        from samestep.training.check import dry_run

        nodes = words.nodes or "1"
        num_hosts = int(nodes) if nodes.isdecimal() else len(nodes.split(","))
        would = dry_run(job, **options, num_hosts=max(1, num_hosts))
        return Result(would.to_record, would.to_text())
    if words.nodes is not None and not words.nodes.isdecimal():
        ssh = wings.required("cluster", "hosts.ssh")
        status = ssh.start(words.nodes.split(","), words.rendezvous, goes_on=least_ranks is not None)
        return Result(lambda: {"hosts": words.nodes.split(","), "folder": out, "status": status}, status=status)
    from samestep.runtime.processes import join
    from samestep.training.train import train

    more = {
        "prove": words.prove,
        "rendezvous": _rendezvous(words),
        "least_ranks": least_ranks,
        "name": words.heading[0],
    }
    summary = train(job, **options, **more)
    number = summary.stop_signal if summary else join.ended_by()
    return Result(summary.to_record if summary else None, status=128 + number if number else 0)


def launch(words: Namespace) -> Result:
    """Run a script on the ranks of this machine."""
    if words.layout is not None:
        Layout(words.layout)  # before torch is imported
    limit_threads(1)
    from samestep.runtime.processes import workers
    from samestep.training.launch import launch_script

    launch_script(words.script, words.arguments, ranks=words.ranks, layout=words.layout, device=words.device)
    number = workers.last_stop_signal()
    return Result(lambda: {"script": words.script}, status=128 + number if number else 0)


def _rendezvous(words: Namespace) -> Any:
    """Return the rendezvous of the hosts of a run, which the wing `cluster` knows; None if this host runs alone."""
    if all(value is None for value in (words.nodes, words.rendezvous, words.token_file)):
        return None
    return wings.required("cluster", "cluster_verbs").rendezvous_of(words)


def verify(words: Namespace) -> Result | VerbFailure:
    """Prove one layout, or all layouts of a number of devices.

    Raises:
        LayoutError: both one layout and all of a number of devices are asked for.
    """
    job = allowing(words)
    limit_threads(job.run.threads)
    from samestep.proof import verify

    if words.all != (words.devices is not None) or (words.all and words.layout is not None):
        raise LayoutError(
            "command-options",
            'verify tries one layout, --layout "dp=2 tp=2", or all layouts of N devices, --all --devices 4',
        )
    options, verdicts = {"steps": words.steps, "precision": words.precision, "device": words.device}, []
    try:
        every = (
            verify.verify_all(job, words.devices, **options)
            if words.all
            else [verify.verify(job, layout=words.layout, **options)]
        )
        for verdict in every:
            if words.all:
                print(verdict.to_line(), flush=True)
            verdicts.append(verdict)
    except WorkerError as error:
        return VerbFailure(error, 2)
    status = 0 if all(verdict.proven for verdict in verdicts) else 1
    if words.all:
        return Result(lambda: [verdict.to_record() for verdict in verdicts], status=status)
    return Result(verdicts[0].to_record, verdicts[0].to_text(), status)


def export(words: Namespace) -> Result:
    """Write the model of a run as a folder."""
    limit_threads(1)
    from samestep.training.trained import export

    options = {"dtype": words.dtype, "merge": words.merge, "ema": words.ema, "form": words.format}
    options["allow_code"] = "code" in words.allow
    written = export(words.run, words.out, **options)
    return Result(lambda: asdict(written), written.to_text())


def sample(words: Namespace) -> Result:
    """Write text with the model of a run."""
    from samestep.training.trained import printable, sample

    keys = ("chat", "tokens", "temperature", "seed", "ema")
    options = {key: getattr(words, key) for key in keys} | {"allow_code": "code" in words.allow}
    text = sample(words.run, words.prompt, **options)
    return Result(lambda: {"text": text}, printable(text))


def evaluate(words: Namespace) -> Result:
    """Compute the validation loss of a run's checkpoint."""
    from samestep.training.trained import evaluate

    scores = evaluate(words.run, samples=words.samples, ema=words.ema, allow_code="code" in words.allow)
    return Result(scores.to_record, scores.to_text())


def inspect(words: Namespace) -> Result:
    """Return what the trace of a job's model has shown."""
    job = planned_job(words)
    limit_threads(job.run.threads)
    from samestep.training.inspection import inspect

    inspection = inspect(job)
    return Result(inspection.to_record, inspection.to_text())


def layouts(words: Namespace) -> Result:
    """List the valid layouts, or say why one is not."""
    from samestep.enumeration import valid_layouts

    job = planned_job(words)
    if words.why_not is not None:
        layout = Layout(words.why_not)
        reason = valid_layouts.why_refused(job, layout, words.devices or layout.world_size)
        return Result(lambda: {"layout": words.why_not, "answer": reason}, reason)
    if words.pairs:
        pairs = [*valid_layouts.pairs(job)]
        return Result(lambda: [asdict(pair) for pair in pairs], valid_layouts.matrix(pairs, markdown=words.markdown))
    if words.devices is None:
        raise JobError("command-options", "layouts needs a number of devices. Use --devices 4, or --why-not LAYOUT")
    rows = valid_layouts.layouts(job, words.devices, switches=words.switches)
    text = valid_layouts.as_markdown(rows) if words.markdown else valid_layouts.as_text(rows, whole=words.whole)
    return Result(lambda: [valid_layouts.as_record(row) for row in rows], text)


def presets(_: Namespace) -> Result:
    """List the models that plan and simulate know by name."""
    return Result(published.preset_records, published.presets())


def profiles(words: Namespace) -> Result:
    """List the machines that plan and simulate know by name, or print one."""
    names = hardware.known() if words.show is None else (words.show,)
    text = hardware.profile_table() if words.show is None else hardware.as_written(words.show)
    return Result(lambda: {name: asdict(hardware.load(name)) for name in names}, text.rstrip("\n"))


def job_of(words: Namespace) -> Job:
    """Return the job of a file, or the default job, with the settings of the command line; the heading of the text names it.

    Raises:
        InputError: there is no such file, and the name is that of a preset.
    """
    name = "" if words.job is None else words.job.name.lower().removeprefix("preset:")
    if name in PRESETS and not words.job.exists():
        raise InputError(
            "job-file-missing", f"no job file at {words.job}. To plan or simulate, use --set model.source=preset:{name}"
        )
    if "=" in name and not words.job.exists():
        raise InputError(
            "job-file-missing",
            f'no job file at {words.job}. If it belongs to the layout, use quotes: --layout "dp=2 {name}"',
        )
    shown = ", ".join([*words.set[:2], *([f"{len(words.set) - 2} more"] if len(words.set) > 2 else [])])
    words.heading = [f"job: {words.job or 'built-in default'}{f', changed by --set: {shown}' if shown else ''}"]
    return jobs.default(words.set) if words.job is None else jobs.load(words.job, words.set)


def allowing(words: Namespace) -> Job:
    """Return the job of a command that runs, with the checks that the command line skips.

    Raises:
        LayoutError: the layout of the command line cannot be read. That is found here, before torch is imported.
    """
    if words.layout not in (None, "auto"):
        Layout(words.layout)
    job = job_of(words)
    allow = tuple(dict.fromkeys((*job.run.allow, *(word for word in words.allow if word != "code"))))
    return job.model_copy(update={"run": job.run.model_copy(update={"allow": allow})})


def planned_job(words: Namespace) -> Job:
    """Return the job of a command that predicts; the heading of its text says how a preset is planned."""
    job = job_of(words)
    words.heading += [note] if (note := published.as_published(job)[1]) else []
    return job


def limit_threads(count: int) -> None:
    """Set the number of threads of torch, which is imported later: a process whose thread pool has run cannot be forked."""
    for name, value in {"OMP_NUM_THREADS": str(count), **temporary_folder.compiler_cache()}.items():
        os.environ.setdefault(name, value)


def say_cautions(words: Namespace, machine: hardware.Hardware, devices: int) -> None:
    """Add to the heading why the default hardware profile may not describe this machine; a profile that the user names is trusted."""
    words.heading += hardware.cautions_here(machine, devices) if words.hardware is None else []
