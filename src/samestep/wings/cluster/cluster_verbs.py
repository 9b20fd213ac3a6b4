"""The commands of this wing, submit and doctor, and the words of `train` for several hosts."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samestep.errors import InputError
from samestep.output import results
from samestep.output.results import Result
from samestep.verbs import job_of

if TYPE_CHECKING:
    from samestep.wings.cluster.hosts.meeting import Rendezvous


def submit(words: Namespace) -> Result:
    """Submit a job to an engine, or write or print the script for it."""
    from samestep.wings.cluster.engines import scripts

    submits = not (words.dry_run or words.write)
    settings = {"nodes": words.nodes, "ranks_per_node": words.ranks_per_node, "layout": words.layout, "out": words.out}
    settings |= {"settings": words.set, "name": words.name}
    settings |= {"cluster": words.cluster, "show": lambda text: print(text, end="", flush=True)}
    text, file = scripts.write_script(words.job, words.on, words.write, submits, **settings)
    return Result(lambda: {"engine": words.on, "script": text, "file": file, "submitted": submits})


def doctor(words: Namespace) -> Result:
    """Look at every host of an allocation."""
    job = None if words.job is None and not words.set else job_of(words)
    if words.nodes is not None and not words.nodes.isdecimal():
        from samestep.wings.cluster.hosts import ssh

        hosts = words.nodes.split(",")
        status = ssh.start(hosts, words.rendezvous)
        return Result(lambda: {"hosts": hosts, "status": status}, status=status)
    from samestep.wings.cluster.diagnosis.doctor import doctor

    options = {"folder": words.folder, "out": words.out, "wait_s": words.wait} | _doctor_meets(words)
    report = doctor(job, words.layout, words.hardware, **options, say=lambda text: print(text, flush=True))
    if words.json not in (None, results.STANDARD_OUTPUT) and not report.has_come:  # the leading process has the file
        words.json = words.json.with_name(f"{words.json.stem}.{report.host}{words.json.suffix}")
    return Result(report.to_record if report.told is None else None, status=report.status)


def _doctor_meets(words: Namespace) -> dict[str, Any]:
    """Return the hosts' rendezvous address and their secret, as far as the words say them."""
    if words.nodes is None and words.rendezvous is None and words.token_file is not None:
        from samestep.wings.cluster.hosts import meeting

        return {"token": meeting.read_token(words.token_file)}
    if (at := rendezvous_of(words)) is None:
        return {}
    return {"rendezvous": (at.host, at.port, at.num_hosts), "token": at.token}


def rendezvous_of(words: Namespace) -> Rendezvous | None:
    """Return the rendezvous of the hosts of a run; None if this host runs alone.

    Raises:
        InputError: some of the three flags are missing, or there are fewer than two hosts.
    """
    flags = {"--nodes": words.nodes, "--rendezvous": words.rendezvous, "--token-file": words.token_file}
    missing = [flag for flag, value in flags.items() if value is None]
    if len(missing) == len(flags):
        return None
    if missing:
        raise InputError(
            "launch-nodes",
            f"{' and '.join(missing)} missing: several hosts need --nodes N, --rendezvous HOST:PORT and --token-file FILE, "
            f"or --nodes H1,H2 alone, which starts them over ssh",
        )
    if int(words.nodes) < 2:
        raise InputError(
            "launch-nodes",
            f"--nodes {words.nodes}: --rendezvous needs 2 hosts or more. To run on this host alone, leave it out",
        )
    from samestep.wings.cluster.hosts import meeting, ssh

    is_stream = words.token_file == Path("-")
    token = ssh.heed_standard_input() if is_stream else meeting.read_token(words.token_file)
    return meeting.Rendezvous.of(words.rendezvous, int(words.nodes), token)
