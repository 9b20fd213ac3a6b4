"""The verbs that run a job or look at this machine: train, launch, verify, export, sample, evaluate, inspect, measure and doctor."""

from __future__ import annotations

import sys
from argparse import Namespace
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samestep import hardware
from samestep import job_files as jobs
from samestep.errors import InputError, LayoutError, WorkerError
from samestep.output import results
from samestep.output.results import Result, VerbFailure
from samestep.training import run_folder
from samestep.verbs.given_job import allowing, job_of, limit_threads, planned_job

if TYPE_CHECKING:
    from samestep.runtime.processes.meeting import Rendezvous


def train(words: Namespace) -> Result:
    """Train a job on this machine or on several hosts, or print what would run."""
    out = run_folder.newest() if words.resume and words.out is None else words.out
    goes_on = (words.resume or words.auto_resume) and words.job is None and out and (out / run_folder.JOB).exists()
    if goes_on:
        words.job = out / run_folder.JOB
    job = allowing(words)
    if goes_on and "code" not in words.allow:
        from samestep.training import foreign_code

        foreign_code.refuse(job, words.job, jobs.default(words.set))
    recorded = ({"record": words.record} if words.record else {}) | ({"record_kernels": True} if words.kernels else {})
    if recorded:
        job = job.model_copy(update={"train": type(job.train)(**{**job.train.model_dump(), **recorded})})
    limit_threads(job.run.threads)
    least_ranks, ranks = words.ranks
    given = {"layout": words.layout, "ranks": ranks, "steps": words.steps, "out": out}
    given |= {"resume": words.resume, "auto_resume": words.auto_resume, "init_from": words.init_from}
    given["allow_code"] = "code" in words.allow
    if words.dry_run:
        from samestep.training.check import dry_run

        nodes = words.nodes or "1"
        num_hosts = int(nodes) if nodes.isdecimal() else len(nodes.split(","))
        would = dry_run(job, **given, num_hosts=max(1, num_hosts))
        return Result(would.to_record, would.to_text())
    if words.nodes is not None and not words.nodes.isdecimal():
        from samestep.training import ssh

        status = ssh.start(words.nodes.split(","), words.rendezvous, goes_on=least_ranks is not None)
        return Result(lambda: {"hosts": words.nodes.split(","), "folder": out, "status": status}, status=status)
    from samestep.runtime.processes import join
    from samestep.training.train import train

    more = {"prove": words.prove, "rendezvous": _rendezvous(words), "least_ranks": least_ranks}
    summary = train(job, **given, **more)
    number = summary.stop_signal if summary else join.ended_by()
    return Result(summary.to_record if summary else None, status=128 + number if number else 0)


def launch(words: Namespace) -> Result:
    """Write the script of an engine of processes, and submit it if that is asked for."""
    from samestep.engines import scripts
    from samestep.engines.site import read_site
    from samestep.engines.wanted import wanted_of

    given = {"nodes": words.nodes, "ranks_per_node": words.ranks_per_node, "layout": words.layout, "out": words.out}
    site = read_site(words.site)
    wanted = wanted_of(words.job, **given, settings=words.set, name=words.name, site=site)
    suffix = scripts.engine_of(words.on).suffix
    text, file = scripts.emit(wanted, words.on, words.emit or (f"{wanted.name}{suffix}" if words.submit else None))
    print(text, end="", flush=True)
    if words.submit:
        scripts.submit(words.on, file)
    path = file if words.emit or words.submit else None
    return Result(lambda: {"engine": words.on, "script": text, "file": path, "submitted": words.submit})


def _rendezvous(words: Namespace) -> Rendezvous | None:
    """Return the rendezvous of the hosts of a run; None if this host runs alone."""
    given = {"--nodes": words.nodes, "--rendezvous": words.rendezvous, "--token-file": words.token_file}
    missing = [flag for flag, value in given.items() if value is None]
    if len(missing) == len(given):
        return None
    if missing:
        raise InputError(
            f"{' and '.join(missing)} missing: several hosts need --nodes N, --rendezvous HOST:PORT and --token-file FILE, "
            f"or --nodes H1,H2 alone, which starts them over ssh"
        )
    if int(words.nodes) < 2:
        raise InputError(f"--nodes {words.nodes}: a rendezvous is for 2 hosts or more; without it this one runs alone")
    from samestep.runtime.processes import meeting
    from samestep.training import ssh

    is_stream = words.token_file == Path("-")
    token = ssh.heed_standard_input() if is_stream else meeting.read_token(words.token_file)
    return meeting.Rendezvous.of(words.rendezvous, int(words.nodes), token)


