"""The job that a command line names, as a verb that runs and a verb that predicts take it."""

from __future__ import annotations

import os
from argparse import Namespace

from samestep import hardware
from samestep import job_files as jobs
from samestep.errors import InputError
from samestep.job import Job
from samestep.models import published
from samestep.models.presets import PRESETS
from samestep.output import temporary_folder


def job_of(words: Namespace) -> Job:
    """Return the job of a file, or the default job, with the settings of the command line.

    Raises:
        InputError: there is no such file, and the name is that of a preset.
    """
    if words.job is None:
        return jobs.default(words.set)
    name = words.job.name.lower().removeprefix("preset:")
    if not words.job.exists() and name in PRESETS:
        raise InputError(f"no job file at {words.job}; to plan and simulate, --set model.source=preset:{name} works")
    return jobs.load(words.job, words.set)


def allowing(words: Namespace) -> Job:
    """Return the job of a verb that runs, with the refusals that the command line waives too."""
    job = job_of(words)
    allow = tuple(dict.fromkeys((*job.run.allow, *(word for word in words.allow if word != "code"))))
    return job.model_copy(update={"run": job.run.model_copy(update={"allow": allow})})


def planned_job(words: Namespace) -> Job:
    """Return the job of a verb that predicts, and say how a preset is planned."""
    job = job_of(words)
    if note := published.as_published(job)[1]:
        print(note)
    return job


def limit_threads(count: int) -> None:
    """Set the number of threads of torch, which is imported later: a process whose thread pool has run cannot be forked."""
    for name, value in {"OMP_NUM_THREADS": str(count), **temporary_folder.compiler_cache()}.items():
        os.environ.setdefault(name, value)


def say_cautions(words: Namespace, machine: hardware.Hardware, devices: int) -> None:
    """Print why the default hardware profile may not describe this machine; a profile that the user names is trusted."""
    for line in hardware.cautions_here(machine, devices) if words.hardware is None else ():
        print(line)