def verify(words: Namespace) -> Result | VerbFailure:
    """Prove one layout, or all layouts of a number of devices.

    Raises:
        LayoutError: neither one layout nor all of a number of devices are asked for.
    """
    job = allowing(words)
    limit_threads(job.run.threads)
    from samestep.proof import verify

    if words.all == (words.layout is not None) or words.all != (words.devices is not None):
        raise LayoutError(
            'verify tries one layout, --layout "dp=2 tp=2", or all layouts of N devices, --all --devices 4'
        )
    given, verdicts = {"steps": words.steps, "precision": words.precision, "device": words.device}, []
    try:
        every = (
            verify.verify_all(job, words.devices, **given)
            if words.all
            else [verify.verify(job, layout=words.layout, **given)]
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
    from samestep.training.export import export

    given = {"dtype": words.dtype, "merge": words.merge, "ema": words.ema, "form": words.format}
    given["allow_code"] = "code" in words.allow
    written = export(words.run, words.out, **given)
    return Result(lambda: asdict(written), written.to_text())


def sample(words: Namespace) -> Result:
    """Write text with the model of a run."""
    from samestep.training.trained import printable, sample

    keys = ("chat", "tokens", "temperature", "seed", "ema")
    given = {key: getattr(words, key) for key in keys} | {"allow_code": "code" in words.allow}
    text = sample(words.run, words.prompt, **given)
    return Result(lambda: {"text": text}, printable(text))


def evaluate(words: Namespace) -> Result:
    """Compute the held-out loss of a run's checkpoint."""
    from samestep.training.trained import evaluate

    found = evaluate(words.run, samples=words.samples, ema=words.ema, allow_code="code" in words.allow)
    return Result(found.to_record, found.to_text())


def inspect(words: Namespace) -> Result:
    """Return what the trace of a job's model has shown."""
    job = planned_job(words)
    limit_threads(job.run.threads)
    from samestep.training.inspection import inspect

    found = inspect(job)
    return Result(found.to_record, found.to_text())


def measure(words: Namespace) -> Result:
    """Write this machine's hardware profile."""
    limit_threads(1)
    from samestep.measurement import profile

    if sys.stderr.isatty():
        print(
            "samestep: measuring products, copies and messages: two minutes, more where other programs run",
            file=sys.stderr,
        )
    machine = profile.measure(out=words.out, ranks=words.ranks, device=words.device)
    path = words.out or hardware.own_path()
    said = f"{profile.as_text(machine)}\nwritten: {path}, with the source of every number"
    return Result(lambda: {"file": path, "profile": asdict(machine)}, said)


def doctor(words: Namespace) -> Result:
    """Look at every host of an allocation."""
    job = None if words.job is None and not words.set else job_of(words)
    if words.nodes is not None and not words.nodes.isdecimal():
        from samestep.training import ssh

        hosts = words.nodes.split(",")
        status = ssh.start(hosts, words.rendezvous)
        return Result(lambda: {"hosts": hosts, "status": status}, status=status)
    from samestep.diagnosis.doctor import doctor

    given = {"folder": words.folder, "out": words.out, "wait_s": words.wait} | _doctor_meets(words)
    report = doctor(job, words.layout, words.hardware, **given, say=lambda text: print(text, flush=True))
    if words.json not in (None, results.STANDARD_OUTPUT) and not report.has_come:  # the leading process has the file
        words.json = words.json.with_name(f"{words.json.stem}.{report.host}{words.json.suffix}")
    return Result(report.to_record if report.told is None else None, status=report.status)


def _doctor_meets(words: Namespace) -> dict[str, Any]:
    """Return the hosts' rendezvous address and their secret, as far as the words say them."""
    if words.nodes is None and words.rendezvous is None and words.token_file is not None:
        from samestep.runtime.processes import meeting

        return {"token": meeting.read_token(words.token_file)}
    if (at := _rendezvous(words)) is None:
        return {}
    return {"rendezvous": (at.host, at.port, at.num_hosts), "token": at.token}
